"""Agents beside training, rarer cases: early ends, errors that are answers, environments, evaluation."""

import datetime
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import agent_kinds
import pytest
import torch
from agent_kinds import (
    AHEAD,
    KINDS,
    SPEAKER,
    Kind,
    threads_of_groups,
    tool,
    trained,
    wait_for_the_end_of_groups,
)
from agents import GROUP, Seen, Speaker, call_of, chats, engines_here, ours
from forks import forked
from test_agents import RAISES, breaks, breaks_later, caller_of, groups_of
from transformers.utils import chat_template_utils
from waiting import HANG_S, until

from trl_multinode.errors import RolloutError
from trl_multinode.rollouts.stand_in import own_attributes

# test_agents has an error of each kind, every schedule, and a resume
pytestmark = pytest.mark.nightly


class Stop(Exception):
    """Ends `train()` early."""


class Waiting(agent_kinds.Counter):
    """An environment whose tool waits, except for the rows of the first round."""

    hold, held = threading.Event(), threading.Event()

    @tool
    def wait(self, number: int) -> str:
        if self.total > 1:
            self.held.set()
            self.hold.wait()
        return "at last"


WAITS = Speaker({"wait": [call_of("wait", number=1)]}, share=0.5)


class Releases(Seen):
    """A reward function whose second call releases the tools: all groups of the next round have begun by then."""

    def __call__(self, *args, **kwargs):
        if self.rounds:
            Waiting.hold.set()
        return super().__call__(*args, **kwargs)


def stopped(folder: Path):
    """A trainer that has stopped in its first step, while tools of the next round wait."""
    Waiting.hold.clear()
    Waiting.held.clear()
    seen = Releases()
    trainer = ours(
        folder, seen, chats(12, start=list(range(12))), {"environment_factory": Waiting}, max_staleness=1,
        shuffle_dataset=False,
    )  # fmt: skip

    def stop(*args, **kwargs):
        step(*args, **kwargs)
        assert Waiting.held.wait(HANG_S)
        raise Stop

    step, trainer.training_step = trainer.training_step, stop
    with pytest.raises(Stop):
        trainer.train()
    del trainer.training_step
    return trainer, seen


def test_a_run_that_stops_early_drops_its_tools_and_trains_again(tmp_path):
    """A group that is in a tool then ends at its next turn, and the next `train()` makes its rows again."""
    with engines_here(WAITS):
        trainer, seen = stopped(tmp_path)
        assert threads_of_groups()
        trainer.train()  # its groups have the same numbers as those that wait
        trainer.close()
    prompts = [one["prompts"][0][0]["content"] for one in seen.rounds]
    assert len(prompts) == 4 and prompts[0] == prompts[1] and len(set(prompts)) == 3
    assert seen.rounds[0]["prompts"] == seen.rounds[1]["prompts"]
    wait_for_the_end_of_groups()


def test_a_trainer_that_is_closed_after_an_error_ends_the_rollouts_that_were_open(tmp_path):
    with engines_here(WAITS):
        trainer, _ = stopped(tmp_path)
        trainer.close()
        assert trainer.vllm_generation.rounds.groups.ids == [] and threads_of_groups()
        Waiting.hold.set()
        wait_for_the_end_of_groups()


@pytest.mark.parametrize("closes", [True, False])
def test_a_process_ends_although_a_tool_does_not_return(closes, tmp_path):
    def body(rank: int) -> list[str]:
        with engines_here(WAITS):
            trainer, _ = stopped(tmp_path)
            if closes:
                trainer.close()
            return threads_of_groups()

    with forked(body, 1, tmp_path) as (one,):  # its result is there when it has ended
        assert any("rollouts" in name for name in one.result)


def breaks_by_gathering(prompts, trainer):
    trainer.accelerator.gather(torch.zeros(1))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("tool", [breaks, breaks_later])
