"""Runs into an error. Usage: errors.py FOLDER small_dataset|long_prompt|exit|nan."""

import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from common import RANK, Recorder, make_trainer
from transformers import TrainerCallback

from trl_multinode.testing.models import tiny_qwen2

folder, case = sys.argv[1:]


class Poison(TrainerCallback):
    """Puts a NaN into the shard of rank 3 after the second optimizer step, before its checkpoint."""

    @torch.no_grad()
    def on_step_end(self, args, state, control, model, **_):
        if state.global_step == 2 and RANK == 3:
            model.model.layers[0].mlp.up_proj.weight.ds_tensor[0] = float("nan")


settings = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 3}
prompts = [f"{i} + {i + 1} =" for i in range(64)]
COLLECTIVE_LIMIT_S, SLOW_S = 3.0, 6.0


def generate_slowly_on_rank_2(trainer) -> None:
    """A round in which one rank generates for longer than a collective may take, as `ddp_timeout` limits it."""
    generate = trainer.vllm_generation.engines.generate

    def slow(*args):
        time.sleep(SLOW_S)
        return generate(*args)

    limit = dist.distributed_c10d._get_default_timeout("gloo")
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=COLLECTIVE_LIMIT_S))
    with mock.patch.object(trainer.vllm_generation.engines, "generate", slow if RANK == 2 else generate):
        trainer._begin_round()
        with trainer._aligned(trainer.host):
            trainer._generate(["1 + 2 ="] * 4)
    dist.distributed_c10d._set_pg_timeout(limit)
    print("the slow round is done", flush=True)


if case == "small_dataset":
    model = str(Path(folder) / "model")  # a config without weights: whoever opened a weights file would say that
    tiny_qwen2().config.save_pretrained(model)
    make_trainer(model, Recorder(), folder, prompts[:2], **settings)
elif case == "exit":
    trainer = make_trainer(tiny_qwen2(), Recorder(), folder, prompts, **settings)
    if RANK == 2:
        sys.exit(3)
    trainer.train()
elif case == "nan":
    keep = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer = make_trainer(tiny_qwen2(), Recorder(), folder, prompts, **settings, **keep)
    trainer.add_callback(Poison())
    trainer.train()
else:
    trainer = make_trainer(tiny_qwen2(), Recorder(), folder, prompts, vllm_max_model_length=40, **settings)
    trainer.vllm_generation.sync_weights()
    rows = ["1 + 2 ="] * 4 if RANK != 2 else ["1 + 2 ="] * 3 + ["long " * 20]
    with trainer.host.watch.guard():
        generate_slowly_on_rank_2(trainer)
        trainer._generate_and_score_completions([{"prompt": row} for row in rows])
