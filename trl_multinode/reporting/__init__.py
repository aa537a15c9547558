"""Reports of a run: its set-up, a line per log, a table per node, and metrics for `Trainer.log`."""

from .callbacks import Alerts, report_steps
from .history import LogHistory
from .record import RunRecord
from .setup import report_choices, report_start
from .steps import StepReport

__all__ = [
    "Alerts",
    "LogHistory",
    "RunRecord",
    "StepReport",
    "report_choices",
    "report_start",
    "report_steps",
]
