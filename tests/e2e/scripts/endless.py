"""Trains until something ends it. Usage: endless.py FOLDER RANK_THAT_FAILS [memory].

The rank's third reward fails, or with `memory` its first training forward pass after the second.
"""

import faulthandler
import os
import signal
import sys

import torch
from common import RANK, make_trainer

from trl_multinode.testing.models import tiny_qwen2

folder, failing = sys.argv[1], int(sys.argv[2])
out_of_memory = "memory" in sys.argv[3:]
calls = 0


def reward(completions, **_):
    global calls
    calls += 1
    if calls == 2:
        print(f"RUNNING engine {trainer.vllm_generation.engines[0].ready.pid}", flush=True)
    if calls == 3 and failing == RANK and not out_of_memory:
        raise ValueError("this reward function fails on purpose")
    return [float(len(completion)) for completion in completions]


def allocate_too_much(*_) -> None:
    """Raise what torch raises on a GPU."""
    if calls >= 2 and failing == RANK and out_of_memory:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB."
        )


os.environ["TQDM_DISABLE"] = "1"
faulthandler.enable()
faulthandler.register(signal.SIGUSR1)  # the test asks a silent rank for its stacks
prompts = [f"{i} + {i + 1} =" for i in range(64)]
trainer = make_trainer(
    tiny_qwen2(), reward, folder, prompts, per_device_train_batch_size=4, learning_rate=1e-3, max_steps=100_000,
    save_steps=1_000_000, engine_restarts=0,
    heartbeat_timeout=float(os.environ.get("HEARTBEAT_TIMEOUT", 30.0)),
)  # fmt: skip
trainer.model.register_forward_pre_hook(allocate_too_much)
trainer.train()
