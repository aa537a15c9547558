"""Reports of a run: its set-up, a line per log, a table per node, and metrics for `Trainer.log`."""

from .callbacks import Trackers, report_steps
from .history import LogHistory
from .record import RunRecord
from .setup import report_choices, report_start
from .steps import StepReport

__all__ = [
    "LogHistory",
    "RunRecord",
    "StepReport",
    "Trackers",
    "report_choices",
    "report_start",
    "report_steps",
]
