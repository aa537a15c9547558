"""The draw and the verdict of `make faults-random`; the runs themselves take half an hour."""

from collections import Counter

from random_faults import draw, lines_of
from random_runs import Outcome, last_steps


def test_a_seed_gives_the_same_40_faults_of_which_28_are_of_engines():
    faults = draw(40, seed=7)
    assert faults == draw(40, seed=7) != draw(40, seed=8)
    assert Counter(fault.kind for fault in faults) == {"engine": 28, "rank": 8, "launcher": 4}
    assert set(Counter((fault.kind, fault.signal) for fault in faults).values()) == {7, 2, 1}
    assert {fault.node for fault in faults} == {0, 1}
    assert [len(draw(count, seed=0)) for count in (1, 2, 3, 9)] == [1, 2, 3, 9]


def test_a_second_launch_does_not_count_as_going_on():
    faults = draw(3, seed=0)
    outcomes = [Outcome("goes on", 9.0), Outcome("ends", 7.04, continued=True), Outcome("bad", 150.0, ["left: 7"])]
    text = "\n".join(lines_of(faults, outcomes, seed=0))
    assert "1 of 3 runs go on" in text and "1 end as promised, of which 1 have" in text and "1 do neither" in text
    assert "| ends | 7.0 | yes |" in text and "| goes on | 9.0 |  |" in text


def test_a_run_that_was_launched_again_is_compared_from_its_checkpoint_on():
    rounds, steps = [{"step": 0}, {"step": 1}, {"step": 2}], {"1": [0.5], "2": [0.25], "3": [0.1]}
    assert last_steps([{"rounds": rounds, "steps": steps}], 2) == [{"rounds": [{"step": 2}], "steps": {"3": [0.1]}}]
