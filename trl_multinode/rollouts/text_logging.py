"""Text logging that keeps prompts and completions off the network, except those that the main process logs.

TRL gathers all texts to all ranks at every generation, even with `log_completions=False`. Gathers of numbers
are left unchanged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.distributed as dist

from ..libraries import replaced


class TextLogging:
    """Replacement of `gather_object` for exactly this round's prompt and completion lists, recognized by identity.

    Every other gather stays TRL's: a reward function may gather too, and the ranks would deadlock if some skipped it.

    Args:
        module (`ModuleType`):
            TRL module whose global `gather_object` is replaced during scoring.
        keep (`bool`):
            Value of `log_completions`. If `True`, the main process receives the texts; no other rank ever does.
    """

    def __init__(self, module: ModuleType, keep: bool):
        self._module = module
        self._keep = keep
        self._texts: tuple = ()

    def remember(self, prompts: list, completions: list) -> None:
        """Store this round's texts. The trainer calls it before TRL gathers them."""
        self._texts = (prompts, completions)

    @contextmanager
    def during_scoring(self) -> Iterator[None]:
        real = self._module.gather_object

        def gather(value: Any) -> list:
            if not any(value is text for text in self._texts):
                return real(value)
            return gather_to_main(value) if self._keep else []

        try:
            with replaced(self._module, "gather_object", gather):
                yield
        finally:
            self._texts = ()


def gather_to_main(rows: list) -> list:
    """Gather the rows of all ranks to rank 0, in rank order; others get `[]`. A collective of all training ranks."""
    if not dist.is_initialized():
        return rows
    parts: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(rows, parts, dst=0)
    return [row for part in parts for row in part] if parts else []
