"""Trainers of TRL on several nodes, one after another in one process. Usage: trainers.py FOLDER NAME...

Each trains here; then as TRL alone has it, with what our generation returned replayed to TRL's own class, the same
data and the same seed; then here again, from a checkpoint of the first run.
"""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import trl
from common import Recorder, perturb, write_result
from datasets import Dataset
from transformers import AutoTokenizer, set_seed
from trl.generation import vllm_generation

import trl_multinode

folder = Path(sys.argv[1])
STUDENT, TEACHER = str(folder / "student"), str(folder / "teacher")
SEQUENCE = list(range(10, 40))
PROMPTS = Dataset.from_dict({"prompt": [f"{i} + {i + 1} =" for i in range(64)]})
HINTS = PROMPTS.add_column("privileged_context", [str(2 * i + 1) for i in range(64)])
CHATS = Dataset.from_list([
    {"messages": [{"role": "user", "content": f"{i} + {i} ="}, {"role": "assistant", "content": f" {2 * i}"}]}
    for i in range(64)
])  # fmt: skip

GROUPS = {"num_generations": 4, "steps_per_generation": 4}  # a round serves two optimizer steps

# What a trainer is called with, and settings of its own
CALLS: dict[str, tuple[Callable[[], dict], dict]] = {
    "RLOO": (lambda: {"reward_funcs": Recorder(), "train_dataset": PROMPTS}, GROUPS),
    "Distillation": (lambda: {"teacher_model": TEACHER, "train_dataset": PROMPTS}, {}),
    "SDFT": (lambda: {"train_dataset": HINTS}, GROUPS),
    "SDPO": (lambda: {"reward_funcs": Recorder(), "train_dataset": PROMPTS}, GROUPS | {"teacher_model_kind": "live"}),
    "GOLD": (
        lambda: {"teacher_model": TEACHER, "train_dataset": CHATS},
        {"lmbda": 1.0, "max_length": 64, "vllm_sync_frequency": 2},
    ),
    "IWOPD": (lambda: {"teacher_model": TEACHER, "train_dataset": CHATS}, {"max_length": 64}),
    "GMPO": (lambda: {"reward_funcs": Recorder(), "train_dataset": PROMPTS}, GROUPS),
    "ServerDistillation": (
        lambda: {"train_dataset": PROMPTS}, {"teacher_model_server_url": os.environ.get("TEACHER_URL")},
    ),
}  # fmt: skip
# Settings of node mode that must not change what TRL computes
OF_NODE_MODE = {"GMPO": {"micro_batch_tokens": 64, "rehearse_longest": True}}
# to resume from; GOLD's is one at which weights are sent
CHECKPOINT = dict.fromkeys(CALLS, 3) | {"GOLD": 2}
NOT_CLOSED = "RLOO"  # dropped when it has resumed; the next trainer ends its engines
dropped: list[int] = []  # pids of its engines
GENERATES_IN_EVALUATION = ("RLOO", "Distillation", "SDFT", "SDPO", "GMPO", "ServerDistillation")


def make(home, name: str, **more):
    call, settings = CALLS[name]
    common = {
        "output_dir": str(folder / name), "use_cpu": True, "bf16": False, "use_vllm": True, "report_to": [],
        "max_completion_length": 12, "logging_steps": 1, "save_strategy": "no", "gradient_checkpointing": False,
        "disable_tqdm": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 5,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant",
    }  # fmt: skip
    args = getattr(home, f"{name}Config")(**common | settings | more)
    tokenizer = AutoTokenizer.from_pretrained(STUDENT)
    return getattr(home, f"{name}Trainer")(STUDENT, args=args, processing_class=tokenizer, **call())


def train(trainer, resume: str | None = None) -> dict:
    set_seed(3)  # TRL shuffles a round's rows among its micro-batches
    trainer.train(resume_from_checkpoint=resume)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    # gathered from all ranks
    texts = getattr(trainer, "_logs", getattr(trainer, "_textual_logs", {"prompt": []}))
    logs = {name: [entry[name] for entry in steps] for name in ("loss", "grad_norm")}
    return logs | {"texts": len(texts["prompt"])}


