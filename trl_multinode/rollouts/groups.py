"""Groups of rows that engines generate across weight updates: which are open, which are complete, which are due.

```python
groups.submit([Group(...), ...])       # their rows start; a thread collects the completions
rows = groups.take(count, number)      # waits for `count` complete groups, the oldest first
```

Nothing in here is a collective, and nothing depends on a trainer: a rank's groups stay on that rank.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..engine.client import Rollout
from ..engine.stream import GroupId, Request, RequestStream
from ..errors import RolloutError
from ..wire.messages import VersionSpan
from .recorded import Recorded, Turn
from .requests import merged

SEED_BITS = 41  # a row's own seed is below 2**40 plus the number of its row


@dataclass
class Group:
    """Completions of one prompt, which are trained together.

    Args:
        number (`int`), place (`int`):
            Generation round of the batch that holds the group, and its place in this rank's part of the batch.
        inputs (`list[dict]`):
            Rows of the dataset, one per completion.
        prompts (`list[list[int]]`):
            Token ids, one row per completion.
        due (`int`):
            Last round that may train the group; that round waits for it.
        begun (`int`), min_update (`int`):
            Round in which the rows were submitted, and the newest weight update at that time.
        seeds (`list[int]`, *optional*):
            Seed of each row.
        rollouts (`list[Rollout | None]`):
            Completion of each row; `None` for a row under way.
        begun_rows (`list[Rollout | None]`):
            Beginning of each row that a checkpoint found under way; the row continues it.
        recorded ([`Recorded`], *optional*):
            The whole rollout, if the group's thread has made it.
        attempt (`int`, *optional*, defaults to 0):
            Number of prompts that were tried and dropped before this one, with `dynamic_sampling`.
        max_tokens (`int`, *optional*):
            Limit for a completion; by default the stream's.
    """

    number: int
    place: int
    inputs: list[dict[str, Any]]
    prompts: list[list[int]]
    due: int
    begun: int = 0
    min_update: int = 0
    seeds: list[int] | None = None
    rollouts: list[Rollout | None] = field(default_factory=list)
    begun_rows: list[Rollout | None] = field(default_factory=list)
    recorded: Recorded | None = None
    attempt: int = 0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        self.rollouts = self.rollouts or [None] * len(self.prompts)
        self.begun_rows = self.begun_rows or [None] * len(self.prompts)

    @property
    def id(self) -> GroupId:
        """Round of the batch that holds the group, and place in this rank's part of it."""
        return self.number, self.place

    @property
    def complete(self) -> bool:
        """Return whether all rows have ended and, if the whole rollout is recorded, nothing of it is left to do."""
        return self.recorded is not None or None not in self.rollouts

    @property
    def seed_mode(self) -> str:
        """Mode of the seeds of the rows; see [`RowSeeds`]."""
        return f"train, attempt {self.attempt}" if self.attempt else "train"

    @property
    def first_turn(self) -> Turn:
        """Prompts and completions of a complete group, those of the first turn."""
        return Turn(self.prompts, self.rows) if self.recorded is None else self.recorded.first_turn

    @property
    def rows(self) -> list[Rollout]:
        """Completions of a complete group, those of all turns."""
        if self.recorded is not None:
            return self.recorded.rows
        rows = [row for row in self.rollouts if row is not None]
        assert len(rows) == len(self.rollouts), f"group {self.id} is not complete"
        return rows

    def missing(self) -> list[Request]:
        """Return a request for each row that has no completion."""
        rows = [row for row, rollout in enumerate(self.rollouts) if rollout is None]
        return list(map(self._request, rows))

    def _request(self, row: int) -> Request:
        seed = None if self.seeds is None else self.seeds[row]
        tokens, num_made = self.prompts[row], 0
        if (begun := self.begun_rows[row]) is not None:
            num_made = len(begun.tokens)
            tokens = [*tokens, *begun.tokens.tolist()]
            # with its own seed, the row would draw the noise of its first tokens again
            if seed is not None:
                seed += num_made << SEED_BITS
        return Request(
            tokens,
            seed=seed,
            min_update=self.min_update,
            group=self.id,
            row=row,
            num_made=num_made,
            max_tokens=self.max_tokens,
        )

    def end_row(self, row: int, rollout: Rollout) -> None:
        """Store a completion, or the rest of one that was begun."""
        self.rollouts[row] = joined(self.begun_rows[row], rollout)
        self.begun_rows[row] = None  # a further checkpoint would count it as a row that continues


