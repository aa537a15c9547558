"""Keeps the texts of prompts and completions off the network.

TRL gathers all texts to all ranks at every generation, also with `log_completions=False`. Numbers are never touched.
"""

from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import torch.distributed as dist


class TextLogging:
    """Replaces the module's `gather_object` for exactly this round's prompts and completions, by identity.

    Every other gather stays real, or ranks would deadlock: a reward function may gather what it likes.

    Args:
        module (`ModuleType`):
            The TRL module whose global `gather_object` is replaced while scoring.
        keep (`bool`):
            `log_completions`: the main process, and only it, receives the texts.
    """

    def __init__(self, module: ModuleType, keep: bool):
        self._module = module
        self._keep = keep
        self._texts: tuple = ()

    def remember(self, prompts: list, completions: list) -> None:
        """Called when TRL has both in hand, before it gathers them."""
        self._texts = (prompts, completions)

    @contextmanager
    def during_scoring(self):
        real = self._module.gather_object

        def gather(value):
            if not any(value is text for text in self._texts):
                return real(value)
            return gather_to_main(value) if self._keep else []

        try:
            with mock.patch.object(self._module, "gather_object", gather):
                yield
        finally:
            self._texts = ()


def gather_to_main(rows: list) -> list:
    """The rows of all ranks in rank order on rank 0, nothing elsewhere. A collective of all training ranks."""
    if not dist.is_initialized():
        return rows
    parts: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(rows, parts, dst=0)
    return [row for part in parts for row in part] if parts else []
