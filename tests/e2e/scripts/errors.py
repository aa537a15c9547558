"""Runs into an error. Usage: errors.py FOLDER small_dataset|long_prompt|nan."""

import sys
from pathlib import Path

import torch
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

if case == "small_dataset":
    model = str(Path(folder) / "model")  # a config without weights: whoever opened a weights file would say that
    tiny_qwen2().config.save_pretrained(model)
    make_trainer(model, Recorder(), folder, prompts[:2], **settings)
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
        trainer._generate_and_score_completions([{"prompt": row} for row in rows])
