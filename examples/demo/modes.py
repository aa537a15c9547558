"""Modes of the demo: script, number of ranks, settings. Imports nothing heavy, because `run.py` must start fast."""

from dataclasses import dataclass

MODES: dict[str, dict] = {  # added to the config of `train.py`
    "sync": {},
    "overlap-only": {"max_staleness": 1},
    "balance-only": {"micro_batch_tokens": 1024},
    "overlap": {"max_staleness": 1, "micro_batch_tokens": 1024},  # both
}


@dataclass(frozen=True)
class Demo:
    """Settings and expected results of a demo run. Minutes were measured on 2 cores."""

    script: str
    num_ranks: int  # on both nodes together
    steps: int
    minutes: int  # for `steps` steps
    timeout_s: float
    learned: float  # smallest gain of the mean reward that passes
    constant: float  # reward that the best constant answer must stay below


SMALL = Demo("train.py", num_ranks=4, steps=80, minutes=4, timeout_s=900.0, learned=0.3, constant=0.2)
REAL = Demo("train_real.py", num_ranks=2, steps=24, minutes=15, timeout_s=7200.0, learned=0.2, constant=0.25)
DEMOS: dict[str, Demo] = {**dict.fromkeys(MODES, SMALL), "real": REAL}
