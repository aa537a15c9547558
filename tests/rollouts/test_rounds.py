"""Rounds in flight as the seam keeps order: what begins when, what is taken, how old, what a checkpoint keeps."""

import ast
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from stubs import StubEngines, StubHost, lag
from waiting import until

from trl_multinode.engine.client import Rollout
from trl_multinode.engine.stream import Peeking
from trl_multinode.errors import PromptTooLongError, RolloutError, WeightVersionError
from trl_multinode.node_settings import NodeSettings
from trl_multinode.rollouts.generation import NodeGeneration
from trl_multinode.rollouts.rounds import FROM_THE_START, settings_from_the_start
from trl_multinode.rollouts.saved_groups import SavedGroups, decoded, encoded
from trl_multinode.rollouts.staleness import StalenessMeter, summarize_rounds
from trl_multinode.rollouts.token_ages import UpdateLog
from trl_multinode.wire.messages import VersionSpan, WeightVersion

pytestmark = pytest.mark.usefixtures("no_collecting_afterwards")
SIZE, QUOTA, OPEN = 2, 2, 2  # rows of a group, groups of a round, open rounds


class Engines(StubEngines):
    """Rows end when the test says so. Row i of a group has i + 1 tokens for each update that was current for it."""

    def __init__(self):
        super().__init__()
        self.running, self.ended, self.changed = [], [], threading.Condition()
        self.rows_left, self.held, self.stopped = 0, set(), False
        self.num_added = 0

    def open_stream(self, max_tokens, sampling):
        return self

    @property
    def rows_under_way(self) -> int:
        return self.rows_left

    def add(self, requests):
        with self.changed:
            self.rows_left += len(requests)
            self.num_added += len(requests)
            self.running += [(request, [(request.min_update, self.step)]) for request in requests]

    def swap(self, version: WeightVersion):
        self.step = version.step
        with self.changed:
            for _, updates in self.running:
                updates.append((version.update, version.step))

    step = 17

    def end(self, *groups):
        """End all rows of `groups`; without any, all that run and are not held."""
        with self.changed:
            chosen = [
                one
                for one in self.running
                if one[0].group in groups or (not groups and one[0].group not in self.held)
            ]
            for request, updates in chosen:
                self.running.remove((request, updates))
                count = request.row + 1
                versions = tuple(
                    VersionSpan(u, s, count * (i + 1)) for i, (u, s) in enumerate(updates)
                )
                tokens = np.full(
                    versions[-1].end, 10 * request.group[0] + request.group[1], np.int32
                )
                first = WeightVersion(*updates[0])
                self.ended.append(
                    (
                        request,
                        [Rollout(tokens, -np.ones(len(tokens), np.float32), first, 0, versions)],
                    )
                )
            self.changed.notify_all()

    def end_row(self, group, row: int):
        with self.changed:
            others = [one for one in self.running if (one[0].group, one[0].row) != (group, row)]
            self.running = [one for one in self.running if one not in others]
        self.end(group)
        with self.changed:
            self.running += others

    def peek(self):
        """Rows under way have one token each."""
        peeking = Peeking()
        with self.changed:
            for request, updates in self.running:
                first = WeightVersion(*updates[0])
                tokens = np.full(1, 10 * request.group[0] + request.group[1], np.int32)
                peeking.rows.append((request, Rollout(tokens, -np.ones(1, np.float32), first, 0)))
        peeking.complete.set()
        return peeking

    def poll(self):
        with self.changed:
            self.changed.wait_for(lambda: self.ended, 0.01)
            found, self.ended = self.ended, []
            self.rows_left -= len(found)
            return found


@contextmanager
def ending(run: "Run", end: Callable[[], None]) -> Iterator[None]:
    """End rows while `run` waits for groups: all have begun by then, and reach the engine at any time."""
    groups, done = run.rounds.groups, threading.Event()
    take = groups.take

    def loop() -> None:
        while not done.wait(0.02):
            end()

    def take_while_rows_end(*what):
        thread = threading.Thread(target=loop)
        thread.start()
        try:
            return take(*what)
        finally:
            done.set()
            thread.join()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "take", take_while_rows_end)
        yield