def on_our_engines(name: str) -> tuple[dict, list]:
    saving = {"save_strategy": "steps", "save_steps": CHECKPOINT[name]}
    trainer = make(trl_multinode, name, rollout_seed=5, **saving, **OF_NODE_MODE.get(name, {}))
    micro_rows = count_rows(trainer)
    dropped_run = [Path(f"/proc/{pid}").exists() for pid in dropped]
    generation, calls, versions = trainer.vllm_generation, [], []
    generate = generation.generate

    def recorded(**keywords):
        found = generate(**keywords)
        calls.append(
            [
                keywords["prompts"],
                *(found[1:2]),
                *(part and [list(row) for row in part] for part in found[2:]),
            ]
        )
        versions.append([row.version.update for row in generation.rows])
        return found

    with mock.patch.object(generation, "generate", recorded):
        logs = train(trainer)
    result = logs | {
        "world": trainer.accelerator.num_processes,
        "metrics": sorted(
            {key for entry in trainer.state.log_history if "loss" in entry for key in entry}
        ),
        "sharded": all(parameter.numel() == 0 for parameter in trainer.model.parameters()),
        "versions": versions,
        "dropped_run": dropped_run,
        "rows": sum(len(call[1]) for call in calls),
        "tokens": sum(len(ids) for call in calls for ids in call[1]),
        "returns_logprobs": calls[0][2] is not None,
        "micro_rows": sorted(micro_rows),
        "monitor": trainer._monitor.last if hasattr(trainer, "_monitor") else None,
    }
    if name in GENERATES_IN_EVALUATION:
        result["evaluations"] = [evaluated(trainer), evaluated(trainer)]
    result |= parity(trainer)
    trainer.close()
    result["engines_left"] = len(trainer.host.updates._fleet._processes)
    return result, calls


def count_rows(trainer) -> set[int]:
    """Filled with the rows of each micro-batch that is trained."""
    rows, compute = set(), trainer.compute_loss

    def recorded(model, inputs, *args, **kwargs):
        if "prompt_ids" in inputs:
            rows.add(len(inputs["prompt_ids"]))
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = recorded
    return rows


def evaluated(trainer) -> list:
    """The completions of one evaluation on this rank."""
    generation, rows = trainer.vllm_generation, []
    generate = generation.generate

    def recorded(**keywords):
        found = generate(**keywords)
        rows.extend(found[1])
        return found

    with mock.patch.object(generation, "generate", recorded):
        trainer.evaluate(trainer.train_dataset.select(range(4)))
    return rows


def parity(trainer) -> dict:
    """|engine - trainer| log-prob: after the last step and a sync, after noise, and after the sync that heals it."""
    found = {}
    trainer.vllm_generation.sync_weights()
    found["fresh"] = difference(trainer)
    perturb(trainer.model)
    found["stale"] = difference(trainer)
    trainer.weights_changed()
    trainer.vllm_generation.sync_weights()
    found["healed"] = difference(trainer)
    return found


def difference(trainer) -> float:
    """Largest over a sequence; a ZeRO-3 forward is a collective."""
    ids = torch.tensor([SEQUENCE])
    with torch.no_grad():
        scores = trainer.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    expected = scores.gather(1, ids[0, 1:, None])[:, 0]
    got = torch.from_numpy(trainer.vllm_generation.engines[0].score(SEQUENCE).logprobs.copy())
    return (got - expected).abs().max().item()


class Replay:
    """In the place of TRL's `VLLMGeneration`: the recorded calls, one after another."""

    def __init__(self, calls: list, **_):
        self.calls = iter(calls)

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts, **_):
        recorded, *found = next(self.calls)
        assert recorded == prompts, "TRL asks for other prompts than our trainer did"
        return prompts, *found


def on_trls_own(name: str, calls: list) -> dict:
    """TRL's class, which builds a `Replay` where it would build its `VLLMGeneration`."""
    theirs = getattr(trl_multinode, f"{name}Trainer")._trl
    home = (
        trl if hasattr(trl, f"{name}Trainer") else sys.modules[theirs.__module__.rpartition(".")[0]]
    )
    code = getattr(trl_multinode, f"{name}Trainer")._code()
    where = code if hasattr(code, "VLLMGeneration") else vllm_generation
    with mock.patch.object(where, "VLLMGeneration", lambda **_: Replay(calls)):  # noqa: PT008
        trainer = make(home, name, vllm_mode="colocate")
    logs = train(trainer)
    assert type(trainer) is theirs and next(trainer.vllm_generation.calls, None) is None
    return logs


def with_one_other_token(calls: list) -> list:
    """The first one: what comes after the last token of a completion is no part of the loss."""
    prompts, ids, *logprobs = calls[0]
    return [[prompts, [[(ids[0][0] + 7) % 258, *ids[0][1:]], *ids[1:]], *logprobs], *calls[1:]]


def resumed(name: str) -> dict:
    """A trainer with the folder of another run, from the first run's checkpoint."""
    trainer = make(trl_multinode, name, rollout_seed=5, output_dir=str(folder / f"{name}-resumed"))
    logs = train(trainer, str(folder / name / f"checkpoint-{CHECKPOINT[name]}"))
    if name == NOT_CLOSED:
        dropped.append(trainer.vllm_generation.engines[0].ready.pid)
    else:
        trainer.close()
    return logs | {"from": CHECKPOINT[name]}


def run(name: str) -> dict:
    ours, calls = on_our_engines(name)
    found = {"ours": ours, "trl": on_trls_own(name, calls), "resumed": resumed(name)}
    if name == "Distillation":
        found["tampered"] = on_trls_own(name, with_one_other_token(calls))
    return found


for name in sys.argv[2:]:
    print(f"TRAINER {name}", flush=True)
    write_result(str(folder), name, **run(name))
    gc.collect()
