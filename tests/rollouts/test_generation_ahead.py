"""One round ahead, as the seam keeps order: who waits for whom, what is taken, what is made afresh."""

import threading
from types import SimpleNamespace

import pytest
from stubs import A, B, C, StubEngines, build, lag

from trl_multinode.engine.client import Rollout
from trl_multinode.engine.stream import Request
from trl_multinode.errors import PromptTooLongError, WeightVersionError
from trl_multinode.rollouts.groups import Group
from trl_multinode.wire.messages import WeightVersion


class AheadEngines(StubEngines):
    """Engines whose rows end when `go` is set, which it is at first. `calls` keeps what was requested of them."""

    def __init__(self):
        super().__init__()
        self.waiting: list[Request] = []
        self.go, self.changed = threading.Event(), threading.Condition()
        self.go.set()
        self.rows_left, self.stopped = 0, False

    def open_stream(self, max_tokens, sampling):
        return self

    @property
    def rows_under_way(self) -> int:
        return self.rows_left

    def add(self, requests) -> None:
        with self.changed:
            self.calls.append(SimpleNamespace(requests=requests, min_update=requests[0].min_update))
            self.waiting += requests
            self.rows_left += sum(request.num_completions for request in requests)

    def poll(self):
        if not self.go.wait(0.01):
            return []
        with self.changed:
            found, self.waiting = self.waiting, []
            self.rows_left -= sum(request.num_completions for request in found)
        return [(request, self.rows_of(request)) for request in found]

    def rows_of(self, request) -> list[Rollout]:
        version = self.version or WeightVersion(request.min_update, 17)
        return [self._row(request, index, version) for index in range(request.num_completions)]


class Ahead:
    """A generation object with one round ahead; records in which order things happen."""

    def __init__(self, rollout_seed: int | None = 5):
        self.events: list[str] = []
        self.engines = AheadEngines()
        self.generation = build(
            rollout_seed=rollout_seed, max_staleness=1, ahead_engines=self.engines
        )
        self.host = self.generation._host
        self.generation.accelerator.wait_for_everyone = lambda: self.events.append("barrier")

    def round(
        self,
        number: int,
        prompts,
        following=None,
        images=None,
        sync: bool = True,
        known: bool = True,
    ):
        """As the trainer and TRL do it. `known`: the trainer has the prompts of the batch before TRL scores it."""
        self.generation.begin_round("train", number)
        if sync:
            self.generation.weights_changed()
        batches = {0: prompts if known else None, 1: following}
        self.generation.take_groups(
            len(prompts), len(prompts), lambda ahead: batch_of(batches.get(ahead))
        )
        self.generation.sync_weights()
        return self.generation.generate(prompts, images, 2)

    @property
    def fresh(self) -> list[list[int]]:
        """Prompts of each request made while the rank waited."""
        return [[r.prompt for r in call.requests] for call in self.host.updates.engines.calls]

    @property
    def made_ahead(self) -> list[list[int]]:
        """Prompts of each request of a round; the first round of an epoch is made in the same way as the next one."""
        return [[r.prompt for r in call.requests] for call in self.engines.calls]


def batch_of(prompts):
    return None if prompts is None else ([{} for _ in prompts], prompts)


def test_the_next_rounds_prompts_are_generated_ahead_and_returned_when_they_are_due():
    ahead = Ahead()
    ahead.round(0, [A, A], following=[B, B])
    assert lag(ahead.generation) == (0, 0)
    assert (
        ahead.made_ahead == [[A], [B]] and ahead.engines.calls[1].requests[0].num_completions == 2
    )
    _, completions, _, _ = ahead.round(1, [B, B])
    assert ahead.fresh == [] and ahead.made_ahead == [[A], [B]]
    assert lag(ahead.generation) == (1, 0) and len(completions) == 2
    assert ahead.engines.calls[1].min_update == 1 and ahead.generation.version.update == 2


def test_a_sync_waits_for_the_open_round_before_its_barrier_and_only_then_changes_weights():
    ahead = Ahead()
    sync = ahead.host.updates.sync
    ahead.host.updates.sync = lambda version: (ahead.events.append("sync"), sync(version))[1]
    ahead.round(0, [A], following=[B])
    ahead.engines.go.clear()
    ahead.generation.begin_round("eval", 0)
    ahead.generation.weights_changed()
    wait = ahead.generation.wait_for_open

    def wait_for_slow() -> None:
        """Let the round end only when the sync waits for it."""
        ahead.engines.go.set()
        wait()
        ahead.events.append("generated ahead")

    ahead.generation.wait_for_open = wait_for_slow
    ahead.generation.sync_weights()
    assert ahead.events == ["barrier", "sync", "generated ahead", "barrier", "sync"]


