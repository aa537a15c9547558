"""Groups that stay open across weight updates: whatever the order in which rows end, every id is taken once."""

import threading
from collections import deque

import numpy as np
import pytest
from waiting import HANG_S, until

from trl_multinode.engine.client import Rollout
from trl_multinode.engine.stream import Peeking, Request
from trl_multinode.errors import EngineStalledError, WeightVersionError
from trl_multinode.rollouts.groups import SEED_BITS, Group, OpenGroups
from trl_multinode.rollouts.recorded import joined_output
from trl_multinode.rollouts.recorded_groups import RecordedGroups
from trl_multinode.wire.messages import WeightVersion

pytestmark = pytest.mark.usefixtures("no_collecting_afterwards")
SIZE = 4  # rows of a group


def rollout(length: int = 3) -> Rollout:
    return Rollout(
        np.arange(length, dtype=np.int32), np.zeros(length, np.float32), WeightVersion(1, 0), 0
    )


class Rows:
    """A stream whose rows end when the test says so."""

    def __init__(self):
        self.open, self.ended, self.log = [], deque(), []
        self._left, self._changed = 0, threading.Condition()
        self.error: BaseException | None = None

    stopped = False

    @property
    def rows_left(self) -> int:
        return self._left

    rows_under_way = rows_left

    def add(self, requests):
        with self._changed:
            self.open += requests
            self.log += requests
            self._left += len(requests)

    def end(self, *which, length: int = 3):
        with self._changed:
            for request in which:
                self.open.remove(request)
                self.ended.append((request, [rollout(length)]))
            self._changed.notify_all()

    def peek(self):
        peeking = Peeking()
        with self._changed:
            peeking.rows = [(request, self.so_far) for request in self.open] if self.so_far else []
        peeking.complete.set()
        return peeking

    so_far: Rollout | None = None

    def poll(self):
        with self._changed:
            self._changed.wait_for(lambda: self.ended or self.error, 0.01)
            if self.error:
                raise self.error
            found = list(self.ended)
            self.ended.clear()
            self._left -= len(found)
            return found


def group(number: int, place: int = 0, due: int | None = None, size: int = SIZE) -> Group:
    prompts = [[number, place]] * size
    return Group(
        number,
        place,
        [{"prompt": f"{number}/{place}"}] * size,
        prompts,
        number if due is None else due,
    )


def ids(groups) -> list[tuple[int, int]]:
    return [one.id for one in groups]


def of_group(rows: Rows, one: Group) -> list:
    return [request for request in rows.open if request.group == one.id]


def opened(*groups: Group) -> tuple[Rows, OpenGroups]:
    rows = Rows()
    found = OpenGroups(rows)
    found.submit(groups)
    return rows, found


def test_the_oldest_complete_groups_are_taken_and_the_others_stay():
    first, second, third = (group(i, due=9) for i in range(3))
    rows, groups = opened(first, second, third)
    rows.end(*of_group(rows, third), *of_group(rows, second), *of_group(rows, first)[:-1])
    until(
        lambda: groups.counts["ended_rows"] == 3 * SIZE - 1
    )  # the newest group is the first to be complete
    assert ids(groups.take(1, 0)) == [(1, 0)]
    rows.end(*rows.open)
    assert ids(groups.take(2, 1)) == [(0, 0), (2, 0)] and groups.ids == []


def test_a_row_keeps_its_place_in_its_group_whatever_ends_first():
    rows, groups = opened(group(0))
    for length, request in enumerate(reversed(list(rows.open)), start=1):
        rows.end(request, length=length)
    (taken,) = groups.take(1, 0)
    assert [len(row.tokens) for row in taken.rows] == [4, 3, 2, 1]
    assert groups.take_counts() == {"ended_rows": 4, "ended_tokens": 10}
    assert not groups.take_counts()


def test_an_error_of_the_engines_reaches_the_rank_that_waits_and_everyone_after_it():
    rows, groups = opened(group(0))
    rows.error = EngineStalledError("engine 0 of node 1 made no token")
    for _ in range(2):
        with pytest.raises(EngineStalledError, match="engine 0 of node 1"):
            groups.take(1, 0)


def test_a_row_that_must_not_be_used_ends_the_run():
    def refuse(row, first):
        raise WeightVersionError(f"not from update {first} on")

    rows = Rows()
    groups = OpenGroups(rows, refuse)
    groups.submit([group(0)])
    rows.end(rows.open[0])
    with pytest.raises(WeightVersionError, match="not from update 0 on"):
        groups.take(1, 0)