def joined(begun: Rollout | None, rest: Rollout) -> Rollout:
    """Return a completion from its beginning and its rest."""
    if begun is None:
        return rest
    start = len(begun.tokens)
    return Rollout(
        np.concatenate([begun.tokens, rest.tokens]),
        np.concatenate([begun.logprobs, rest.logprobs]),
        begun.version,
        rest.engine,
        begun.versions
        + tuple(VersionSpan(span.update, span.step, start + span.end) for span in rest.versions),
    )


class OpenGroups:
    """Groups of one rank that were begun and not taken. One thread collects their rows as long as any is under way.

    Args:
        stream ([`RequestStream`]):
            Requests, on connections that nothing else uses.
        check (`Callable[[Rollout, int], None]`, *optional*):
            Function that raises if a row must not be used. It gets the row and the update of its submission.
        one_by_one (`bool`, *optional*, defaults to `True`):
            Request each row by itself, so that a checkpoint can read how far it is. Otherwise equal consecutive rows
            are one request, which costs a third of the rank's CPU time.
    """

    def __init__(
        self,
        stream: RequestStream,
        check: Callable[[Rollout, int], None] = lambda row, first: None,
        one_by_one: bool = True,
    ):
        self._stream = stream
        self._check = check
        self._one_by_one = one_by_one
        self._open: dict[GroupId, Group] = {}  # oldest first
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.counts = Counter[str]()  # since the last `take_counts`
        self._generated_s = self._waited_s = 0.0

    @property
    def rows_under_way(self) -> int:
        """Number of rows that an engine has and that have not ended. Further ones wait in this rank."""
        return self._stream.rows_under_way

    @property
    def stopped(self) -> bool:
        """Return whether rows wait and no engine is left for them."""
        return self._stream.stopped

    @property
    def ids(self) -> list[GroupId]:
        """Ids of the open groups, the oldest first."""
        return list(self._open)

    def submit(self, groups: Iterable[Group]) -> None:
        """Begin the missing rows of `groups`, which must be newer than the open ones, and return at once."""
        self.restore(groups := list(groups))
        self._begin(groups)

    def restore(self, groups: Iterable[Group]) -> None:
        """Add the groups of a checkpoint. Their missing rows begin with `go_on`."""
        with self._changed:
            for group in groups:
                assert group.id not in self._open, f"group {group.id} was begun twice"
                self._open[group.id] = group

    def set_due(self, due: Callable[[int, Group], int]) -> None:
        """Give each open group the round `due(index, group)`, where `index` counts from the oldest."""
        for index, group in enumerate(self._open.values()):
            group.due = due(index, group)

    def go_on(self, min_update: int, longest: int) -> tuple[int, int]:
        """Begin the missing rows of restored groups, with weight update `min_update` or later.

        A row that was begun with fewer than `longest` tokens is continued.

        Returns:
            Number of rows that continue, and of rows that begin again.
        """
        num_continued = 0
        for group in self._open.values():
            group.min_update = min_update
            group.begun_rows = [
                row if row and len(row.tokens) < longest else None for row in group.begun_rows
            ]
            num_continued += sum(row is not None for row in group.begun_rows)
        return num_continued, self._begin(list(self._open.values())) - num_continued

    def _begin(self, groups: list[Group]) -> int:
        requests = [request for group in groups for request in group.missing()]
        self._send(requests if self._one_by_one else merged(requests))
        return len(requests)

    def _send(self, requests: list[Request]) -> None:
        with self._changed:
            self._stream.add(requests)
            if self._thread is None and self._error is None and self._stream.rows_left:
                # A daemon thread, so that a rank that exits early does not wait for completions it will not use
                self._thread = threading.Thread(
                    target=self._collect, name="open-groups", daemon=True
                )
                self._thread.start()

    def wait_for_all(self) -> bool:
        """Wait until all open groups are complete, or until no engine is left for their rows.

        Returns:
            `bool`: whether no engine is left.
        """
        with self._changed:
            return not self._wait_until(self._all_complete)

    def _wait_until(self, done: Callable[[], bool]) -> bool:
        """Wait, and return whether it is done; `False` if no engine is left. The caller holds the lock.

        Raises:
            `EngineError` or `WeightVersionError`: the error that stopped the thread, if there is one.
        """
        start = time.monotonic()
        self._changed.wait_for(lambda: self._error is not None or done() or self.stopped)
        self._waited_s += time.monotonic() - start
        if self._error is not None:
            raise self._error
        return done()

    def _all_complete(self) -> bool:
        return len(self._complete()) == len(self._open)

    def take(self, count: int, number: int) -> list[Group] | None:
        """Remove and return the `count` oldest complete groups, in the order of their ids; wait for them.

        Groups that are due in round `number` or earlier are waited for. The wait fails when an engine makes no token
        for `engine_stall_timeout` seconds.

        Returns:
            `list[Group]`, *optional*: `None` if no engine is left for their rows.

        Raises:
            `RolloutError`: if fewer groups are open.
            `EngineError` or `WeightVersionError`: the error that stopped the thread.
        """
        with self._changed:
            # else the wait would never end, and no request would have a deadline
            if count > len(self._open):
                raise RolloutError(
                    f"Round {number} trains {count} groups and only {len(self._open)} were begun. A subclass or a "
                    "callback changes the batches between the dataloader and the trainer; use `max_staleness=0`."
                )
            if not self._wait_until(lambda: self._may_take(count, number)):
                return None
            return [self._open.pop(group.id) for group in self._complete()[:count]]

    def _may_take(self, count: int, number: int) -> bool:
        due = [group for group in self._open.values() if group.due <= number][:count]
        return len(self._complete()) >= count and all(group.complete for group in due)

    def _complete(self) -> list[Group]:
        return [group for group in self._open.values() if group.complete]

    def _collect(self) -> None:
        try:
            while self._goes_on():
                start = time.monotonic()
                for request, rows in self._stream.poll():
                    for row, rollout in enumerate(rows, request.row):
                        self._add(request, row, rollout)
                if self._stream.stopped:
                    with self._changed:
                        self._changed.notify_all()
                self._generated_s += time.monotonic() - start
        except BaseException as error:  # the main thread raises it in `take`
            with self._changed:
                self._error, self._thread = error, None
                self._changed.notify_all()

    def _goes_on(self) -> bool:
        """Return whether rows are under way. Otherwise the thread ends, and the next `submit` starts another one."""
        with self._changed:
            if self._stream.rows_left == 0:
                self._thread = None
            return self._thread is not None

    def _add(self, request: Request, row: int, rollout: Rollout) -> None:
        self._check(rollout, request.min_update)
        with self._changed:
            self._store(request.group, row, rollout)
            self.counts.update(ended_rows=1, ended_tokens=len(rollout.tokens))
            self._changed.notify_all()

    def _store(self, group_id: GroupId, row: int, rollout: Rollout) -> None:
        if (group := self._open.get(group_id)) is not None:  # `None` if it was dropped
            group.end_row(row, rollout)

    def snapshot(self) -> list[Group]:
        """Return copies of the open groups with all rows as far as they are made, without waiting for their ends."""
        so_far = {(request.group, request.row): rollout for request, rollout in self._rows_so_far()}
        with self._changed:
            return [_copy(group, so_far) for group in self._open.values()]

    def _rows_so_far(self) -> list[tuple[Request, Rollout]]:
        if self._thread is None:
            return []
        peeking = self._stream.peek()
        while not peeking.complete.wait(0.1):
            if self._error is not None:
                raise self._error
            if self._thread is None:  # the last row has just ended
                return []
        return peeking.rows

    def forget(self) -> None:
        """Forget the groups of a run that ended early, without a wait."""
        with self._changed:
            self._open.clear()
            self._changed.notify_all()

    def drop(self) -> None:
        """Forget the groups of a run that ended early, and wait for its rows, because engines cannot abort them."""
        self.forget()
        thread = self._thread
        if thread is not None:
            thread.join()
        self._error = None

    def take_counts(self) -> Counter[str]:
        """Return the counts since the last call: rows that ended and their tokens, and what `Rounds` adds."""
        with self._changed:
            counts, self.counts = self.counts, Counter()
        return counts

    def take_seconds(self) -> tuple[float, float]:
        """Return the seconds with rows under way and those in which `take` waited, since the last call."""
        seconds = self._generated_s, self._waited_s
        self._generated_s = self._waited_s = 0.0
        return seconds


def _copy(group: Group, so_far: Mapping[tuple[GroupId, int], Rollout]) -> Group:
    begun = list(group.begun_rows)
    for row, rollout in enumerate(group.rollouts):
        if rollout is None and (more := so_far.get((group.id, row))) is not None:
            begun[row] = joined(begun[row], more)
    return replace(group, rollouts=list(group.rollouts), begun_rows=begun)
