"""Training script of `make demo MODE=real`: SmolLM2-135M learns to answer sums with the number alone.

    python examples/demo/real_model.py outputs/demo/model    # once, on a folder that all nodes see
    accelerate launch --config_file accelerate_configs/2node_cpu.yaml --num_processes 2 --machine_rank K \\
        examples/demo/train_real.py --output_dir outputs/demo

`run.py --mode real` runs both commands on one machine and writes the report.
"""

import argparse

import torch
from real_task import best_constant_score, make_datasets, sum_reward
from train import parse_arguments, suppress_sync, train_and_record
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_multinode import GRPOConfig, GRPOTrainer

NUM_GENERATIONS = 8
ROWS_PER_RANK = 24  # 6 prompts a step on 2 ranks
NUM_HELD_OUT = 16


def make_config(options: argparse.Namespace) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(options.output_dir),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=options.steps,
        per_device_train_batch_size=ROWS_PER_RANK,
        per_device_eval_batch_size=16,
        num_generations=NUM_GENERATIONS,
        max_completion_length=16,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        seed=options.seed,
        rollout_seed=options.seed,
        logprob_divergence_limit=0
        if options.no_sync
        else None,  # the alarm would stop a run on stale weights
        # Less memory: half of a rank's rows at a time (a prompt has 16 tokens), weights in buckets of 64 MiB
        micro_batch_tokens=384,
        sync_bucket_mb=64,
        engine_kwargs={"max_model_len": 128, "kv_cache_memory_bytes": 128 << 20},
        eval_on_start=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def reduce_in_pieces(config: GRPOConfig) -> None:
    """Reduce 1e7 gradients at a time. DeepSpeed's default, 5e8 (2 GB), would collect all of them here, and a copy."""
    plugin = getattr(config, "deepspeed_plugin", None)
    if plugin is not None:
        plugin.hf_ds_config.config["zero_optimization"]["reduce_bucket_size"] = 10**7


def main() -> None:
    options = parse_arguments(modes=["real"])
    if options.no_sync:
        suppress_sync()
    train_set, held_out = make_datasets(NUM_HELD_OUT)
    folder = options.output_dir / "model"
    # loaded before the config is made, because DeepSpeed would then shard the model during the load
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = make_config(options)
    reduce_in_pieces(config)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=sum_reward,
        args=config,
        train_dataset=train_set,
        eval_dataset=held_out,
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    train_and_record(
        trainer, options.output_dir, max(map(best_constant_score, (train_set, held_out)))
    )


if __name__ == "__main__":
    main()
