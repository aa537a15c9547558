"""Callbacks for the reader of a log: a line per step in the place of transformers' dictionary, charts and alerts."""

import sys
from contextlib import suppress
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from ..overview import overview
from ..run.reporter import show, warn
from .alerts import alerts, slow_nodes
from .lines import node_table, other_line, rendered, step_line

LOGS_SLOW = 3  # logs in a row in which a node is slower than the others, before that is told
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


class Trackers(TrainerCallback):
    """
    On rank 0, give the trackers their first charts and what in a log needs a person, which is also a warning, once.

    transformers' own callbacks begin the runs of the trackers and log all metrics; this one comes behind them.

    Args:
        callbacks (`list[TrainerCallback]`):
            Callbacks of the trainer. Only the one of TensorBoard knows the writer of the run.
    """

    def __init__(self, callbacks: list[TrainerCallback]) -> None:
        self._callbacks = callbacks
        self._told: set[str] = set()
        self._slow: dict[int, int] = {}  # node -> logs in a row in which it was slow

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero or "perf/step_s" not in (logs or {}):
            return
        every = [*alerts(logs), *self._slow_for_long(slow_nodes(logs))]
        found = [(title, text) for title, text in every if title not in self._told]
        for title, text in found:
            self._told.add(title)
            warn(f"step {state.global_step}: {title}: {text}")
        for tracker in _TRACKERS.keys() & set(args.report_to):
            with suppress(Exception):  # a run does not end for its tracker
                _TRACKERS[tracker](overview(logs), state.global_step, found, self._callbacks)

    def _slow_for_long(self, slow: dict[int, str]) -> list[tuple[str, str]]:
        self._slow = {node: self._slow.get(node, 0) + 1 for node in slow}
        return [
            (f"node {node} is slow", f"for {LOGS_SLOW} logs in a row: {text}")
            for node, text in slow.items()
            if self._slow[node] >= LOGS_SLOW
        ]


def _to_trackio(charts: dict[str, Any], step: int, found: list[tuple[str, str]], _: Any) -> None:
    import trackio

    trackio.log(charts, step=step)
    for title, text in found:
        trackio.alert(title, text)


def _to_wandb(charts: dict[str, Any], step: int, found: list[tuple[str, str]], _: Any) -> None:
    import wandb

    # the x axis that transformers has defined for every metric
    wandb.log(charts | {"train/global_step": step})
    for title, text in found:
        wandb.run.alert(title, text)


def _to_tensorboard(charts: dict[str, Any], step: int, _: Any, callbacks: list[Any]) -> None:
    for callback in callbacks:
        if (writer := getattr(callback, "tb_writer", None)) is not None:
            for name, value in charts.items():
                writer.add_scalar(name, value, step)


_TRACKERS = {"trackio": _to_trackio, "wandb": _to_wandb, "tensorboard": _to_tensorboard}


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
