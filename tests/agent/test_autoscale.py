"""Number of engines that the measure of a run asks for: bounds, pauses, and no swing at any load."""

import json
from collections import deque
from itertools import pairwise
from pathlib import Path

import pytest

from trl_multinode.agent.autoscale import FILLED, INTERVALS, LATE_S, TAKEN_OVER, WAITING, Autoscaler
from trl_multinode.engine.agents import Measure

INTERVAL_S = 10.0


class Pool:
    """Pool of a run with an autoscaler; engines begin to serve, or leave, some intervals after the decision.

    Args:
        least (`int`), most (`int`):
            Bounds of the autoscaler.
        own (`int`, *optional*, defaults to 0):
            Engines of the training nodes.
        delay (`int`, *optional*, defaults to 2):
            Intervals until a decision is carried out.
    """

    def __init__(self, least: int, most: int, own: int = 0, delay: int = 2):
        self.scaler = Autoscaler(least, most)
        self.own = own
        first, _ = self.scaler.wanted(None, 0, 0.0)
        self.wanted = [first]
        self._orders = deque([first] * delay)
        self._serving = first

    def pass_interval(self, load: float) -> None:
        """Let an interval pass, whose rows would fill `load` engines."""
        engines = self.own + self._serving
        # an interval has the use of its engines, and the number of those at its end
        self._orders.append(self.wanted[-1])
        self._serving = self._orders.popleft()
        measure = Measure(
            step=len(self.wanted),
            engines=self.own + self._serving,
            filled=min(1.0, load / engines),
            waiting=max(0.0, 1 - engines / load),
        )
        now_s = len(self.wanted) * INTERVAL_S
        wanted, reason = self.scaler.wanted(measure, self._serving, now_s)
        assert bool(reason) == (wanted != self.wanted[-1])
        self.wanted.append(wanted)

    def changes(self, since: int = 0) -> list[int]:
        """Return the change of every interval."""
        return [after - before for before, after in pairwise(self.wanted[since:])]


def measure(step: int, engines: int, filled: float = 1.0, waiting: float = 0.5) -> Measure:
    return Measure(step, engines, filled, waiting)


def after_start(scaler: Autoscaler, engines: int) -> int:
    """Give an autoscaler the measures before its first decision, and return the step of the last one."""
    for step in range(INTERVALS):
        _, reason = scaler.wanted(measure(step, engines), engines, 0.0)
        assert not reason
    return INTERVALS - 1


@pytest.mark.parametrize("load", [0.1, 3.0, 50.0])
@pytest.mark.parametrize("own", [0, 1, 4])
def test_the_number_stays_within_its_bounds_and_changes_one_by_one(load, own):
    pool = Pool(2, 6, own)
    for _ in range(100):
        pool.pass_interval(load)
    assert min(pool.wanted) >= 2 and max(pool.wanted) <= 6
    assert set(pool.changes()) <= {-1, 0, 1}


@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("delay", [1, 2, 5])
def test_no_constant_load_makes_the_number_swing(own, delay):
    for tenths in range(1, 140, 4):
        load = tenths / 10
        # from below: what was added is not removed again
        pool = Pool(1, 12, own, delay)
        for _ in range(200):
            pool.pass_interval(load)
        assert set(pool.changes()) <= {0, 1}, load
        assert not any(pool.changes(since=-30)), load
        # from above: what was removed is not added again
        for _ in range(200):
            pool.pass_interval(100.0)
        high = len(pool.wanted)
        for _ in range(200):
            pool.pass_interval(load)
        assert set(pool.changes(since=high)) <= {-1, 0}, load
        assert not any(pool.changes(since=-30)), load


def test_the_number_follows_a_load_that_grows_and_shrinks():
    pool = Pool(1, 16)
    loads = [0.5 + 0.05 * min(number, 600 - number) / 2 for number in range(600)]
    for load in loads:
        pool.pass_interval(load)
    peak = loads[300]
    # as many engines as keep the ranks from waiting, and not many more
    assert 1 - max(pool.wanted) / peak <= WAITING
    assert max(pool.wanted) <= peak + 1
    # one engine would be half full, as much as a second one is asked for
    assert loads[-1] >= TAKEN_OVER and pool.wanted[-1] == 2
    ups, downs = pool.changes()[:300], pool.changes(since=330)
    assert -1 not in ups and 1 not in downs