class Run:
    """A rank's rounds as the trainer and TRL run them: `rounds` batches of 2 groups of 2 rows."""

    def __init__(self, rounds: int, **settings):
        fields = {"max_staleness": OPEN, "rollout_seed": 3} | settings
        self.host = StubHost(NodeSettings(**fields))
        self.host.updates.ahead_engines = self.engines = Engines()
        sync = self.host.updates.sync
        self.host.updates.sync = lambda version: (self.engines.swap(version), sync(version))[1]
        self.host.step = lambda: self.step
        self.events, self.step, self.num_rounds = [], 0, rounds
        accelerator = SimpleNamespace(
            process_index=1, wait_for_everyone=lambda: self.events.append("barrier")
        )
        self.generation = NodeGeneration(
            host=self.host, model=None, accelerator=accelerator, processing_class=None
        )
        self.rounds = self.generation.rounds

    def batch(self, number: int):
        rows = [[number, place] for place in range(QUOTA) for _ in range(SIZE)]
        return [{"prompt": f"{number}/{place}"} for number, place in rows], [
            [5, number, place] for number, place in rows
        ]

    def ahead(self, number: int, rounds: int):
        return self.batch(number + rounds) if number + rounds < self.num_rounds else None

    def train(self, number: int, end=None) -> list[str]:
        """One round; returns the prompts that it trains. With `end` rows are ended while it waits for them."""
        self.generation.begin_round("train", number)
        with ending(self, end) if end is not None else nullcontext():
            rows = self.generation.take_groups(
                QUOTA * SIZE, SIZE, lambda rounds: self.ahead(number, rounds)
            )
        self.generation.sync_weights()
        prompts = [[5, *map(int, row["prompt"].split("/"))] for row in rows]
        _, self.completions, _, _ = self.generation.generate(prompts, None, SIZE)
        self.step += 1
        return [row["prompt"] for row in rows[::SIZE]]

    def first(self) -> list[str]:
        """The first round, which waits for engines."""
        return self.train(0, self.engines.end)

    def begun(self) -> list[tuple[int, int]]:
        return sorted({request.group for request, _ in self.engines.running})

    def wait_for_rows(self, left: int):
        """Wait until only so many rows of the open groups have no completion."""
        groups = self.rounds.groups
        until(lambda: sum(len(one.missing()) for one in groups.snapshot()) <= left)


def test_a_group_that_is_older_than_the_limit_ends_the_run():
    run = Run(6)
    taken = [SimpleNamespace(due=3), SimpleNamespace(due=1)]
    run.rounds.groups.take = lambda count, number: taken
    run.rounds.begin_round(2, QUOTA, SIZE, lambda rounds: None)
    with pytest.raises(WeightVersionError, match=r"round 2 .*round 1"):
        run.rounds.take()


def test_the_first_round_syncs_begins_the_open_rounds_too_and_every_later_round_begins_one_more():
    run = Run(rounds=6)
    run.engines.held = {(number, place) for number in (1, 2) for place in range(QUOTA)}
    assert run.first() == ["0/0", "0/1"]
    # TRL's own sync found the engines up to date
    assert run.events == ["barrier"] and len(run.host.synced) == 1
    assert run.begun() == [(1, 0), (1, 1), (2, 0), (2, 1)]
    run.engines.end((1, 1), (2, 0))
    assert run.train(1) == ["1/1", "2/0"]  # complete first, in the order of the dataset
    assert run.begun() == [(1, 0), (2, 1), (3, 0), (3, 1)] and len(run.host.synced) == 2
    assert len(run.rounds.groups.ids) == OPEN * QUOTA


