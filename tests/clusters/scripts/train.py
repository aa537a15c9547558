"""A training script that resumes from its last checkpoint. Usage: train.py FOLDER

Its first start runs the same training without a break, too, and before. Both trainings write a line per round with the
rows that are scored, and a line per optimizer step with its loss, into FOLDER/whole-rank<r>.jsonl and
FOLDER/broken-rank<r>.jsonl. The broken one waits at the steps of HOLD until the file FOLDER/go-<step> exists.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e" / "scripts"))

from common import RANK, WORLD, make_trainer
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from multinode_kit.models import tiny_qwen2

FOLDER = Path(sys.argv[1])
STEPS = 6
HOLD = (2, 4)  # optimizer steps that are done
HOLD_LIMIT_S = 120.0
START = os.environ.get("SLURM_RESTART_COUNT", "0")


class Record(TrainerCallback):
    """Reward function and callback that append to the file of this rank."""

    __name__ = "record"

    def __init__(self, name: str, hold: tuple[int, ...]):
        self.file, self.hold = FOLDER / f"{name}-rank{RANK}.jsonl", hold
        self.step = 0

    def write(self, **values) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({"start": START} | values) + "\n")

    def __call__(self, prompts, completion_ids, **_):
        self.write(
            done=self.step,
            rows=[[p, list(ids)] for p, ids in zip(prompts, completion_ids, strict=True)],
        )
        deadline = time.monotonic() + HOLD_LIMIT_S
        while (
            self.step in self.hold
            and not Path(FOLDER, f"go-{self.step}").exists()
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        return [sum(token < 150 for token in ids) / len(ids) for ids in completion_ids]

    def on_step_begin(self, args, state, control, **_):
        self.step = state.global_step

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            self.write(step=state.global_step, loss=logs["loss"], grad_norm=logs["grad_norm"])


def train(name: str, hold: tuple[int, ...]) -> None:
    unset_hf_deepspeed_config()  # the training before left it, and under it a model begins with other weights
    record = Record(name, hold)
    trainer = make_trainer(
        tiny_qwen2(tied=False), record, str(FOLDER / name), [f"{i} + {i + 1} =" for i in range(8)],
        rollout_seed=5, learning_rate=1e-2, max_steps=STEPS, num_train_epochs=9, max_completion_length=8,
        per_device_train_batch_size=4, gradient_accumulation_steps=1, steps_per_generation=1,
    )  # fmt: skip
    trainer.add_callback(record)
    trainer.train(resume_from_checkpoint=trainer.last_checkpoint())
    trainer.host.close()


assert WORLD == 2, WORLD
print(
    f"{len(os.sched_getaffinity(0))} cores, GPUs {os.environ['CUDA_VISIBLE_DEVICES']}", flush=True
)
if START == "0":
    train("whole", ())
train("broken", HOLD)
