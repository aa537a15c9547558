"""Callbacks for the reader of a log: a line per step in the place of transformers' dictionary, and alerts."""

import sys
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from ..run.reporter import show, warn
from .alerts import alerts
from .lines import node_table, other_line, rendered, step_line

TABLE_STEPS = 10  # optimizer steps between two tables of the nodes


class StepLines(ProgressCallback, PrinterCallback):
    """
    Print one line per log on rank 0, and a table of the nodes every ten optimizer steps.

    The class derives from both callbacks of transformers, so that `trainer.remove_callback(PrinterCallback)` and
    `remove_callback(ProgressCallback)` remove it too.
    """

    _table_at = TABLE_STEPS  # step of the next table

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._table_at = state.global_step + TABLE_STEPS

    # a bar would write a line of its own per step where stderr is no terminal
    on_step_end = on_prediction_step = on_train_end = TrainerCallback.on_step_end

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "perf/step_s" not in logs:
            self._write(other_line(logs, state.global_step))
            return
        self._write(step_line(logs, state.global_step, state.max_steps))
        if state.global_step >= self._table_at:
            self._table_at = state.global_step + TABLE_STEPS
            if (table := node_table(logs, state.global_step)) is not None:
                self._write(rendered(table, color=sys.stdout.isatty()))

    def _write(self, text: str) -> None:
        bar = self.training_bar
        show(text, write=bar.write if bar is not None else None)


class StepLinesAboveBar(StepLines):
    """[`StepLines`] with transformers' progress bar below the lines, for a terminal."""

    on_step_end = ProgressCallback.on_step_end
    on_prediction_step = ProgressCallback.on_prediction_step
    on_train_end = ProgressCallback.on_train_end

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        ProgressCallback.on_train_begin(self, *args, **kwargs)


class Alerts(TrainerCallback):
    """Warn on rank 0 of what in a log needs a person, once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero or "perf/step_s" not in (logs or {}):
            return
        for title, text in alerts(logs):
            if title not in self._told:
                self._told.add(title)
                warn(f"step {state.global_step}: {title}: {text}")


def report_steps(callbacks: list[TrainerCallback]) -> None:
    """
    Replace the callback with which transformers prints every metric. Callbacks that a script passed stay.

    Args:
        callbacks (`list[TrainerCallback]`):
            Callbacks of a trainer, changed in place. Those of the script come before transformers' own one. In a
            notebook that is another class, which shows a table and stays.
    """
    for index in reversed(range(len(callbacks))):
        if (kind := type(callbacks[index])) in (PrinterCallback, ProgressCallback):
            has_bar = kind is ProgressCallback and sys.stderr.isatty()
            callbacks[index] = StepLinesAboveBar() if has_bar else StepLines()
            return
