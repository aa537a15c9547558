"""Reward functions of a rank that fail. Usage: rewards.py FOLDER.

Round 1: rank 1 has no reward. Round 2: all have one, some by an async function. Round 3: rank 1 hangs in row 2.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e" / "scripts"))

from common import RANK, make_trainer
from transformers import TrainerCallback

from multinode_kit.models import tiny_qwen2

rounds = {"plain": 0, "judged": 0}


def plain(completion_ids, **_):
    rounds["plain"] += 1
    if RANK == 1 and rounds["plain"] == 1:
        return [float("nan")] * len(completion_ids)
    found = []
    for row, ids in enumerate(completion_ids):
        if RANK == 1 and rounds["plain"] == 3 and row == 2:
            verify()
        found.append(float(len(set(ids))))
    return found


def verify() -> None:
    print("HANGS", flush=True)
    time.sleep(1000)


async def judged(completions, **_):
    await asyncio.sleep(0.05)
    rounds["judged"] += 1
    return [None if RANK == 1 and rounds["judged"] == 1 else 0.5 for _ in completions]


class Logged(TrainerCallback):
    """Prints the metric of a step."""

    def on_log(self, args, state, control, logs, **_):
        if "rewards/all_nan_rows" in logs:
            print(
                "LOGGED " + json.dumps([state.global_step, logs["rewards/all_nan_rows"]]),
                flush=True,
            )


prompts = [f"{i} + {i + 1} =" for i in range(64)]
settings = {
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "max_steps": 5,
    "call_timeout": 6.0,
}
trainer = make_trainer(tiny_qwen2(), [plain, judged], sys.argv[1], prompts, **settings)
trainer.add_callback(Logged())
trainer.train()
