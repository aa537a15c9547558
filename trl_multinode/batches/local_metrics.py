"""TRL's metrics of one optimizer step: kept on the rank over all micro-steps, gathered once at the end.

TRL's loss calls about seven collectives per micro-batch for its log. Two of them gather one value per row, which
requires the same number of rows on every rank. Here a mean is over all tokens of the optimizer step and a minimum or
maximum over all its rows, as TRL logs them for a step of a single micro-batch.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch
from trl import GRPOTrainer

from ..libraries import replaced

EXTREMES = ("min", "max")  # suffixes of the metrics that are extremes over rows


class LocalMetrics:
    """The metrics of one optimizer step, or of one batch of an evaluation, of one rank."""

    def __init__(self) -> None:
        # (sum, count), or an extreme twice
        self._values: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._reduced: torch.Tensor | None = (
            None  # the (sum, count) of the value that TRL appends next
        )

    @contextmanager
    def kept_local(self, trainer: GRPOTrainer) -> Iterator[None]:
        """Make TRL's collectives return the rank's own part while TRL computes the loss of one micro-batch."""
        with (
            replaced(trainer.accelerator, "reduce", self._reduce),
            replaced(trainer.accelerator, "gather", lambda tensor: tensor),
            replaced(
                trainer, "_metrics", trainer._metrics | {mode_of(trainer): _Lists(self._append)}
            ),
        ):
            yield

    def _reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        self._reduced = tensor.detach().double()
        return tensor

    def _append(self, name: str, value: float) -> None:
        pair, self._reduced = self._reduced, None
        if name.endswith(EXTREMES):
            pair = torch.tensor([value, value], dtype=torch.float64)
        elif pair is None:
            pair = torch.tensor([value, 1.0], dtype=torch.float64)
        self._values[name].append(pair)

    def finish(self, trainer: GRPOTrainer) -> None:
        """Add the step to TRL's metrics. A collective of all training ranks: one gather of two numbers per metric."""
        if not self._values:
            return
        names = sorted(self._values)
        mine = []
        for name in names:
            pairs = torch.stack(self._values[name]).to(trainer.accelerator.device)
            mine.append(_combine(name, pairs))
        every = trainer.accelerator.gather(torch.stack(mine).unsqueeze(0))
        for index, name in enumerate(names):
            value, count = _combine(name, every[:, index]).tolist()
            if not name.endswith(EXTREMES):
                value /= max(count, 1.0)
            elif math.isinf(value):
                continue  # no token of the step is trained
            trainer._metrics[mode_of(trainer)][name].append(value)
        self._values.clear()


def mode_of(trainer: GRPOTrainer) -> str:
    """Return TRL's name of what the trainer does, by which it keeps its metrics."""
    return "train" if trainer.model.training else "eval"


def _combine(name: str, pairs: torch.Tensor) -> torch.Tensor:
    """Reduce pairs of shape `(parts, 2)` to `(2,)`. A NaN extreme comes from a part without rows and is ignored."""
    if name.endswith("min"):
        return pairs.nan_to_num(nan=torch.inf).amin(0)
    if name.endswith("max"):
        return pairs.nan_to_num(nan=-torch.inf).amax(0)
    return pairs.sum(0)


class _Lists(dict):
    """Replacement of `trainer._metrics["train"]` in which every key has an `append`."""

    def __init__(self, append: Callable[[str, float], None]):
        super().__init__()
        self._append = append

    def __missing__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(append=partial(self._append, name))
