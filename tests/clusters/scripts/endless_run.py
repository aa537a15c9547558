"""Train until a signal ends the run. Usage: endless_run.py FOLDER. A step takes at least half a second."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e" / "scripts"))
from common import make_trainer

from multinode_kit.models import tiny_qwen2


def distinct(completion_ids, **_):
    time.sleep(0.5)
    return [float(len(set(ids))) for ids in completion_ids]


folder = sys.argv[1]
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
prompts = [f"{i} =" for i in range(16)]
trainer = make_trainer(
    tiny_qwen2(), distinct, folder, prompts, per_device_train_batch_size=4, max_steps=1000
)
# else the launch ends with 1, and not with 143
trainer.train(resume_from_checkpoint=trainer.last_checkpoint())
