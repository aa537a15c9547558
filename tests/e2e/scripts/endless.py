"""Trains until something ends it. Usage: endless.py FOLDER [RANK_THAT_FAILS]. That rank's third reward fails."""

import faulthandler
import os
import sys

from common import RANK, make_trainer

from multinode_kit.launch_files import STACKS
from multinode_kit.models import tiny_qwen2

folder, failing = sys.argv[1], [int(rank) for rank in sys.argv[2:]]
calls = 0


def reward(completions, **_):
    global calls
    calls += 1
    if calls == 2:
        print(f"RUNNING engine {trainer.vllm_generation.engines[0].ready.pid}", flush=True)
    if calls == 3 and RANK in failing:
        raise ValueError("this reward function fails on purpose")
    return [float(len(completion)) for completion in completions]


os.environ["TQDM_DISABLE"] = "1"
faulthandler.enable()
faulthandler.register(STACKS)  # of which the test asks a silent rank
prompts = [f"{i} + {i + 1} =" for i in range(64)]
trainer = make_trainer(
    tiny_qwen2(), reward, folder, prompts, per_device_train_batch_size=4, learning_rate=1e-3, max_steps=100_000,
    save_steps=1_000_000, engine_restarts=0,
    heartbeat_timeout=float(os.environ.get("HEARTBEAT_TIMEOUT", 30.0)),
)  # fmt: skip
trainer.train()
