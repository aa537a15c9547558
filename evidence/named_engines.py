"""continued.py whose local main processes print the pid of their engine: "ENGINE 1234"."""

import sys
from pathlib import Path

from transformers import TrainerCallback

SCRIPTS = Path(__file__).parents[1] / "tests" / "e2e" / "scripts"
sys.path.insert(0, str(SCRIPTS))

import common  # noqa: E402

unnamed = common.make_trainer  # continued.py, which runs in these globals, imports the other name


class EnginePid(TrainerCallback):
    """Prints the pid before the second step, when the engine has its weights."""

    trainer = None

    def on_step_begin(self, args, state, control, **_):
        if state.global_step >= 1 and self.trainer is not None:
            print(f"ENGINE {self.trainer.vllm_generation.engines[0].ready.pid}", flush=True)
            self.trainer = None


def make_named(*args, **settings):
    trainer = unnamed(*args, **settings)
    callback = EnginePid()
    callback.trainer = trainer
    trainer.add_callback(callback)
    return trainer


common.make_trainer = make_named
exec(compile((SCRIPTS / "continued.py").read_text(), SCRIPTS / "continued.py", "exec"))  # noqa: S102