def test_a_sync_does_not_wait_for_rows_under_way_and_they_carry_both_versions():
    run = Run(rounds=3)
    run.engines.held = {(2, 0)}
    run.first()
    run.train(1)
    run.engines.end((2, 0), (2, 1))
    assert run.train(2) == ["2/0", "2/1"]
    mixed, whole = run.generation.rows[:SIZE], run.generation.rows[SIZE:]
    assert [[span.update for span in row.versions] for row in mixed] == [[1, 2]] * SIZE
    assert [[span.update for span in row.versions] for row in whole] == [[1]] * SIZE
    # round 2 has update 3: tokens of update 2 are one round and one step old, those of update 1 two
    assert lag(run.generation) == (
        pytest.approx(7 / 4.5 * 1.0, rel=0.2),
        pytest.approx(7 / 4.5, rel=0.2),
    )
    ages = run.rounds.ages(run.generation.version)
    assert (ages.rounds_max, ages.steps_max) == (2, 2)


def test_a_row_that_was_begun_before_a_swap_is_stale_although_all_its_tokens_are_new():
    """An evaluation has sent this round's weights. The prompt may have keys and values of older weights, so the check
    scores the row again."""
    run, asked = Run(rounds=3), []
    run.generation.on_stale = asked.append
    run.engines.held = {(1, 0), (1, 1), (2, 0), (2, 1)}
    run.first()
    run.generation.begin_round("eval", 0)
    run.generation.sync_weights()
    # nothing made before
    run.engines.running = [(request, updates[1:]) for request, updates in run.engines.running]
    run.engines.end((1, 0), (1, 1))
    run.train(1)
    assert run.generation.stale and len(asked) == 1 and lag(run.generation) == (0.0, 0.0)
    assert [span.update for row in run.generation.rows for span in row.versions] == [2] * 4


def test_an_epoch_ends_with_its_last_groups_and_nothing_beyond_it_begins():
    run, trained = Run(rounds=5), []
    trained += run.first()
    for number in range(1, 5):
        trained += run.train(number, run.engines.end)
    assert sorted(trained) == [f"{number}/{place}" for number in range(5) for place in range(QUOTA)]
    assert run.begun() == [] and run.engines.rows_left == 0 and run.rounds.groups.ids == []
    assert run.engines.num_added == 5 * QUOTA * SIZE
    run.num_rounds = 7  # the next epoch
    assert run.train(5, run.engines.end) == ["5/0", "5/1"] and lag(run.generation) == (0.0, 0.0)


def test_a_group_older_than_max_age_is_waited_for():
    run = Run(rounds=8, max_age=OPEN)
    run.engines.held = {(1, 0)}
    run.first()
    run.wait_for_rows(SIZE)
    # The held group ends only while the round waits; without the wait, the complete groups 1/1 and 2/0 would be taken
    assert run.train(1, lambda: run.engines.end((1, 0))) == ["1/0", "1/1"]


def test_evaluation_takes_none_of_the_open_rows_and_its_sync_counts_for_the_next_round():
    run = Run(rounds=4)
    run.first()
    run.engines.end()
    run.wait_for_rows(0)  # then all tokens are of the first update
    open_before = run.rounds.groups.ids
    run.generation.begin_round("eval", 0)
    run.generation.sync_weights()
    run.generation.generate([[5, 1, 0]], None, 1)
    assert run.rounds.groups.ids == open_before and len(run.host.updates.engines.calls) == 1
    run.engines.end()
    run.train(1)
    assert run.generation.version.update == 2 and lag(run.generation) == (1.0, 1.0)


def test_later_turns_of_tools_are_fresh_and_leave_the_open_groups_alone():
    run = Run(rounds=4)
    run.first()
    open_before = run.rounds.groups.ids
    _, completions, _, _ = run.generation.generate([[5, 0, 0, 9]], None, 1)
    assert len(completions) == 1 and run.rounds.groups.ids == open_before
    assert run.host.updates.engines.calls[-1].min_update == run.generation.version.update
    # still the first turn's
    assert [row.tokens[0] for group in run.rounds.taken for row in group.rows] == [
        0,
        0,
        1,
        1,
    ]


