"""One round ahead, as the seam keeps order: who waits for whom, what is taken, what is made afresh."""

import threading
from types import SimpleNamespace

import pytest
from stubs import A, B, C, StubEngines, build
from waiting import HANG_S

from trl_multinode.errors import PromptTooLongError, WeightVersionError
from trl_multinode.wire.messages import WeightVersion


class Ahead:
    """A generation object whose look-ahead has engines of its own; records in which order things happen."""

    def __init__(self, rollout_seed: int | None = 5):
        self.events: list[str] = []
        self.generation = build(rollout_seed=rollout_seed)
        self.host = self.generation._host
        self.host.ahead_engines = StubEngines()
        self.generation.accelerator.wait_for_everyone = lambda: self.events.append("barrier")

    def round(self, number: int, prompts, following=None, images=None, sync: bool = True):
        """As the trainer and TRL do it."""
        self.generation.begin_round("train", number, lambda: following)
        if sync:
            self.generation.weights_changed()
            self.generation.sync_weights()
        return self.generation.generate(prompts, images, 2)

    @property
    def fresh(self) -> list[list[int]]:
        """Prompts of each request made while the rank waited."""
        return [[r.prompt for r in call.requests] for call in self.host.engines.calls]

    @property
    def made_ahead(self) -> list[list[int]]:
        self.generation.look_ahead.wait()
        return [[r.prompt for r in call.requests] for call in self.host.ahead_engines.calls]


def test_the_next_rounds_prompts_are_generated_ahead_and_returned_when_they_are_due():
    ahead = Ahead()
    ahead.round(0, [A, A], following=[B, B])
    assert ahead.generation.lag == (0, 0)
    assert ahead.made_ahead == [[B]]
    _, completions, _, _ = ahead.round(1, [B, B])
    assert ahead.fresh == [[A]] and ahead.made_ahead == [[B]]
    assert ahead.generation.lag == (1, 0) and len(completions) == 2
    assert ahead.host.ahead_engines.calls[0].min_update == 1 and ahead.generation.version.update == 2


def test_a_sync_waits_for_the_look_ahead_before_its_barrier_and_only_then_changes_weights():
    ahead, go = Ahead(), threading.Event()
    generate, sync = ahead.host.ahead_engines.generate, ahead.host.sync

    def slow(*args):
        assert go.wait(HANG_S)
        ahead.events.append("generated ahead")
        return generate(*args)

    ahead.host.ahead_engines.generate = slow
    ahead.host.sync = lambda version: (ahead.events.append("sync"), sync(version))[1]
    ahead.round(0, [A], following=[B])
    wait = ahead.generation.look_ahead.wait

    def wait_for_slow() -> None:
        """Let the look-ahead end only when the sync waits for it."""
        go.set()
        wait()

    ahead.generation.look_ahead.wait = wait_for_slow
    ahead.round(1, [B])
    assert ahead.events == ["barrier", "sync", "generated ahead", "barrier", "sync"]


def test_a_sync_at_an_unchanged_step_neither_waits_for_the_look_ahead_nor_for_other_ranks():
    ahead, go = Ahead(), threading.Event()
    generate = ahead.host.ahead_engines.generate
    ahead.host.ahead_engines.generate = lambda *args: (go.wait(HANG_S), generate(*args))[1]
    ahead.round(0, [A], following=[B])
    ahead.generation.sync_weights()  # returns although the look-ahead is under way
    assert ahead.generation.look_ahead.made is None and not go.is_set()
    assert ahead.events == ["barrier"] and len(ahead.host.synced) == 1
    go.set()
    ahead.round(1, [B], following=[C], sync=False)
    assert ahead.generation.lag == (0, 0) and ahead.fresh == [[A]]
    ahead.host.step = lambda: 18  # an optimizer step: nobody has to say so
    ahead.generation.sync_weights()
    assert ahead.events == ["barrier"] * 2 and ahead.generation.look_ahead.made is not None
    ahead.round(2, [C], sync=False)
    assert ahead.generation.lag == (1, 1) and ahead.fresh == [[A]]