def test_wrong_arguments_are_no_error_of_the_tool(tool, ahead, tmp_path):
    speaker = Speaker({tool.__name__: [call_of(tool.__name__, wrong=1)]})
    settings = RAISES | {"max_staleness": ahead, "max_steps": 2}
    _, seen = trained(tmp_path, Kind({"tools": [tool]}), speaker=speaker, **settings)
    messages = [message for one in seen.rounds for row in one["completions"] for message in row]
    (answer,) = {message["content"] for message in messages if message["role"] == "tool"}
    assert "'wrong'" in answer


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_error_of_an_earlier_run_does_not_end_the_next_one(ahead, tmp_path):
    working = []

    @tool
    async def look(number: int) -> str:
        if not working:
            raise ValueError("the service is down")
        return "fine"

    with engines_here(caller_of(look, 1)):
        trainer = ours(
            tmp_path, Seen(), chats(12), {"tools": [look]}, max_staleness=ahead, **RAISES
        )
        with pytest.raises(RolloutError, match="the service is down"):
            trainer.train()
        working.append(True)
        trainer.train()
        trainer.close()


@pytest.mark.parametrize("ahead", [0, 1])
def test_ctrl_c_is_nobodys_error(ahead, tmp_path):
    """In the main thread it is the user's."""
    with pytest.raises(RolloutError if ahead else KeyboardInterrupt, match="broken"):
        trained(
            tmp_path, Kind({"tools": [breaks]}), speaker=caller_of(breaks, 3), max_staleness=ahead
        )


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_reset_in_a_tool_is_no_row_of_trls(ahead, tmp_path):
    class ResetsItself(agent_kinds.Counter):
        @tool
        async def raise_by(self, step: int) -> str:
            self.reset(start=step)
            return "again"

    kind = Kind({"environment_factory": ResetsItself}, {"start": list(range(12))})
    _, seen = trained(tmp_path, kind, max_staleness=ahead, max_steps=2)
    assert "again" in str(seen.rounds)


def generates_in_two_threads(prompts, trainer):
    ids = trainer.processing_class.apply_chat_template(prompts, tokenize=True, return_dict=True)[
        "input_ids"
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda row: trainer.vllm_generation.generate([row]), ids))


@pytest.mark.parametrize(
    ("loop", "named"),
    [(breaks_by_gathering, "accelerator.gather"), (generates_in_two_threads, "generate")],
)
def test_a_collective_or_two_calls_of_generate_at_once_are_refused_in_a_rollout_that_runs_ahead(
    loop, named, tmp_path
):
    with pytest.raises(RolloutError, match=f"`{named}`"):
        trained(tmp_path, Kind({"rollout_func": loop}), max_staleness=1)


# ---- beside training -----------------------------------------------------------------------------------------------


def test_a_template_with_the_date_does_not_end_a_run_at_midnight(tmp_path, monkeypatch):
    day = ["01"]

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime(2026, 1, int(day[0]))

    class AtMidnight(Seen):
        def __call__(self, *args, **kwargs):
            groups, stream = (
                trainer.vllm_generation.rounds.groups,
                trainer.host.updates.ahead_engines.stream,
            )
            until(
                lambda: {request.group for request, _ in list(stream.turns)} >= set(groups.ids),
                "turns of all groups",
            )
            day[0] = "02"
            return super().__call__(*args, **kwargs)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    seen = AtMidnight()
    with engines_here(SPEAKER):
        trainer = ours(tmp_path, seen, chats(12), KINDS["tools"].keywords, max_staleness=1)
        trainer.chat_template = "{{- strftime_now('%d') }}" + trainer.processing_class.chat_template
        trainer.train()
        trainer.close()
    assert len(seen.rounds) == 3


