"""What `--mode` of the demo is: a script, its world, what it sets. Imports nothing heavy: `run.py` must be quick."""

from dataclasses import dataclass

MODES: dict[str, dict] = {  # on top of the config of `train.py`
    "sync": {},
    "overlap-only": {"max_staleness": 1},
    "balance-only": {"micro_batch_tokens": 1024},
    "overlap": {"max_staleness": 1, "micro_batch_tokens": 1024},  # both
}


@dataclass(frozen=True)
class Demo:
    """What `run.py` starts and expects. Minutes were measured on 2 cores."""

    script: str
    num_ranks: int  # of both nodes
    steps: int
    minutes: int  # with these steps
    timeout_s: float
    learned: float  # least gain of the mean reward
    constant: float  # what no constant answer may reach


SMALL = Demo("train.py", num_ranks=4, steps=80, minutes=4, timeout_s=900.0, learned=0.3, constant=0.2)
REAL = Demo("train_real.py", num_ranks=2, steps=24, minutes=15, timeout_s=7200.0, learned=0.2, constant=0.25)
DEMOS: dict[str, Demo] = {**dict.fromkeys(MODES, SMALL), "real": REAL}