def test_prompts_that_change_are_generated_afresh_and_the_ids_are_trained_all_the_same(caplog):
    run = Run(rounds=3)
    run.generation.begin_round("train", 0)
    with ending(run, run.engines.end):
        run.generation.take_groups(4, SIZE, lambda rounds: run.ahead(0, rounds))
    _, completions, _, _ = run.generation.generate([[9, 9]] * 4, None, SIZE)
    assert (
        len(completions) == 4
        and len(run.host.updates.engines.calls) == 1
        and "round 0 " in caplog.text
    )
    assert lag(run.generation) == (0.0, 0.0) and not run.generation.stale
    assert run.rounds.groups.ids == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_round_whose_groups_were_never_begun_ends_the_run_instead_of_waiting():
    run = Run(rounds=3)
    run.ahead = lambda number, rounds: None
    with pytest.raises(RolloutError, match=r"Round 0 \D*2\D* 0 .*`max_staleness=0`"):
        run.train(0)


def test_a_rank_accepts_tokens_of_an_update_before_the_barrier_after_which_others_may_send_it():
    run, accepted = Run(rounds=3), []
    run.generation.accelerator.wait_for_everyone = lambda: accepted.append(run.host.expected)
    run.first()
    run.engines.end()
    run.train(1)
    assert accepted == [WeightVersion(1, 0), WeightVersion(2, 1)]


def test_a_prompt_that_fills_the_context_is_named_when_it_would_begin():
    run = Run(rounds=1)
    run.batch = lambda number: ([{"prompt": "x"}] * 2, [[1] * 8] * 2)
    run.generation.begin_round("train", 0)
    with pytest.raises(PromptTooLongError, match="Row 0 of rank 1"):
        run.generation.take_groups(2, SIZE, lambda rounds: run.ahead(0, rounds))


def test_a_row_of_weights_before_its_request_ends_the_run():
    log = UpdateLog("Rank 1")
    row = Rollout(np.zeros(2, np.int32), np.zeros(2, np.float32), WeightVersion(3, 9), 0)
    log.check(row, 3)
    with pytest.raises(WeightVersionError, match=r"Rank 1: .*update 3 \(step 9\).*update 4"):
        log.check(row, 4)


def test_a_checkpoint_keeps_ended_rows_and_begins_the_others_again_and_every_id_is_trained_once():
    run = Run(rounds=6)
    run.engines.held = {(2, 0)}
    trained = [*run.first(), *run.train(1)]
    run.engines.end((3, 1))
    run.engines.end_row((2, 0), 1)
    run.wait_for_rows(SIZE + 1)  # 3/0, and a row of 2/0
    indices = {
        (number, place): 10 * number + place for number in range(6) for place in range(QUOTA)
    }
    saved = SavedGroups.of(run.rounds, lambda group: indices[group.id])
    assert saved.indices == [20, 21, 30, 31] and saved.last_begun == 3
    data = encoded(saved)

    again = Run(rounds=6)
    rows = {index: {"prompt": f"{number}/{place}"} for (number, place), index in indices.items()}
    decoded(data).restore_to(again.rounds, lambda index, prompt: rows[index])
    assert again.rounds.must_sync and again.engines.running == []
    again.step = run.step
    assert [row and len(row.tokens) for row in again.rounds.groups.snapshot()[0].begun_rows] == [
        1,
        None,
    ]
    trained += again.train(2)
    assert trained[-2:] == ["2/1", "3/1"]  # the two that were complete
    assert {(request.group, request.row) for request, _ in again.engines.running} == {
        ((2, 0), 0), *(((number, place), row) for number, place in [(3, 0), (4, 0), (4, 1)] for row in range(SIZE))
    }  # fmt: skip
    for number in range(3, 6):
        again.engines.end()
        trained += again.train(number)
    assert sorted(trained) == [f"{number}/{place}" for number in range(6) for place in range(QUOTA)]


