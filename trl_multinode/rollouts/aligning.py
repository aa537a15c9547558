"""Alignment of the ranks after work whose time differs from rank to rank, before TRL's collective that follows it.

Generation and rewards take each rank its own time, and the collective after them has a limit, `ddp_timeout`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..libraries import replaced


@contextmanager
def aligned_before_gather(owner: Any, align: Callable[[], None]) -> Iterator[None]:
    """
    Call `align` before the first `gather` in the context.

    A tool loop calls `generate` a different number of times on each rank, but all ranks call the same collectives in
    the same order, so the first of them is the same one everywhere.

    Args:
        owner (`Any`):
            TRL's accelerator, or the module of a trainer, where TRL looks up `gather`.
        align (`Callable[[], None]`):
            Function that waits for the other ranks.
    """
    with replaced(owner, "gather", _after(align, owner.gather)):
        yield


def _after(align: Callable[[], None], gather: Callable) -> Callable:
    pending = [align]

    def gather_aligned(*args: Any, **kwargs: Any) -> Any:
        while pending:
            pending.pop()()
        return gather(*args, **kwargs)

    return gather_aligned
