"""Training script of `make demo MODE=agent`: the trainer of `examples/agent.py` with the model of `agent_model.py`."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from train import parse_arguments, shard_every_parameter, suppress_sync, train_and_record
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_multinode import GRPOConfig

sys.path.append(str(Path(__file__).resolve().parents[1]))
from agent import COLORS, make_trainer

NUM_GENERATIONS = 8
ROWS_PER_RANK = 32  # 16 hunts a step on 4 ranks


def make_config(options: argparse.Namespace, **of_loop: Any) -> GRPOConfig:
    """Return the settings of a run; `of_loop` are those that belong to one kind of loop."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": ROWS_PER_RANK,
        "per_device_eval_batch_size": ROWS_PER_RANK,
        "learning_rate": 5e-4,
    }
    return GRPOConfig(
        output_dir=str(options.output_dir),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=options.steps,
        num_generations=NUM_GENERATIONS,
        max_staleness=1,  # whole hunts run beside training
        vllm_importance_sampling_mode="token_truncate",  # docs/use/ahead.md says why
        vllm_importance_sampling_clip_max=2.0,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        seed=options.seed,
        rollout_seed=options.seed,
        logprob_divergence_limit=0
        if options.no_sync
        else None,  # the alarm would stop a run on stale weights
        eval_on_start=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **settings | of_loop,
    )


def main() -> None:
    options = parse_arguments(modes=["agent"])
    if options.no_sync:
        suppress_sync()
    folder = options.output_dir / "model"
    # loaded before the config is made, because DeepSpeed would then shard the model during the load
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = make_config(
        options,
        # of a whole hunt, the contents of the boxes included
        max_completion_length=96,
        max_tool_calling_iterations=3,
        call_timeout=60.0,
    )
    shard_every_parameter(config)
    trainer = make_trainer(config, model, processing_class=AutoTokenizer.from_pretrained(folder))
    guess = 0.5 / (len(COLORS) - 1)  # among the boxes that the prompt does not name
    train_and_record(trainer, options.output_dir, best_constant=guess)


if __name__ == "__main__":
    main()
