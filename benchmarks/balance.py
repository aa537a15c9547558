"""Balanced micro-batches against TRL's own, on replayed rollouts: real trainers, ZeRO-3, forked gloo ranks.

    python benchmarks/balance.py            # 2 and 4 ranks, 256 and 64 rows: about 8 minutes on 2 cores
    python benchmarks/balance.py --quick    # one repeat, 64 rows, 2 ranks: a minute
    python benchmarks/balance.py --nodes    # 1 to 128 nodes, simulated: see balance_nodes.py

Every run is a world of its own: one optimizer step on short rows to warm up, then the one that is measured. Arms take
turns. All arms have the same prompts, completions and (with learning rate 0) weights, and at most as many slots in a
micro-batch as TRL with 4 rows. Seconds are those of the training phase: the no-grad passes (old and reference
log-probs), planning, moving rows, forward and backward; the slowest rank counts.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

import balance_nodes
import deepspeed
import torch
from datasets import Dataset
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_grad

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from multinode_kit.launch_files import ZERO3, free_port
from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from multinode_kit.replay import ReplayTrainer, log_normal_length
from trl_multinode import GRPOConfig

LONGEST, PROMPT = 768, 24  # tokens of the longest row; of the longest prompt
ROWS, GENERATIONS = 4, 8  # TRL's micro-batch: what the cap is worth
CAP = ROWS * LONGEST
ARMS = {  # rows of TRL's micro-batch, cropped, cap
    "trl": (ROWS, False, None),
    "trl_again": (ROWS, False, None),
    "balanced": (ROWS, False, CAP),
    "trl_cropped": (ROWS, True, None),
    "trl_one_row": (1, False, None),
}
# in the first turn only: the benchmark is to end in 8 minutes
ONCE = (
    "trl_one_row",
    "trl_cropped",
)


class Measured(ReplayTrainer):
    """Counts seconds of the training phase, and the slots of every forward of the step that is measured."""

    cropped = False

    def start(self) -> None:
        self.seconds, self.cpu_seconds, self.other, self.slots = 0.0, 0.0, 0.0, []
        self.loss_value = 0.0

    def length_of(self, prompt, generation):  # the step that warms up has short rows
        length = log_normal_length(prompt, generation, longest=LONGEST - PROMPT)
        return length if self.state.global_step else max(4, length // 16)

    def training_step(self, *args, **kwargs):
        if self.state.global_step == 1 and not hasattr(self, "seconds"):
            self.start()
            torch.distributed.barrier()
        timer, cpu = time.perf_counter(), time.thread_time()
        loss = super().training_step(*args, **kwargs)
        if hasattr(self, "seconds"):
            self.seconds += time.perf_counter() - timer
            self.cpu_seconds += time.thread_time() - cpu
            self.loss_value += float(loss)
        return loss

    def _generate_single_turn(self, *args, **kwargs):
        return self._not_training(super()._generate_single_turn, *args, **kwargs)

    def _calculate_rewards(self, *args, **kwargs):
        return self._not_training(super()._calculate_rewards, *args, **kwargs)

    def _not_training(self, method, *args, **kwargs):
        timer, cpu = time.perf_counter(), time.thread_time()
        result = method(*args, **kwargs)
        if hasattr(self, "seconds"):
            self.seconds -= time.perf_counter() - timer
            self.cpu_seconds -= time.thread_time() - cpu
        return result

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, keep, batch_size=None, **kwargs
    ):
        score = super()._get_per_token_logps_and_entropies
        if not self.cropped:
            return score(model, input_ids, attention_mask, keep, batch_size, **kwargs)
        found = []
        for start in range(0, len(input_ids), batch_size or len(input_ids)):
            rows = slice(start, start + (batch_size or len(input_ids)))
            used = attention_mask[rows].any(0).nonzero()
            first, end = int(used.min()), int(used.max()) + 1
            beyond = input_ids.shape[1] - end
            logps, entropies, _ = score(
                model,
                input_ids[rows, first:end],
                attention_mask[rows, first:end],
                keep - beyond,
                **kwargs,
            )
            pad = [
                None if x is None else torch.nn.functional.pad(x, (0, beyond))
                for x in (logps, entropies)
            ]
            found.append(pad)
        logps, entropies = zip(*found, strict=True)
        return torch.cat(logps), None if entropies[0] is None else torch.cat(entropies), None


def run_rank(arm: str, rows: int, ranks: int, rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    deepspeed.init_distributed("gloo")
    trainer = build(arm, rows, ranks, folder)
    gradients = spy_on_gradients(trainer)
    spy_on_slots(trainer)
    trainer.train()
    if rank == 0:
        torch.save(gradients[-1], folder / f"{arm}.pt")
    passes = [[grad, *numbers] for grad, *numbers in trainer.slots]
    log_line = next((e for e in reversed(trainer.state.log_history) if "loss" in e), {})
    (folder / f"{arm}_{rank}.json").write_text(
        json.dumps({
            "seconds": trainer.seconds, "cpu_seconds": trainer.cpu_seconds, "passes": passes,
            "loss": log_line["loss"], "world": trainer.accelerator.num_processes,
            "moved_mib": log_line.get("balance/moved_mib"), "planned_lost_s": log_line.get("balance/lost_s"),
        })
    )  # fmt: skip


def build(arm: str, rows: int, ranks: int, folder: Path) -> Measured:
    per_device, cropped, cap = ARMS[arm]
    model = tiny_qwen2(vocab_size=258, seed=1)
    model.config._name_or_path = str(folder.parent / "reference")
    args = GRPOConfig(
        str(folder / "out"), use_cpu=True, bf16=False, use_vllm=False, deepspeed=ZERO3, beta=0.04, learning_rate=0.0,
        num_generations=GENERATIONS, max_completion_length=LONGEST - PROMPT, per_device_train_batch_size=per_device,
        gradient_accumulation_steps=rows // (ranks * per_device), micro_batch_tokens=cap, max_steps=2,
        logging_steps=1, report_to=[], save_strategy="no", gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": [f"{i:>{4 + i % (PROMPT - 4)}}" for i in range(1024)]})
    reward = lambda completion_ids, **_: [float(len(set(ids))) for ids in completion_ids]  # noqa: E731
    trainer = Measured(model, reward, args, prompts, processing_class=tiny_tokenizer())
    trainer.cropped, trainer.use_vllm, trainer.vllm_importance_sampling_mode = (
        cropped,
        True,
        "token_truncate",
    )
    if cap:
        assert trainer._balance is not None
        trainer._balance = type(trainer._balance)(trainer)  # it read the mode
    return trainer


def spy_on_gradients(trainer: Measured) -> list[torch.Tensor]:
    """The whole gradient when DeepSpeed is about to use it; the seconds of the spy do not count."""
    gradients, step = [], DeepSpeedEngine.step

    def spy(engine, *args, **kwargs):
        timer, cpu = time.perf_counter(), time.thread_time()
        gradients.append(
            torch.cat([safe_get_full_grad(p).flatten().float() for p in engine.module.parameters()])
        )
        if hasattr(trainer, "seconds"):
            trainer.seconds -= time.perf_counter() - timer
            trainer.cpu_seconds -= time.thread_time() - cpu
        return step(engine, *args, **kwargs)

    DeepSpeedEngine.step = spy
    return gradients


def spy_on_slots(trainer: Measured) -> None:
    """Of every forward: with gradient or not, rows, slots, real tokens."""

    def count(module, args, kwargs):
        if hasattr(trainer, "seconds"):
            ids, mask = kwargs["input_ids"], kwargs["attention_mask"]
            trainer.slots.append([torch.is_grad_enabled(), len(ids), ids.numel(), int(mask.sum())])

    for model in (trainer.model, trainer.ref_model):
        model.register_forward_pre_hook(count, with_kwargs=True)


def run(arm: str, rows: int, ranks: int, folder: Path) -> dict:
    """One world; what its ranks measured."""
    port, context = free_port(), multiprocessing.get_context("fork")
    workers = [
        context.Process(target=run_rank, args=(arm, rows, ranks, r, port, folder))
        for r in range(ranks)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
        worker.kill()
    if any(worker.exitcode for worker in workers):
        raise RuntimeError(f"{arm} failed: {(folder / 'rank0.log').read_text()[-3000:]}")
    found = [json.loads((folder / f"{arm}_{rank}.json").read_text()) for rank in range(ranks)]
    assert all(one["world"] == ranks for one in found)
    return summary(found)


def summary(ranks: list[dict]) -> dict:
    train = [[numbers for grad, *numbers in one["passes"] if grad] for one in ranks]
    micro_steps = len(train[0])
    assert all(len(passes) == micro_steps for passes in train), "the ranks are not in lock-step"
    rows, slots, tokens = (
        sum(passes[k][i] for passes in train for k in range(micro_steps)) for i in range(3)
    )
    in_lock_step = len(train) * sum(
        max(passes[k][1] for passes in train) for k in range(micro_steps)
    )
    return {
        "seconds": max(one["seconds"] for one in ranks),
        "cpu_seconds": max(one["cpu_seconds"] for one in ranks),
        "lost_s_by_rank": [one["seconds"] - one["cpu_seconds"] for one in ranks],
        "loss": ranks[0]["loss"],
        "micro_steps": micro_steps,
        "mean_rows": rows / (micro_steps * len(train)),
        "most_slots": max(p[1] for passes in train for p in passes),
        "longest_row": LONGEST,
        "real_token_share": tokens / slots,
        "real_token_share_in_lock_step": tokens / in_lock_step,
        "real_token_share_no_grad": no_grad_share(ranks),
        "moved_mib": ranks[0]["moved_mib"],
        "planned_lost_s": ranks[0]["planned_lost_s"],
    }


def no_grad_share(ranks: list[dict]) -> float:
    passes = [numbers for one in ranks for grad, *numbers in one["passes"] if not grad]
    return sum(p[2] for p in passes) / sum(p[1] for p in passes)


def spread(values: list[float]) -> dict:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def compare(rows: int, ranks: int, repeats: int, folder: Path) -> dict:
    """All arms, in turns; ratios are of runs of one turn."""
    turns: list[dict[str, dict]] = []
    for turn in range(repeats):
        names = list(ARMS) if turn % 2 == 0 else list(reversed(ARMS))
        names = names if turn == 0 else [arm for arm in names if arm not in ONCE]
        turns.append({arm: run(arm, rows, ranks, folder) for arm in names})
        print(
            f"  turn {turn + 1}: "
            + ", ".join(f"{a} {turns[-1][a]['seconds']:.2f} s" for a in names),
            flush=True,
        )
    expected, got, again = (
        torch.load(folder / f"{arm}.pt") for arm in ("trl", "balanced", "trl_again")
    )
    arms = {
        arm: turns[0][arm] | {
            "seconds": spread([turn[arm]["seconds"] for turn in turns if arm in turn]),
            "cpu_seconds": spread([turn[arm]["cpu_seconds"] for turn in turns if arm in turn]),
            "lost_s_by_rank": [spread(list(lost)) for lost in
                               zip(*(turn[arm]["lost_s_by_rank"] for turn in turns if arm in turn), strict=True)],
        } for arm in ARMS
    }  # fmt: skip

    def ratio(of: str, to: str) -> dict:
        return spread([turn[of]["seconds"] / turn[to]["seconds"] for turn in turns if of in turn])

    return {
        "ranks": ranks, "rows": rows, "repeats": repeats, "arms": arms,
        "train_phase_speedup": ratio("trl", "balanced"),
        "speedup_over_trl_one_row": ratio("trl_one_row", "balanced"),
        "speedup_over_trl_cropped": ratio("trl_cropped", "balanced"),
        "control_ratio": ratio("trl", "trl_again"),
        "gradient_rel_diff": float((got - expected).norm() / expected.norm()),
        "gradient_rel_diff_control": float((again - expected).norm() / expected.norm()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one repeat of 2 ranks x 64 rows")
    parser.add_argument(
        "--nodes", action="store_true", help="simulate 1 to 128 nodes with the real planner instead"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "balance.json"
    )
    args = parser.parse_args()
    if args.nodes:
        balance_nodes.run(args.output.with_name("balance_nodes.json"))
        return
    folder = Path(tempfile.mkdtemp(prefix="balance_"))
    tiny_qwen2(vocab_size=258, seed=0).save_pretrained(folder / "reference")
    shapes = [(64, 2)] if args.quick else [(256, 2), (256, 4), (64, 2), (64, 4)]
    runs, started, load = [], time.time(), os.getloadavg()[0]
    try:
        for rows, ranks in shapes:
            print(f"{ranks} ranks, {rows} rows", flush=True)
            (folder / f"{ranks}x{rows}").mkdir()
            repeats = 1 if args.quick else args.repeats - (rows < 256)
            runs.append(compare(rows, ranks, repeats, folder / f"{ranks}x{rows}"))
            found = report(runs, load, time.time() - started)
            args.output.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({key: value for key, value in found.items() if key != "runs"}, indent=1))


def report(runs: list[dict], load: float, seconds: float) -> dict:
    """The five figures are the worst of the runs with the most rows (2 and 4 ranks)."""
    main_runs = [run for run in runs if run["rows"] == max(run["rows"] for run in runs)]
    balanced = [run["arms"]["balanced"] for run in main_runs]
    return {
        "real_token_share": min(arm["real_token_share"] for arm in balanced),
        "mean_rows": min(arm["mean_rows"] for arm in balanced),
        "train_phase_speedup": min(run["train_phase_speedup"]["median"] for run in main_runs),
        "gradient_rel_diff": max(run["gradient_rel_diff"] for run in runs),
        "control_ratio": max((run["control_ratio"]["median"] for run in main_runs), key=lambda ratio: abs(ratio - 1)),
        "machine": {"cores": os.cpu_count(), "load_before": load, "load_after": os.getloadavg()[0],
                    "benchmark_seconds": seconds,
                    "note": "single-threaded ranks; 4 ranks share the cores, so a waiting rank lends its core"},
        "lengths": {"median": 120, "longest_row": LONGEST, "generations": GENERATIONS, "cap": CAP},
        "runs": runs,
    }  # fmt: skip


if __name__ == "__main__":
    main()
