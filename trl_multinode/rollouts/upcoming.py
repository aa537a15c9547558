"""Batches of an epoch that must be known before TRL generates for them."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

Batch = list[dict[str, Any]]  # rows of the dataset


class UpcomingBatches:
    """Batches of one epoch, fetched early enough that the next generation block's prompts are known.

    It fetches only when the trainer fetches, because fetching is a collective with a dispatching dataloader.

    Args:
        source (`Iterator`):
            Iterator over the epoch's batches.
        ahead (`int`):
            Number of batches to hold beyond those handed out: the length of a generation block.
    """

    def __init__(self, source: Iterator[Batch], ahead: int):
        self.source = source
        self._ahead = ahead
        self._held: list[Batch] = []  # batches of the current optimizer step, then later ones
        self._handed = 0  # number of held batches that the trainer has received

    def open_window(self) -> "UpcomingBatches":
        """Drop the batches of the last optimizer step and return the iterator for those of the next one."""
        del self._held[: self._handed]
        self._handed = 0
        return self

    def __iter__(self) -> "UpcomingBatches":
        return self

    def __next__(self) -> Batch:
        missing = self._handed + 1 + self._ahead - len(self._held)
        self._held += islice(self.source, max(0, missing))
        if self._handed == len(self._held):
            raise StopIteration
        self._handed += 1
        return self._held[self._handed - 1]

    def after(self, batch: Batch, count: int) -> Batch | None:
        """Return the batch `count` positions after the current `batch`, or `None` if the epoch ends before it."""
        index = self._index(batch)
        return (
            self._held[index + count]
            if index is not None and index + count < len(self._held)
            else None
        )

    def place_in_window(self, batch: Batch) -> int:
        """Count the batches of this optimizer step that come before `batch`."""
        return self._index(batch) or 0

    def _index(self, batch: Batch) -> int | None:
        return next((index for index, held in enumerate(self._held) if held is batch), None)