def test_the_thread_ends_with_the_last_row_and_another_one_begins_with_the_next():
    rows = Rows()
    groups = OpenGroups(rows)
    for number in range(2):
        groups.submit([group(number)])
        rows.end(*rows.open)
        groups.take(1, number)
        until(lambda: groups._thread is None, "the thread ends with the last row")


def test_a_row_under_way_is_saved_as_far_as_it_is_made_and_continues_with_the_rest_of_its_budget():
    rows, groups = opened(group(0, due=9))
    rows.so_far = rollout(2)
    for request in rows.open[:2]:
        rows.end(request)
    until(lambda: groups.counts["ended_rows"] == 2)
    saved = groups.snapshot()
    (copy,) = saved
    rows.end(*rows.open)
    groups.take(1, 0)
    assert [row is None for row in copy.rollouts] == [False, False, True, True]
    assert [row and len(row.tokens) for row in copy.begun_rows] == [None, None, 2, 2]
    copy.seeds = [7, 8, 9, 10]

    again = Rows()
    resumed = OpenGroups(again)
    resumed.restore(saved)
    assert resumed.go_on(min_update=5, longest=100) == (2, 0)
    third = again.open[0]
    assert (third.prompt, third.num_made, third.row, third.min_update) == ([0, 0, 0, 1], 2, 2, 5)
    assert third.seed == 9 + (2 << SEED_BITS)  # another draw than that of its first tokens
    again.end(third, length=4)
    until(lambda: resumed.counts["ended_rows"] == 1)
    once_more = OpenGroups(Rows())
    once_more.restore(resumed.snapshot())
    # the row that has ended does not continue
    assert once_more.go_on(min_update=6, longest=100) == (
        1,
        0,
    )
    again.end(*again.open, length=4)
    (taken,) = resumed.take(1, 0)
    assert [len(row.tokens) for row in taken.rows] == [3, 3, 6, 6]
    assert [[(span.update, span.end) for span in row.versions] for row in taken.rows[1:3]] == [
        [(1, 3)],
        [(1, 2), (1, 6)],
    ]


def test_a_row_that_was_begun_with_too_many_tokens_begins_again():
    rows = Rows()
    groups = OpenGroups(rows)
    one = group(0)
    one.begun_rows = [rollout(2), rollout(3), None, None]
    groups.restore([one])
    assert groups.go_on(min_update=5, longest=3) == (1, SIZE - 1)


def test_dropped_groups_are_forgotten_when_their_rows_have_ended():
    rows, groups = opened(group(0))
    collecting = groups._thread
    join = collecting.join

    def end_rows_and_join(*timeout: float) -> None:
        """End the rows only when `drop` waits for their thread."""
        rows.end(*list(rows.open))
        join(*timeout)

    collecting.join = end_rows_and_join
    groups.drop()
    assert groups.ids == [] and groups.rows_under_way == 0
    groups.submit([group(0)])
    rows.end(*list(rows.open))
    assert ids(groups.take(1, 0)) == [(0, 0)]


# ---- groups whose whole rollouts run ahead


class Silent(Rows):
    """A stream whose engines are gone, so nobody collects rows any more."""

    rows_left = 0


def test_the_thread_of_a_dropped_group_ends_and_leaves_a_new_group_of_its_id_alone():
    ends = [threading.Event(), threading.Event()]
    not_begun = iter(ends)
    answers = []

    def make(one: Group, ask) -> None:
        end = next(not_begun)
        try:
            while True:
                answers.append(ask([[1]], None, None, 8))
        finally:
            end.set()

    groups = RecordedGroups(make, lambda: 0, Silent())
    groups.submit([group(0)])
    until(lambda: groups._turns)
    with groups._changed:  # so that the old group's thread goes on after the new one was begun
        groups.drop()
        groups.submit([group(0)])
    assert ends[0].wait(HANG_S) and answers == []
    until(lambda: groups._turns)
    assert list(groups._turns) == [(0, 0)]
    groups._add(Request([1], group=(0, 0)), 0, rollout())  # an answer for the new group
    until(lambda: answers or ends[1].is_set())
    assert len(answers) == 1 and not ends[1].is_set()
    groups.drop()
    assert ends[1].wait(HANG_S) and not groups._turns


def test_a_group_whose_rollout_func_gave_no_mask_has_one_beside_a_group_with_one():
    """TRL counts the tokens of every row's mask."""
    outputs = [
        {"prompt_ids": [[1]], "completion_ids": [[5, 6]]} | more
        for more in ({"env_mask": [[1, 0]]}, {}, {"env_mask": None})
    ]
    assert joined_output(outputs)["env_mask"] == [[1, 0], [1, 1], [1, 1]]
    assert joined_output(outputs[2:] * 2)["env_mask"] is None
