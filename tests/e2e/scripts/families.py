"""Train one model after another for some steps. Usage: families.py FOLDER NAME[,NAME...].

FOLDER/NAME/model is a checkpoint, which TRL loads under ZeRO-3.
"""

import json
import sys
from pathlib import Path

import numpy as np
from common import make_trainer, write_result
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Picture
from transformers import AutoProcessor

from multinode_kit.architectures import ARCHITECTURES

STEPS = 3


def reward(completion_ids, **_):
    return [float(len(set(ids))) for ids in completion_ids]


def with_images(rows: int = 32) -> Dataset:
    """Return prompts with one image or two, each of its own size."""
    random = np.random.default_rng(0)
    images = [
        Picture.fromarray(random.integers(0, 256, (30 + i, 50, 3), dtype=np.uint8))
        for i in range(rows + 1)
    ]
    columns = {
        "prompt": [[{"role": "user", "content": f"{i} is"}] for i in range(rows)],
        "images": [images[i : i + 1 + i % 2] for i in range(rows)],
    }
    features = {
        "prompt": [{"role": Value("string"), "content": Value("string")}],
        "images": List(Image()),
    }
    return Dataset.from_dict(columns, Features(features))


def settings_of(name: str) -> dict:
    """Return what a model needs besides the arguments of all."""
    if name in ARCHITECTURES:
        known = ARCHITECTURES[name]
        return {"engine_kwargs": {"dtype": known.dtype_name} | known.engine_args}
    return {
        "dataset": with_images(),
        # a sampled image token would want an image
        "generation_kwargs": {"allowed_token_ids": list(range(2, 258))},
        "engine_kwargs": {"dtype": "float32"},
    }


folder, names = Path(sys.argv[1]), sys.argv[2].split(",")
for name in names:
    own = folder / name
    trainer = make_trainer(
        str(own / "model"),
        reward,
        str(own / "run"),
        [f"{i} =" for i in range(32)],
        processing_class=AutoProcessor.from_pretrained(own / "model"),
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        max_steps=STEPS,
        rollout_seed=5,
        # TRL 1.16 looks for another name of Granite's number of experts
        router_aux_loss_coef=0.0,
        **settings_of(name),
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    write_result(
        str(own),
        differences=[entry["sampling/sampling_logp_difference/mean"] for entry in log],
        norms=[entry["grad_norm"] for entry in log],
        version=trainer.vllm_generation.version.update,
        world=trainer.accelerator.num_processes,
    )
    trainer.close()
    print(f"FAMILY {name} {json.dumps(log[-1])}", flush=True)