def test_no_measure_changes_nothing():
    scaler = Autoscaler(2, 4)
    assert scaler.wanted(None, 0, 0.0) == (2, "")
    assert scaler.wanted(None, 2, 1000.0) == (2, "")
    # of an earlier life of the scheduler
    assert Autoscaler(2, 4).wanted(None, 3, 0.0) == (3, "")
    assert Autoscaler(2, 4).wanted(None, 9, 0.0) == (4, "")


def test_a_measure_counts_once():
    scaler = Autoscaler(1, 8)
    for _ in range(50):
        assert scaler.wanted(measure(0, 1), 1, 0.0) == (1, "")
    step = after_start(scaler, 1) + 1
    wanted = [scaler.wanted(measure(step, 1), 1, 0.0)[0] for _ in range(50)]
    assert wanted == [2] * 50


def test_after_a_change_only_intervals_behind_it_count():
    scaler = Autoscaler(1, 8)
    step = after_start(scaler, 1) + 1
    assert scaler.wanted(measure(step, 1), 1, 0.0)[0] == 2
    # the engine that was asked for does not serve yet
    for _ in range(20):
        step += 1
        assert scaler.wanted(measure(step, 1), 2, 1.0) == (2, "")
    # it serves: its first interval has a part without it
    for _ in range(INTERVALS):
        step += 1
        assert scaler.wanted(measure(step, 2), 2, 2.0) == (2, "")
    assert scaler.wanted(measure(step + 1, 2), 2, 2.0)[0] == 3


def test_engines_of_others_that_join_begin_the_count_of_intervals_anew():
    scaler = Autoscaler(1, 8)
    step = after_start(scaler, 1) + 1
    for _ in range(INTERVALS):
        assert scaler.wanted(measure(step, 3), 1, 0.0) == (1, "")
        step += 1
    assert scaler.wanted(measure(step, 3), 1, 0.0)[0] == 2


def test_an_engine_that_finds_no_place_is_neither_asked_for_twice_nor_waited_for():
    scaler = Autoscaler(1, 8)
    step = after_start(scaler, 1) + 1
    assert scaler.wanted(measure(step, 1), 1, 0.0)[0] == 2
    for _ in range(20):
        step += 1
        assert scaler.wanted(measure(step, 1), 1, LATE_S + 1) == (2, "")
    # the run does not need it any more
    for _ in range(INTERVALS):
        step += 1
        wanted, reason = scaler.wanted(measure(step, 2, 0.1, 0.0), 1, LATE_S + 1)
    wanted, reason = scaler.wanted(measure(step + 1, 2, 0.1, 0.0), 1, LATE_S + 1)
    assert wanted == 1 and reason


def test_waits_for_the_last_long_rows_add_no_engine():
    scaler = Autoscaler(1, 8)
    for step in range(20):
        assert scaler.wanted(measure(step, 4, filled=FILLED - 0.1), 4, 0.0) == (4, "")


def test_the_measures_of_the_next_run_are_new():
    scaler = Autoscaler(1, 8)
    step = after_start(scaler, 1) + 1
    assert scaler.wanted(measure(step, 1), 1, 0.0)[0] == 2
    for step in range(INTERVALS):
        assert scaler.wanted(measure(step, 2), 2, 1.0) == (2, "")
    assert scaler.wanted(measure(INTERVALS, 2), 2, 1.0)[0] == 3


# ---- the page


def test_the_table_of_the_page_is_that_of_the_simulation(monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(root / "benchmarks")
    from autoscale import RESULTS, compared, table

    results = json.loads(RESULTS.read_text())
    page = (root / "docs" / "operate" / "beyond.md").read_text()
    assert "\n".join(table(results)) in page
    long, short = results["runs"]["1024"], results["runs"]["256"]
    # what the page says of it
    assert long == long | compared(long["autoscale"], long["fixed"])
    assert long["seconds_saved"] is None and short["gpu_seconds_saved"] < 0
    saved = long["gpu_seconds_saved"] / long["fixed"]["7"]["gpu_seconds"]
    assert f"{100 * saved:.1f} % fewer GPU-hours than 7 engines" in page