def test_evaluation_in_between_neither_takes_nor_drops_the_look_ahead():
    ahead = Ahead()
    ahead.round(0, [A], following=[B])
    ahead.generation.begin_round("eval", 0)
    ahead.generation.weights_changed()
    ahead.generation.sync_weights()
    ahead.generation.generate([B], None, 1)  # the very prompts that were foreseen
    assert ahead.fresh == [[A], [B]] and ahead.made_ahead == [[B]]
    ahead.round(1, [B], sync=False)
    assert ahead.fresh == [[A], [B]] and ahead.generation.lag == (1, 0)


def test_rows_of_another_version_in_the_look_ahead_are_an_error_where_the_rank_waits():
    ahead = Ahead()
    ahead.host.ahead_engines.version = WeightVersion(7, 3)
    ahead.round(0, [A], following=[B])
    ahead.generation.weights_changed()
    with pytest.raises(WeightVersionError, match="update 7 .*update 1"):
        ahead.generation.sync_weights()
    assert ahead.events == ["barrier"]  # the second sync did not begin


PICTURE = SimpleNamespace(mode="L", size=(1, 1), tobytes=lambda: b"x")


@pytest.mark.parametrize(("prompt", "images"), [(B, [[PICTURE]]), (C, None)], ids=["an image", "other prompts"])
def test_what_was_not_foreseen_is_generated_afresh(prompt, images, caplog):
    ahead = Ahead()
    ahead.round(0, [A], following=[B])
    ahead.round(1, [prompt], images=images)
    assert ahead.fresh == [[A], [prompt]] and ahead.generation.lag == (0, 0)
    call = ahead.host.engines.calls[-1]
    assert call.min_update == 2 and bool(call.requests[0].images) == bool(images)
    assert images or "round 1" in caplog.text


def test_a_prompt_that_fills_the_context_is_left_to_its_own_round():
    ahead = Ahead()
    ahead.round(0, [A], following=[[1] * 8])
    assert ahead.made_ahead == []
    with pytest.raises(PromptTooLongError, match="Row 0"):
        ahead.round(1, [[1] * 8])


def test_a_tool_loops_first_turn_is_ahead_and_its_later_turns_are_fresh_beside_the_next_look_ahead():
    ahead, go = Ahead(), threading.Event()
    ahead.round(0, [A, B], following=[B, C])
    ahead.generation.look_ahead.wait()
    generate = ahead.host.ahead_engines.generate
    ahead.host.ahead_engines.generate = lambda *args: (go.wait(HANG_S), generate(*args))[1]
    ahead.round(1, [B, C], following=[A, A])
    for turn in ([[*B, 9]], [[*B, 9, 9]]):
        _, completions, _, _ = ahead.generation.generate(turn, None, 1)  # returns although the next round is under way
        assert len(completions) == 1
        assert ahead.host.engines.calls[-1].min_update == ahead.generation.version.update == 2
    assert ahead.fresh == [[A, B], [[*B, 9]], [[*B, 9, 9]]] and not go.is_set()
    assert ahead.generation.look_ahead.made is None  # still at work
    assert ahead.generation.lag == (1, 0)  # the first turn's
    go.set()
    ahead.round(2, [A, A])
    assert ahead.made_ahead == [[B, C], [A]] and ahead.host.ahead_engines.calls[-1].min_update == 2


def test_only_completions_of_older_weights_are_handed_to_the_alarm():
    """Two rounds in one optimizer step: the second was made ahead, and by the newest weights all the same."""
    ahead, stale = Ahead(), []
    ahead.generation.on_stale = stale.append
    ahead.round(0, [A], following=[B])
    ahead.round(1, [B], following=[C], sync=False)
    assert ahead.generation.lag == (0, 0) and stale == []
    ahead.round(2, [C])
    assert ahead.generation.lag == (1, 0) and [made.number for made in stale] == [2]