def test_attributes_are_copied_while_another_thread_replaces_methods():
    """As a replay does in the main thread when a group begins."""
    trainer, interval, stop = (
        type("Trainer", (), {"_generate": lambda self: None})(),
        sys.getswitchinterval(),
        [],
    )
    vars(trainer).update({f"a{i}": i for i in range(200)})

    def replace() -> None:
        number = 0
        while not stop:
            number += 1
            setattr(trainer, f"b{number % 50}", 1)
            delattr(trainer, f"b{number % 50}")

    thread = threading.Thread(target=replace)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(300):
            assert own_attributes(trainer)["a7"] == 7
    finally:
        stop.append(True)
        thread.join()
        sys.setswitchinterval(interval)


class Tracked(agent_kinds.Counter):
    """An environment that notes which row it was reset for."""

    built: list["Tracked"] = []
    __hash__ = object.__hash__

    def __init__(self) -> None:
        super().__init__()
        self.built.append(self)
        self.row = None

    def reset(self, start: int = 0, **row) -> str:
        self.row = start
        return super().reset(start=start, **row)


@pytest.mark.parametrize("mode", AHEAD)
def test_environments_keep_their_rows_until_their_rewards_are_read_and_are_used_again(
    mode, tmp_path
):
    Tracked.built, wrong, rounds, num_rounds = [], [], [], 6

    def reads_late(environments, start, completions, **_):
        following = 2 * GROUP * min(len(rounds) + 2, num_rounds)
        until(lambda: sum(one.resets for one in Tracked.built) >= following, "the following round")
        rounds.append([id(one) for one in environments])
        wrong.extend(row for row, one in zip(start, environments, strict=True) if one.row != row)
        return [float(one.total) for one in environments]

    kind = Kind({"environment_factory": Tracked}, {"start": list(range(2 * num_rounds))})
    settings = {"max_steps": -1, "num_train_epochs": 1}
    trainer, _ = trained(tmp_path, kind, reads_late, rows=2 * num_rounds, **settings, **AHEAD[mode])
    assert (
        wrong == []
        and len(rounds) == num_rounds
        and all(len(set(one)) == 2 * GROUP for one in rounds)
    )
    in_use = 1 + trainer.max_staleness  # rounds: the one that is scored, and those that are open
    assert len(Tracked.built) <= 1 + 2 * GROUP * in_use, "environments are not used again"
    assert len({one for ids in rounds for one in ids}) < num_rounds * 2 * GROUP
    assert [one.resets for one in Tracked.built].count(0) <= 1  # TRL's probe
    if mode == "drain":
        assert all(
            not set(one) & set(following)
            for one, following in zip(rounds, rounds[1:], strict=False)
        )


@pytest.mark.parametrize("mode", AHEAD)
def test_an_evaluation_beside_open_groups_changes_no_row_of_training(mode, tmp_path):
    kind = Kind({"environment_factory": agent_kinds.Counter}, {"start": list(range(12))})
    found, rows = [], []
    for number, evaluates in enumerate((False, True)):
        seen = Seen()
        with engines_here(SPEAKER, turn_s=0.02):
            keywords = kind.keywords | (
                {"eval_dataset": chats(2, start=[50, 60])} if evaluates else {}
            )
            trainer = ours(
                tmp_path / str(number), seen, chats(12, **kind.columns), keywords, learning_rate=0.0,
                num_generations_eval=GROUP, eval_strategy="steps" if evaluates else "no", eval_steps=1,
                per_device_eval_batch_size=GROUP, **AHEAD[mode],
            )  # fmt: skip
            trainer.train()
            trainer.close()
        rounds = [one for one in seen.rounds if starts_of(one) < 50]
        found.append(rounds if mode == "drain" else sorted(map(str, groups_of(rounds))))
        rows.append([one for one in seen.rounds if starts_of(one) >= 50])
    assert found[0] == found[1] and len(found[0])
    assert rows[0] == [] and len(rows[1]) == 2 * 3  # two batches of four rows, after every step
    assert rows[1][:2] == rows[1][2:4] == rows[1][4:]


def starts_of(one: dict) -> int:
    return int(one["prompts"][0][0]["content"].rsplit("Begin at ", 1)[1].rstrip("."))
