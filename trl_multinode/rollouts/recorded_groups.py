"""Groups whose whole rollouts run ahead: a thread per group, and one stream of requests for the turns of all."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..engine.client import Rollout
from ..engine.stream import GroupId
from ..errors import RolloutError
from .groups import Group, OpenGroups
from .recorded import Images, Recorded
from .requests import Prompts, requests_of
from .stand_in import Ask


class Dropped(BaseException):
    """Ends the thread of a group that nobody waits for any more."""


class RecordedGroups(OpenGroups):
    """
    Open groups of one rank whose rollouts are made by a function, in a thread per group.

    Args:
        make (`Callable`):
            Function that makes and returns the rollouts of a group. It runs in the group's thread, and calls its
            second argument with prompts, images, seeds and a limit in tokens for the completions of each turn.
        update (`Callable[[], int]`):
            Function that returns the number of the last weight update, which the engines have or will get.
        *args:
            Arguments of [`OpenGroups`].

    Attributes:
        is_stopped (`Callable[[], bool]`):
            Returns whether a rollout waits for an engine by itself.
    """

    def __init__(
        self,
        make: Callable[[Group, Ask], Recorded],
        update: Callable[[], int],
        *args: Any,
    ):
        super().__init__(*args)
        self.is_stopped: Callable[[], bool] = lambda: False
        self._make = make
        self._update = update
        self._turns: dict[GroupId, list[Rollout | None]] = {}  # rows of the turns under way

    @property
    def stopped(self) -> bool:
        return super().stopped or self.is_stopped()

    def look_again(self) -> None:
        """Let the main thread see that a rollout waits for an engine by itself. Any thread calls it."""
        with self._changed:
            self._changed.notify_all()

    def _begin(self, groups: list[Group]) -> int:
        """Start the rollouts of the groups that are not complete, from their first turn, and return their rows."""
        begun = [group for group in groups if not group.complete]
        for group in begun:
            # Daemon threads, so that a rank that exits early does not wait for a tool
            name = f"rollouts-{group.number}-{group.place}"
            threading.Thread(target=self._run, args=(group,), name=name, daemon=True).start()
        return sum(len(group.inputs) for group in begun)

    def _run(self, group: Group) -> None:
        try:
            recorded = self._make(group, partial(self._ask, group))
            with self._changed:
                group.recorded = recorded
                self._changed.notify_all()
        except Dropped:
            pass
        except BaseException as error:  # the main thread raises it in `take`
            with self._changed:
                if self._is_open(group):
                    self._error = error
                self._changed.notify_all()

    def _ask(
        self,
        group: Group,
        prompts: Prompts,
        images: Images | None,
        seeds: list[int] | None,
        max_tokens: int,
    ) -> list[Rollout]:
        """Return the completions of one turn of a group. The group's thread calls it."""
        turn: list[Rollout | None] = [None] * len(prompts)
        shared = {"min_update": self._update(), "group": group.id, "max_tokens": max_tokens}
        requests = list(requests_of(prompts, images, seeds, **shared))
        with self._changed:
            self._check_open(group)
            if group.id in self._turns:
                raise RolloutError(
                    f"A rollout of group {group.id} called `generate` in two threads at once, and would mix up "
                    "their rows. Call it once with all rows of a turn, or in one thread after the other."
                )
            self._turns[group.id] = turn
            self._send(requests)
            self._changed.wait_for(lambda: None not in turn or not self._is_open(group))
            # else all groups were dropped, and a new one may have its id
            if self._turns.get(group.id) is turn:
                del self._turns[group.id]
            self._check_open(group)
        return [row for row in turn if row is not None]

    def _check_open(self, group: Group) -> None:
        """Raise `Dropped` if a group was dropped, or if another thread has failed: the run ends with its error."""
        if not self._is_open(group):
            raise Dropped

    def _is_open(self, group: Group) -> bool:
        return self._error is None and self._open.get(group.id) is group

    def _store(self, group_id: GroupId, row: int, rollout: Rollout) -> None:
        if (turn := self._turns.get(group_id)) is not None:
            turn[row] = rollout

    def snapshot(self) -> list[Group]:
        """Return copies of the open groups, which begin again after a resume: environments cannot be saved."""
        with self._changed:
            return [replace(group, recorded=None) for group in self._open.values()]

    def drop(self) -> None:
        super().drop()
        with self._changed:
            self._turns.clear()
            self._changed.notify_all()
