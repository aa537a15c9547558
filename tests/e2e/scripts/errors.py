"""Runs into an error. Usage: errors.py FOLDER small_dataset|long_prompt."""

import sys
from pathlib import Path

from common import RANK, Recorder, make_trainer

from trl_multinode.testing.models import tiny_qwen2

folder, case = sys.argv[1:]
settings = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 3}
prompts = [f"{i} + {i + 1} =" for i in range(64)]

if case == "small_dataset":
    model = str(Path(folder) / "model")  # a config without weights: whoever opened a weights file would say that
    tiny_qwen2().config.save_pretrained(model)
    make_trainer(model, Recorder(), folder, prompts[:2], **settings)
else:
    trainer = make_trainer(tiny_qwen2(), Recorder(), folder, prompts, vllm_max_model_length=40, **settings)
    trainer.vllm_generation.sync_weights()
    rows = ["1 + 2 ="] * 4 if RANK != 2 else ["1 + 2 ="] * 3 + ["long " * 20]
    with trainer.host.watch.guard():
        trainer._generate_and_score_completions([{"prompt": row} for row in rows])
