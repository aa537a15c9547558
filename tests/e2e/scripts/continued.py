"""A run that is killed and goes on, or runs through. Usage: continued.py FOLDER NAME SETTINGS_JSON

Of the settings, `kill_at` (optimizer step) ends every rank by SIGKILL right after that step's checkpoint,
`kill_inside` in the middle of writing it, `resume` goes to `train()`, `prompts` is the size of the dataset.
Leaves NAME_rank<r>.json: per optimizer step the loss, per generation round what the reward function saw.
"""

import json
import os
import signal
import sys
import threading

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")

from common import Recorder, make_trainer, write_result
from datasets import Dataset
from transformers import TrainerCallback

from trl_multinode.testing.models import tiny_qwen2

folder, name, settings_json = sys.argv[1:]
settings = json.loads(settings_json)
kill_at, kill_inside = settings.pop("kill_at", None), settings.pop("kill_inside", None)
resume = settings.pop("resume", None)
prompts = [f"{i} + {i + 1} =" for i in range(settings.pop("prompts"))]


class Rounds(Recorder):
    """Which rows were scored at which optimizer step, and how old they were."""

    def __init__(self):
        super().__init__()
        self.rounds: list[dict] = []

    def __call__(self, prompts, completion_ids, **_):
        if trainer.model.training:
            lag = trainer.vllm_generation.lag
            rows = [[p, list(ids)] for p, ids in zip(prompts, completion_ids, strict=True)]
            self.rounds.append({"step": trainer.state.global_step, "lag": lag, "rows": rows})
        return [float(len(set(ids))) for ids in completion_ids]


class KillAfterSave(TrainerCallback):
    def on_save(self, args, state, control, **_):
        if state.global_step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_while_saving(trainer) -> None:
    save = trainer._save_optimizer_and_scheduler

    def cut_off(output_dir):
        if trainer.state.global_step == kill_inside:
            os.kill(os.getpid(), signal.SIGKILL)
        save(output_dir)

    trainer._save_optimizer_and_scheduler = cut_off


recorder = Rounds()
trainer = make_trainer(
    tiny_qwen2(tied=False), recorder, folder, prompts, rollout_seed=5, learning_rate=1e-2, **settings
)
if settings.get("eval_strategy"):
    trainer.eval_dataset = Dataset.from_dict({"prompt": prompts[:4]})
trainer.add_callback(KillAfterSave())
kill_while_saving(trainer)
trainer.train(resume_from_checkpoint=resume)
history = trainer.state.log_history
write_result(
    folder,
    name,
    rounds=recorder.rounds,
    losses={entry["step"]: entry["loss"] for entry in history if "loss" in entry},
    evals={entry["step"]: entry["eval_reward"] for entry in history if "eval_reward" in entry},
    staleness=[entry["staleness/rounds_mean"] for entry in history if "staleness/rounds_mean" in entry],
    metrics=[entry for entry in history if "loss" in entry][-1],
    left_over=[thread.name for thread in threading.enumerate() if thread.name == "look-ahead"],
    syncs=trainer.vllm_generation.version.update,
)