def test_a_resume_with_a_shorter_age_trains_every_group_once_and_none_too_late():
    first = Run(9)  # `max_age` 6
    first.engines.held = {(1, 0), (2, 0)}
    trained = [
        *first.first(),
        *first.train(1, first.engines.end),
        *first.train(2, first.engines.end),
    ]
    first.engines.end()
    first.wait_for_rows(2 * SIZE)
    data = encoded(SavedGroups.of(first.rounds, lambda group: 10 * group.number + group.place))
    second = Run(9, max_age=OPEN)
    decoded(data).restore_to(
        second.rounds, lambda index, prompt: {"prompt": f"{index // 10}/{index % 10}"}
    )
    second.step = first.step
    groups, set_due, dues = second.rounds.groups, second.rounds.groups.set_due, {}

    def set_due_noted(rule) -> None:
        set_due(rule)
        dues.update({group.id: group.due for group in groups.snapshot()})

    groups.set_due = set_due_noted
    for number in range(3, 9):

        def end(number=number):
            """Slow rows of the checkpoint end when they are due, and at the latest in round 4, beside newer ones."""
            open_groups = second.rounds.groups.snapshot()
            slow = {g.id for g in open_groups if g.due > number and number < 4} & first.engines.held
            second.engines.end(*(g.id for g in open_groups if g.id not in slow))

        trained += second.train(number, end)
    assert sorted(trained) == [f"{number}/{place}" for number in range(9) for place in range(QUOTA)]
    # rounds 1 and 2 are over, and a round trains two groups
    assert dues == {(1, 0): 3, (2, 0): 3, (4, 0): 4, (4, 1): 4}


def test_an_evaluation_before_the_first_round_of_a_resumed_run_counts_for_that_round():
    run = Run(rounds=9)
    run.generation.begin_round("eval", 0)
    run.generation.sync_weights()
    run.train(5, run.engines.end)  # with the evaluation's weights, as no step was made
    run.engines.end()
    run.train(6)
    assert run.generation.version.update == 2 and lag(run.generation) == (1.0, 1.0)


def test_the_log_has_ages_mixed_rows_and_lengths():
    args = SimpleNamespace(vllm_importance_sampling_mode="token_truncate")
    run, meter = Run(rounds=3), StalenessMeter(args)
    run.engines.held = {(1, 0)}
    run.first()
    meter.take((0.0, 0.0), np.zeros((0, 4)))
    run.train(1)
    run.engines.end()
    run.engines.end((1, 0))
    run.train(2)
    meter.add_round(run.generation.ages)
    meter.add_taken(run.rounds)
    found = summarize_rounds([meter.take((0.0, 0.0), np.zeros((0, 4)))], [0.0])
    assert found["in_flight/mixed_rows"] == 0.5 and found["in_flight/swapped_rows"] > 0
    assert found["staleness/rounds_max"] == 2 and 1 < found["staleness/rounds_mean"] < 2
    assert found["in_flight/trained_length"] > found["in_flight/ended_length"] > 0


def test_settings_that_depend_on_the_start_of_a_completion_keep_rows_from_being_continued():
    neutral = {
        "temperature": 0.7,
        "top_p": 0.9,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "min_tokens": 0,
    }
    assert settings_from_the_start(neutral) == []
    strict = {
        "structured_outputs": {"regex": "a+"},
        "stop": ["x"],
        "min_tokens": 2,
        "repetition_penalty": 1.1,
    }
    strict["repetition_detection"] = {"max_pattern_size": 3, "min_count": 4}
    assert sorted(settings_from_the_start(neutral | strict)) == sorted(strict)


def test_every_sampling_setting_of_vllm_is_known_to_depend_on_the_start_or_not():
    """A new one may look at the completion so far, which is part of the prompt when a row is continued."""
    source = Path(find_spec("vllm").origin).with_name("sampling_params.py").read_text()
    (params,) = [
        node for node in ast.parse(source).body if getattr(node, "name", "") == "SamplingParams"
    ]
    fields = {line.target.id for line in params.body if isinstance(line, ast.AnnAssign)}
    the_same_later = {
        "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos", "max_tokens",
        "logprobs", "logit_bias", "allowed_token_ids", "detokenize", "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output", "output_kind", "stream_interval", "skip_clone", "skip_reading_prefix_cache",
        "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "flat_logprobs",
        "output_text_buffer_length", "routed_experts_prompt_start", "watermarking",
    }  # fmt: skip
    public = {name for name in fields if not name.startswith("_")}
    assert public - set(FROM_THE_START) - the_same_later == set()
    assert not the_same_later & set(FROM_THE_START)
