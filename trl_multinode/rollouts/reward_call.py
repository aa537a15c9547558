"""A call of a user's function: the row and the line that it has reached, and a look at what a reward returned.

This module loads neither torch nor transformers, because the processes that run reward functions need it.
"""

import inspect
import math
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

from ..errors import RolloutError
from ..run.heartbeats.frames import frame_of

# arguments with one element per row
PER_ROW = (
    "prompts",
    "completions",
    "completion_ids",
    "environments",
)
NAMED_FRAMES = 3
OWN_FRAMES = str(Path(__file__).parent)  # above those of the function


class Rows(list):
    """List that knows which of its elements a loop over it has reached. A finished loop has reached none."""

    at: int | None = None

    def __iter__(self) -> Iterator[Any]:
        for self.at, row in enumerate(super().__iter__()):
            yield row
        self.at = None


# by identity: an `__eq__` in Python would let other threads run inside `list.remove`
@dataclass(eq=False)
class Call:
    """Call of a reward function, a tool or another function of the user that has not returned.

    The thread that builds it is the one in which the function runs.
    """

    name: str  # for example "the tool `search`"
    place: str = (
        ""  # row for which it runs, for example ", for row 3"; a reward function gets several rows
    )
    whose: str = "this rank's"
    rows: list[Rows] = field(default_factory=list)
    coroutine: Any = None  # of an async function
    since: float = field(default_factory=lambda: time.monotonic())
    thread: int = field(default_factory=threading.get_ident)

    def row(self) -> str:
        """Return the row that the function has reached, if it loops over the rows it got."""
        for rows in self.rows:
            if rows.at is not None:
                return f", in row {rows.at} of {self.whose} rows 0 to {len(rows) - 1}"
        return self.place

    def known_row(self) -> str:
        """Return the same, or nothing if this process would have to ask for it."""
        return self.row()

    def where(self) -> str:
        """Return the frames of the function, the innermost last."""
        frames = [f"{one.filename}:{one.lineno} ({one.name})" for one in self._stack()]
        if len(frames) > NAMED_FRAMES:
            frames = [*frames[: NAMED_FRAMES - 1], "...", frames[-1]]
        return f"; it is at {', '.join(frames)}" if frames else ""

    def _stack(self) -> list[traceback.FrameSummary]:
        if self.coroutine is not None:
            return traceback.StackSummary.extract(_waiting(self.coroutine))
        stack: list[traceback.FrameSummary] = []
        for frame in traceback.extract_stack(frame_of(self.thread)):
            stack.append(frame)
            if frame.filename.startswith(OWN_FRAMES):
                stack.clear()
        return stack


def with_rows(kwargs: dict[str, Any], call: Call) -> dict[str, Any]:
    """Return the arguments of a call with lists that know which row its function has reached."""
    found = {name: Rows(kwargs[name]) for name in PER_ROW if isinstance(kwargs.get(name), list)}
    call.rows = list(found.values())
    return kwargs | found


def _waiting(coroutine: Any) -> Iterator[tuple[FrameType, int]]:
    """Yield frames and lines of a chain of coroutines that wait for each other, the innermost last."""
    while isinstance(coroutine, CoroutineType):
        if (frame := coroutine.cr_frame) is not None:
            yield frame, frame.f_lineno
        coroutine = coroutine.cr_await


def as_rewards(
    where: str, name: str, rewards: Any, rows: int, advice: str = ""
) -> list[float | None]:
    """Return what a reward function returned as a list of numbers and `None`.

    Args:
        where (`str`):
            Name of the rank, for the error.
        name (`str`):
            Name of the function.
        rewards (`Any`):
            Value that it returned.
        rows (`int`):
            Number of completions that it was given.
        advice (`str`, *optional*):
            Sentence for a function that returned another number of rewards.

    Raises:
        `RolloutError`: if the value is no sequence of finite numbers, NaN and `None`, one per completion.
    """
    must = "It must return a list of finite numbers and None, one per completion."
    kind = type(rewards).__name__
    if inspect.iscoroutine(rewards):
        rewards.close()
        must = "Declare it with `async def`, so that it is awaited."
    if not hasattr(rewards, "__iter__") or isinstance(rewards, str | bytes | Mapping | Set):
        raise RolloutError(
            f"{where}: the reward function `{name}` returned a value of type {kind}. {must}"
        )
    found = list(rewards)
    if len(found) != rows:
        raise RolloutError(
            f"{where}: the reward function `{name}` returned {len(found)} rewards for {rows} completions. "
            f"{must}{advice}"
        )
    for row, reward in enumerate(found):
        try:
            if isinstance(reward, str | bytes):
                raise TypeError(f"text {reward[:40]!r}")
            found[row] = None if reward is None else float(reward)
            if found[row] in (math.inf, -math.inf):
                raise ValueError("infinite")
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            kind = type(reward).__name__
            raise RolloutError(
                f"{where}: the reward function `{name}` returned no number for row {row}, got a value of type {kind} "
                f"({error}). {must}"
            ) from error
    return found