PICTURE = SimpleNamespace(mode="L", size=(1, 1), tobytes=lambda: b"x")


@pytest.mark.parametrize(
    ("prompt", "images"), [(B, [[PICTURE]]), (C, None)], ids=["an image", "other prompts"]
)
def test_what_was_not_foreseen_is_generated_afresh(prompt, images, caplog):
    ahead = Ahead()
    ahead.round(0, [A], following=[B])
    ahead.round(1, [prompt], images=images)
    assert ahead.fresh == [[prompt]] and lag(ahead.generation) == (0, 0)
    call = ahead.host.updates.engines.calls[-1]
    assert call.min_update == 2 and bool(call.requests[0].images) == bool(images)
    assert images or "round 1" in caplog.text


def test_a_round_whose_prompts_are_not_known_before_it_is_scored_is_generated_afresh(caplog):
    ahead = Ahead()
    for number in range(2):
        ahead.round(number, [A], images=[[PICTURE]], known=False)
    assert ahead.fresh == [[A], [A]] and ahead.made_ahead == [] and caplog.text == ""


def test_a_prompt_that_fills_the_context_ends_the_run_when_its_round_would_begin():
    ahead = Ahead()
    with pytest.raises(PromptTooLongError, match="Row 0"):
        ahead.round(0, [A], following=[[1] * 8])


def test_evaluation_in_between_neither_takes_nor_drops_the_open_round():
    ahead = Ahead()
    ahead.round(0, [A], following=[B])
    ahead.generation.begin_round("eval", 0)
    ahead.generation.weights_changed()
    ahead.generation.sync_weights()
    ahead.generation.generate([B], None, 1)  # the very prompts that were foreseen
    assert ahead.fresh == [[B]] and ahead.made_ahead == [[A], [B]]
    ahead.round(1, [B], sync=False)
    assert ahead.fresh == [[B]] and lag(ahead.generation) == (1, 0)


def test_rows_of_weights_before_their_request_are_an_error_where_the_rank_waits():
    ahead = Ahead()
    ahead.round(0, [A])
    ahead.engines.version = WeightVersion(0, 3)
    ahead.generation.rounds.groups.submit([Group(5, 0, [{}], [B], due=5, min_update=1)])
    ahead.generation.weights_changed()
    with pytest.raises(WeightVersionError, match="update 0 .*update\n?.*1"):
        ahead.generation.sync_weights()
    assert ahead.events == ["barrier"]  # the second sync did not begin


def test_a_tool_loops_first_turn_is_ahead_and_its_later_turns_are_fresh_beside_the_open_round():
    ahead = Ahead()
    ahead.round(0, [A, B], following=[B, C])
    ahead.generation.wait_for_open()
    ahead.engines.go.clear()
    ahead.round(1, [B, C], following=[A, A])
    for turn in ([[*B, 9]], [[*B, 9, 9]]):
        # returns although the next round is under way
        _, completions, _, _ = ahead.generation.generate(turn, None, 1)
        assert len(completions) == 1
        assert (
            ahead.host.updates.engines.calls[-1].min_update == ahead.generation.version.update == 2
        )
    assert ahead.fresh == [[[*B, 9]], [[*B, 9, 9]]] and ahead.engines.rows_left == 2
    assert lag(ahead.generation) == (1, 0)  # the first turn's
    ahead.engines.go.set()
    ahead.round(2, [A, A])
    assert ahead.made_ahead == [[A, B], [B, C], [A]] and ahead.engines.calls[-1].min_update == 2


def test_only_completions_of_older_weights_are_handed_to_the_alarm():
    """Two rounds in one optimizer step: the second was made ahead, and by the newest weights all the same."""
    ahead, stale = Ahead(), []
    ahead.generation.on_stale = stale.append
    ahead.round(0, [A], following=[B])
    ahead.round(1, [B], following=[C], sync=False)
    assert lag(ahead.generation) == (0, 0) and stale == []
    ahead.round(2, [C])
    assert lag(ahead.generation) == (1, 0) and [made.prompts for made in stale] == [[C]]


def test_a_callback_may_change_the_limit_of_the_next_round():
    ahead = Ahead()
    ahead.round(0, [A], following=[B])
    ahead.generation.max_completion_length = 5
    ahead.round(1, [B], following=[C])
    assert [call.requests[0].max_tokens for call in ahead.engines.calls] == [16, 16, 5]
