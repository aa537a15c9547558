"""A load of the model that never ends, or fails on rank 3. Usage: loading.py FOLDER waits|raises."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e" / "scripts"))

from common import RANK, make_trainer
from trl.trainer import grpo_trainer

import trl_multinode.host.closing as closing
from multinode_kit.models import save_tiny

folder, how = sys.argv[1:]


def load(*args, **kwargs):
    """Print the engine that this rank has started, and never return."""
    engines = [one._updates._fleet._processes[0].pid for one in closing._with_engines]
    print("LOADING", *(f"engine {pid}" for pid in engines), flush=True)
    if how == "raises" and RANK == 3:
        raise OSError("no weights")
    time.sleep(1000)


grpo_trainer.create_model_from_path = load
name = save_tiny(Path(folder, f"model{RANK}"))
make_trainer(
    str(name), lambda completions, **_: [0.0] * len(completions), folder, ["1 ="] * 8,
    per_device_train_batch_size=4, max_steps=1, heartbeat_timeout=1000.0,
)  # fmt: skip
