"""Run a short GRPO training on one rank, started by `accelerate launch` under ZeRO-3; write its figures as JSON.

Arms with an engine: `ours` (it shares the GPU with training) and `colocate` (TRL's colocation). Arms on replayed
completions, without an engine: `replay` (TRL's micro-batches) and `balanced` (our micro-batches).
"""

import argparse
import json
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback

from multinode_kit.models import tiny_tokenizer

GENERATIONS = 4


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", choices=("ours", "colocate", "replay", "balanced"), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--engine-module")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--cap", type=int, help="slots of a balanced micro-batch")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--completion", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


class Clock(TrainerCallback):
    """Callback that measures an optimizer step's seconds, generation and weight sync included, and its memory."""

    def __init__(self, cpu: bool):
        self.seconds: list[float] = []
        self._cpu = cpu

    def on_step_begin(self, args, state, control, **_):
        if not self._cpu and state.global_step == 1:
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args, state, control, **_):
        if not self._cpu:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter())

    def figures(self) -> dict:
        steps = [
            after - before for before, after in zip(self.seconds, self.seconds[1:], strict=False)
        ]
        found = {
            "step_s": sorted(steps)[len(steps) // 2] if steps else float("nan"),
            "steps": len(self.seconds),
        }
        if self._cpu:
            return found
        free, total = torch.cuda.mem_get_info()
        peak = torch.cuda.max_memory_allocated()
        return found | {"peak_gib": peak / 2**30, "gpu_used_gib": (total - free) / 2**30}


def settings(options: argparse.Namespace) -> dict:
    """Return the settings that all arms share."""
    return {
        "output_dir": str(options.folder / "out"), "use_cpu": options.cpu, "bf16": not (options.cpu or options.fp32),
        "num_generations": GENERATIONS, "max_completion_length": options.completion,
        "per_device_train_batch_size": options.micro_batch,
        "gradient_accumulation_steps": options.rows // options.micro_batch, "max_steps": options.steps,
        "optim": "adamw_torch", "beta": 0.0, "temperature": 1.0, "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "generation_kwargs": {"ignore_eos": True},
        "learning_rate": 1e-5, "gradient_checkpointing": not options.cpu,
    }  # fmt: skip


def engine_settings(options: argparse.Namespace) -> dict:
    shared = {"use_vllm": True, "vllm_max_model_length": options.prompt + options.completion + 16}
    if not options.cpu:
        shared["vllm_gpu_memory_utilization"] = 0.3
    if options.arm == "colocate":
        return shared | {"vllm_mode": "colocate"}
    return shared | {"vllm_mode": "node", **({} if options.cpu else {"vllm_devices": [0]})}


def reward(completion_ids, **_) -> list[float]:
    """Return the number of distinct tokens in each completion."""
    return [float(len(set(ids))) for ids in completion_ids]


def build(options: argparse.Namespace):
    texts = [chr(97 + index % 26) * options.prompt for index in range(4 * options.rows)]
    prompts = Dataset.from_dict({"prompt": texts})  # byte-level tokenizer: a letter is a token
    keywords = {"train_dataset": prompts, "processing_class": tiny_tokenizer()}
    if options.arm == "colocate":
        from trl import GRPOConfig, GRPOTrainer

        return GRPOTrainer(
            options.model,
            reward,
            GRPOConfig(**settings(options), **engine_settings(options)),
            **keywords,
        )
    from trl_multinode import GRPOConfig, GRPOTrainer

    if options.arm == "ours":
        args = GRPOConfig(**settings(options), **engine_settings(options))
        return GRPOTrainer(options.model, reward, args, **keywords)
    from .replayed import build_replay

    return build_replay(options, settings(options), reward, keywords)


def main() -> None:
    options = parse()
    trainer = build(options)
    clock = Clock(options.cpu)
    trainer.add_callback(clock)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    kept = {
        name.replace("/", "_"): value
        for name, value in log.items()
        if name.startswith(
            ("perf/", "sync/", "balance/", "sampling/sampling_logp", "grad_norm", "loss")
        )
        and not name.endswith(("slowest_node", "/min"))
    }
    extra = trainer.figures() if hasattr(trainer, "figures") else {}
    (options.folder / "figures.json").write_text(json.dumps(clock.figures() | kept | extra))
    if hasattr(trainer, "close"):
        trainer.close()


if __name__ == "__main__":
    main()
