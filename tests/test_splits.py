"""The advice on a split of GPUs, from measured seconds."""

import pytest

from trl_multinode.run.splits import StepTimes, split_advice

# A step of 7+1 with a long tail: 10 s with all rows, 30 s with fewer than a tenth of them, 10 s x 7 of training
LONG_TAIL = StepTimes(40.0, 10.0, tail_s=30.0)
AHEAD = {"max_staleness": 1}
IN_FLIGHT = {"max_staleness": 2}
COLOCATED = "colocation on all 8 would take about "
BEST = "the best or within 5 %"
# Seconds of a step, training and reserved GPUs, options, what the advice says in this order, what it does not say
ADVICE = {
    # g = 30 s x 1 GPU, t = 10 s x 7 GPUs; R=3 of 8: 30/3 + 70/5 = 24 s, the least; colocated (30 + 70) / 8 = 12.5 s
    "to generation": (
        StepTimes(30.0, 10.0), 7, 1, {},
        ["7+1 takes 40.0 s", "5+3 would take about 24.0 s", "num_processes = 5", COLOCATED + "12.5 s"], "",
    ),
    # g = 2 x 4, t = 20 x 4: R=1: 8/1 + 80/7 = 19.4; R=2: 8/2 + 80/6 = 17.3, the least; R=4: 22
    "to training": (StepTimes(2.0, 20.0), 4, 4, {}, ["4+4 takes 22.0 s", "6+2 would take about 17.3 s"], ""),
    # g = 10 x 3, t = 14 x 5 as above: 5+3 is the best
    "best": (StepTimes(10.0, 14.0), 5, 3, {}, ["5+3 takes 24.0 s", BEST], "num_processes"),
    "smallest node": (StepTimes(2.0, 1.0), 1, 1, {}, ["1+1 takes 3.0 s"], ""),
    # g = 12 x 2, t = 4 x 6: max(24/R, 24/(8-R)): 12 s now, least at R=4: 6 s; one after the other 24/2 + 24/6 = 16 s
    "ahead": (
        StepTimes(12.0, 4.0), 6, 2, AHEAD,
        ["6+2 takes 12.0 s of generation beside training", "4+4 would take about 6.0 s", "num_processes = 4",
         COLOCATED + "6.0 s"], "",
    ),
    "alternating": (StepTimes(12.0, 4.0), 6, 2, {}, ["6+2 takes 16.0 s of generation and training"], ""),
    # g = 5 x 1, t = 5 x 7: 7+1 hides all of the generation; alternating, 6+2 takes 2.5 + 5.8 = 8.3 s instead of 10
    "good if ahead": (StepTimes(5.0, 5.0), 7, 1, AHEAD, [BEST], ""),
    "bad if alternating": (StepTimes(5.0, 5.0), 7, 1, {}, ["6+2 would take about 8.3 s"], ""),
    # More engines do not shorten a tail. Drained, R engines: 30 + 10/R beside 70/(8-R): R=4: 32.5 s, R=5: 32;
    # colocated: 30 + 10/8 + 70/8. Without the tail, 4+4 takes the longer of 40/4 and 70/4
    "long tail": (
        LONG_TAIL, 7, 1, AHEAD, ["7+1 takes 40.0 s", "3+5 would take about 32.0 s", COLOCATED + "40.0 s"], "",
    ),
    "no tail": (StepTimes(40.0, 10.0), 7, 1, AHEAD, ["5+3 would take about 14.0 s"], ""),
    # A row of the tail needs at most a tenth of an engine: 10 + 3 s on one engine, beside 10 s of training
    "tail": (
        LONG_TAIL, 7, 1, {},
        ["30.0 of 40.0 s", 'max_staleness=3', "7+1 would take about 13.0 s, 6+2 about 11.7 s."], "",
    ),
    "best in flight too": (StepTimes(1.0, 1.0, tail_s=0.5), 1, 1, {}, ["1+1 would take about 1.0 s."], ""),
    "in flight": (
        LONG_TAIL, 7, 1, IN_FLIGHT, ["7+1 takes 13.0 s", "6+2 would take about 11.7 s"], "fewer than",
    ),
    # g = 40 x 4 over R GPUs of a node, t = 40 x 4 over 8-R: sqrt(g) = sqrt(t), so that no other split is better
    "no better nodes": (StepTimes(40.0, 40.0), 4, 4, {"nodes": 8}, [BEST], "only generate"),
    # g = 7 x 1, t = 1 x 7: R=4 takes 3.5 s; k=4 of 8 nodes the same
    "same as nodes": (StepTimes(7.0, 1.0), 7, 1, {"nodes": 8}, ["4+4 would take about 3.5 s"], "only generate"),
    # g = 70, t = 3.5 on one GPU of two: k of 8 nodes take max(70 / (2k/8), 3.5 / (2 - 2k/8)) s, 40 s for k=7
    "nodes": (
        StepTimes(70.0, 3.5), 1, 1, {"nodes": 8, **AHEAD},
        ["1+1 takes 70.0 s", BEST,
         "7 of 8 nodes that only generate, beside others that train on all 2, would take about 40.0 s",
         "colocation on all 2"], "",
    ),
    # One engine per node is more than 2 s of generation need: k=1 of 16 is half a GPU per node, 4 s beside 70 / 7.5 s
    "few engines": (
        StepTimes(2.0, 10.0), 7, 1, {"nodes": 16, **AHEAD},
        [BEST, "1 of 16 nodes that only generate, beside others that train on all 8, would take about 9.3 s"], "",
    ),
    "short tail": (StepTimes(10.0, 90.0, tail_s=5.0), 7, 1, {}, ["7+1"], "in_flight"),
}  # fmt: skip


@pytest.mark.parametrize("case", ADVICE)
def test_advice(case):
    times, training, reserved, options, said, unsaid = ADVICE[case]
    advice = split_advice(times, training, reserved, **options)
    places = [advice.find(words) for words in said]
    assert -1 not in places and places == sorted(places), advice
    assert not unsaid or unsaid not in advice
