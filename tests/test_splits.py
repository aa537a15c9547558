"""The advice on a split of GPUs, from measured seconds."""

from trl_multinode.run.splits import StepTimes, split_advice


def test_advice_moves_gpus_to_the_side_that_needs_them():
    # g = 30 s x 1 GPU, t = 10 s x 7 GPUs; R=3 of 8: 30/3 + 70/5 = 24 s, the least; colocated (30 + 70) / 8 = 12.5 s
    advice = split_advice(StepTimes(30.0, 10.0), training=7, reserved=1)
    assert "7+1 takes 40.0 s" in advice
    assert "5+3 would take about 24.0 s (num_processes = 5 per node)" in advice
    assert "colocation on all 8 would take about 12.5 s" in advice


def test_advice_moves_gpus_back_to_training():
    # g = 2 x 4, t = 20 x 4: R=1: 8/1 + 80/7 = 19.4; R=2: 8/2 + 80/6 = 17.3, the least; R=4: 22
    assert "4+4 takes 22.0 s of generation and training per step; 6+2 would take about 17.3 s" in split_advice(
        StepTimes(2.0, 20.0), training=4, reserved=4
    )


def test_advice_leaves_a_split_that_is_within_five_percent_of_the_best():
    # g = 10 x 3, t = 14 x 5 as above: 5+3 is the best
    advice = split_advice(StepTimes(10.0, 14.0), training=5, reserved=3)
    assert "5+3 takes 24.0 s" in advice and "the best or within 5 %" in advice and "num_processes" not in advice


def test_advice_on_the_smallest_node_has_no_other_split():
    assert "1+1 takes 3.0 s" in split_advice(StepTimes(2.0, 1.0), training=1, reserved=1)


def test_advice_for_an_overlapped_run_takes_the_longer_side():
    # g = 12 x 2, t = 4 x 6: max(24/R, 24/(8-R)): 12 s now, least at R=4: 6 s; one after the other 24/2 + 24/6 = 16 s
    advice = split_advice(StepTimes(12.0, 4.0), training=6, reserved=2, overlapped=True)
    assert "6+2 takes 12.0 s of generation beside training per step" in advice
    assert "4+4 would take about 6.0 s (num_processes = 4 per node)" in advice
    assert "colocation on all 8 would take about 6.0 s" in advice
    assert "6+2 takes 16.0 s of generation and training" in split_advice(StepTimes(12.0, 4.0), 6, 2)


def test_advice_differs_where_only_the_overlap_makes_a_split_good():
    # g = 5 x 1, t = 5 x 7: 7+1 hides all of the generation; alternating, 6+2 takes 2.5 + 5.8 = 8.3 s instead of 10
    assert "the best or within 5 %" in split_advice(StepTimes(5.0, 5.0), 7, 1, overlapped=True)
    assert "6+2 would take about 8.3 s" in split_advice(StepTimes(5.0, 5.0), 7, 1)


# a step of 7+1 with a long tail: 10 s with all rows, 30 s with fewer than a tenth of them, 10 s x 7 of training
LONG_TAIL = StepTimes(40.0, 10.0, tail_s=30.0)


def test_more_engines_do_not_shorten_a_tail():
    # drained, R engines: 30 + 10/R beside 70/(8-R): R=4: 32.5 s, R=5: 32; colocated: 30 + 10/8 + 70/8
    advice = split_advice(LONG_TAIL, training=7, reserved=1, overlapped=True)
    assert "7+1 takes 40.0 s of generation beside training per step; 3+5 would take about 32.0 s" in advice
    assert "colocation on all 8 would take about 40.0 s" in advice
    # without the tail, 4+4 takes the longer of 40/4 and 70/4
    assert "5+3 would take about 14.0 s" in split_advice(StepTimes(40.0, 10.0), 7, 1, overlapped=True)


def test_the_advice_says_what_completions_in_flight_would_give():
    # a row of the tail needs at most a tenth of an engine: 10 + 3 s on one engine, beside 10 s of training
    advice = split_advice(LONG_TAIL, training=7, reserved=1)
    assert "In 30.0 of 40.0 s of generation fewer than 10 % of the rows run" in advice
    assert 'weight_update="in_flight"' in advice
    assert "7+1 would take about 13.0 s, 6+2 about 11.7 s." in advice


def test_a_split_that_is_the_best_in_flight_too_is_named_once():
    assert "1+1 would take about 1.0 s." in split_advice(StepTimes(1.0, 1.0, tail_s=0.5), 1, 1)


def test_a_run_in_flight_gets_the_advice_for_runs_in_flight():
    advice = split_advice(LONG_TAIL, training=7, reserved=1, overlapped=True, in_flight=True)
    assert "7+1 takes 13.0 s of generation beside training per step; 6+2 would take about 11.7 s" in advice
    assert "fewer than" not in advice


def test_a_short_tail_is_not_mentioned():
    assert "in_flight" not in split_advice(StepTimes(10.0, 90.0, tail_s=5.0), 7, 1)
