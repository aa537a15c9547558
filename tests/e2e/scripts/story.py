"""The life of a run on several nodes, from the first step to the end by force; test_two_nodes.py says what must hold.

Usage: story.py FOLDER [layout|parity|all]. Weight updates: 1, 2 training; 3..7 parity; 8 lies; 9 heals; 10 is lost;
11 heals; 12 has a stale head.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import RANK, WORLD, Recorder, make_trainer, perturb, write_result

from multinode_kit.models import tiny_qwen2
from trl_multinode.engine.stream import Request
from trl_multinode.errors import MultiNodeError

folder, until = sys.argv[1], sys.argv[2]
PROMPTS = [f"{i} + {i + 1} =" for i in range(64)]


def main() -> None:
    recorder = Recorder()
    trainer = make_trainer(
        tiny_qwen2(), recorder, folder, PROMPTS, per_device_train_batch_size=4, learning_rate=1e-2, max_steps=2,
        rollout_seed=5, sync_bucket_mb=0.04,
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    write_result(folder, "layout", world=WORLD, rows=recorder.rows, losses=losses)
    if until == "parity":
        write_result(folder, "parity", **five_updates(trainer))
    if until != "all":
        return
    story = {"sharded": [parameter.numel() for parameter in trainer.model.parameters()]}
    story |= isolation(trainer) | parity(trainer) | noticed(trainer) | link_bytes(trainer)
    write_result(folder, "story", **story)
    until_killed(trainer)


def isolation(trainer) -> dict:
    """Who this rank's engine is, and whether other nodes' folders can be seen."""
    engines = trainer.vllm_generation.engines
    mine = str(next(Path(p) for p in sockets(engines)).parent)
    everyone: list = [None] * WORLD
    dist.all_gather_object(everyone, mine)
    others = [path for path in everyone if path != mine]
    maps = Path("/proc/self/maps").read_text()
    slots = sorted(
        # device and inode of a file without a name
        {" ".join(line.split()[3:5]) for line in maps.splitlines() if "/dev/shm/#" in line}
    )
    return {
        "engine_pid": engines[0].ready.pid,
        "folder": mine,
        "visible_folders_of_others": [path for path in others if Path(path).exists()],
        "slots": slots,
    }


def sockets(engines) -> list[str]:
    return [engine._connection._socket.getpeername() for engine in engines]


def sync(trainer) -> None:
    """Also at an unchanged step."""
    trainer.weights_changed()
    trainer.vllm_generation.sync_weights()


def difference(trainer) -> float:
    """Largest |engine - trainer| log-prob over this rank's rows, checked with one forward on every rank."""
    prompt = [10 + RANK, 20, 30]
    update = trainer.vllm_generation.version.update
    request = Request(prompt, 4, seed=RANK)
    rows = trainer.vllm_generation.engines.generate([request], 12, {"ignore_eos": True}, update)[0]
    ids = torch.tensor([prompt + row.tokens.tolist() for row in rows])
    with torch.no_grad():
        scores = trainer.model(ids).logits[:, 2:-1].log_softmax(-1)
    expected = scores.gather(2, ids[:, 3:, None])[:, :, 0]
    got = torch.stack([torch.from_numpy(row.logprobs.copy()) for row in rows])
    return (got - expected).abs().max().item()


def five_updates(trainer) -> dict:
    """Before and after each of 5 syncs."""
    result: dict = {"stale": [], "fresh": []}
    for _ in range(5):
        perturb(trainer.model)
        result["stale"].append(difference(trainer))
        sync(trainer)
        result["fresh"].append(difference(trainer))
    return result


def parity(trainer) -> dict:
    """Before and after 1 and 5 syncs, then with a load that was suppressed, then healed."""
    result = five_updates(trainer)
    perturb(trainer.model)
    sync(trainer)  # update 8: lies
    result["suppressed"] = difference(trainer)
    sync(trainer)
    result["healed"] = difference(trainer)
    return result


def noticed(trainer) -> dict:
    """A lost load is a wrong version; a stale head trips the watched log-prob difference."""
    lost = message(lambda: (sync(trainer), generate_once(trainer)))
    perturb(trainer.model)
    sync(trainer)
    healed = difference(trainer)
    perturb(trainer.model)
    trainer.weights_changed()
    rows = [{"prompt": PROMPTS[0]} for _ in range(4)]
    stale_head = message(lambda: loss_of_a_round(trainer, rows))
    sync(trainer)
    return {"lost": lost, "healed_again": healed, "stale_head": stale_head}


def loss_of_a_round(trainer, rows: list[dict]) -> None:
    """The round and its loss, as in the last micro-step of an optimizer step; the alarm precedes the backward pass."""
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    trainer.compute_loss(trainer.model_wrapped, trainer._generate_and_score_completions(rows))


def generate_once(trainer, num_tokens: int = 4) -> None:
    generation = trainer.vllm_generation
    generation.max_completion_length, generation.generation_kwargs["ignore_eos"] = num_tokens, True
    generation.generate([[10 + RANK, 20, 30]] * 4, None, 4)


def message(action) -> str:
    try:
        action()
    except MultiNodeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def link_bytes(trainer) -> dict:
    """Bytes on the node's link while 16 and while 512 tokens are generated, and while nothing happens for as long."""
    result = {}
    for tokens in (16, 512):
        dist.barrier()
        start, before = time.monotonic(), counters()
        generate_once(trainer, tokens)
        middle, during = time.monotonic(), counters()
        time.sleep(middle - start)
        result[f"bytes_{tokens}"], result[f"bytes_idle_{tokens}"] = (
            during - before,
            counters() - during,
        )
        result[f"seconds_{tokens}"] = middle - start
    return result


def counters() -> int:
    statistics = Path("/sys/class/net/eth0/statistics")
    return (
        sum(int((statistics / name).read_text()) for name in ("rx_bytes", "tx_bytes"))
        if statistics.exists()
        else 0
    )


def until_killed(trainer) -> None:
    with trainer.host.watch.guard():
        print("LOOPING", flush=True)
        for _ in range(10_000):
            sync(trainer)
            generate_once(trainer)
            dist.barrier()


main()
