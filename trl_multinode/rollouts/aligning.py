"""Alignment of the ranks after work whose time differs from rank to rank, before TRL's collective that follows it.

Generation and rewards take each rank its own time, and the collective after them has a limit, `ddp_timeout`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
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
    meet_once, gather = cache(align), owner.gather

    def gather_aligned(*args: Any, **kwargs: Any) -> Any:
        meet_once()
        return gather(*args, **kwargs)

    with replaced(owner, "gather", gather_aligned):
        yield
