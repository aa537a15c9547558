"""Agents beside training, in one process: seeds, environments, evaluation, resume, endings, and what ends a run."""

import asyncio
import datetime
import json
import re
import sys
import threading
import time
from collections import Counter as Count
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import agent_kinds
import pytest
import torch
from agent_kinds import KINDS, SPEAKER, Kind
from agents import GROUP, Seen, Speaker, call_of, chats, engines_here, keep_outputs, ours
from forks import forked
from safetensors import safe_open
from transformers.utils import chat_template_utils

from trl_multinode.errors import RolloutError
from trl_multinode.rollouts.stand_in import own_attributes
from trl_multinode.rollouts.tool_calls import ToolCalls
from trl_multinode.testing.waiting import wait_until

AHEAD = {"drain": {"max_staleness": 1}, "in flight": {"weight_update": "in_flight", "open_rounds": 2}}


def trained(folder: Path, kind: Kind, reward=None, rows: int = 12, speaker: Speaker = SPEAKER, **settings):
    """A trainer that has trained, and the reward function that it called."""
    reward = reward or Seen(*kind.seen)
    columns = {name: (values * rows)[:rows] for name, values in kind.columns.items()}
    with engines_here(speaker):
        trainer = ours(folder, reward, chats(rows, **columns), kind.keywords, **settings)
        outputs = keep_outputs(trainer)
        try:
            trainer.train()
        finally:
            trainer.close()
    trainer.outputs = outputs
    return trainer, reward


# ---- seeds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["environments", "rollout_func"])
def test_without_a_change_of_weights_a_run_ahead_is_the_synchronous_run(name, tmp_path):
    """Rows of all turns have the seeds of the synchronous run, whenever they are made."""
    kind, frozen = KINDS[name], {"learning_rate": 0.0}
    fresh, seen = trained(tmp_path / "fresh", kind, **frozen)
    ahead, seen_ahead = trained(tmp_path / "ahead", kind, max_staleness=1, **frozen)
    assert seen.rounds == seen_ahead.rounds and len({str(one) for one in seen.rounds}) == 3
    for mine, its in zip(ahead.gradients, fresh.gradients, strict=True):
        assert mine.equal(its) and mine.abs().max() > 0
    for mine, its in zip(ahead.outputs, fresh.outputs, strict=True):
        assert mine["tool_mask"].equal(its["tool_mask"])


class ObservesOnly:
    """An environment without a tool."""

    def reset(self, start: int = 0, **_) -> str:
        self.start = start
        return f" Begin at {start}."

    def get_reward(self) -> float:
        return float(self.start)


def row_by_row(prompts, trainer) -> dict:
    """A loop that asks for one row at a time, and returns what TRL would take for images of the dataset."""
    ids = trainer.processing_class.apply_chat_template(
        prompts, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    completions, logprobs = [], []
    for row in ids:
        _, (tokens,), (tops,), _ = trainer.vllm_generation.generate(prompts=[row], images=None, num_generations=1)
        completions.append(list(tokens))
        logprobs.append([top[0] for top in tops])
    images = [["screenshot"] for _ in ids]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs, "images": images}


LOOPS = {
    "no tools": Kind({"environment_factory": ObservesOnly}, {"start": list(range(12))}, ("start",)),
    "row by row": Kind({"rollout_func": row_by_row}, {"level": list(range(12))}, ("level", "images")),
}
IN_ORDER = {
    "drain": AHEAD["drain"],
    "in flight": AHEAD["in flight"] | {"max_age": 2},
    "scored": {"score_groups": True},
}


@pytest.mark.parametrize("mode", IN_ORDER)
@pytest.mark.parametrize("name", LOOPS)
def test_other_loops_are_the_synchronous_run_too(name, mode, tmp_path):
    kind, frozen = LOOPS[name], {"learning_rate": 0.0}
    _, seen = trained(tmp_path / "fresh", kind, **frozen)
    ahead, seen_ahead = trained(tmp_path / "ahead", kind, **frozen, **IN_ORDER[mode])
    if mode != "scored":
        assert seen.rounds == seen_ahead.rounds and len({str(one) for one in seen.rounds}) == 3
        assert ahead.state.log_history[1]["staleness/rounds_mean"] == 1
    else:
        assert groups_of(seen.rounds) == groups_of(sorted_rounds(seen_ahead.rounds, seen.rounds))


def sorted_rounds(groups: list[dict], rounds: list[dict]) -> list[dict]:
    """Groups that were scored one by one, in the order of the prompts of `rounds`."""
    found = {str(one["prompts"][0]): one for one in groups}
    return [found[str(one["prompts"][at])] for one in rounds for at in range(0, len(one["prompts"]), GROUP)]


def test_a_template_with_the_date_does_not_end_a_run_at_midnight(tmp_path, monkeypatch):
    day = ["01"]

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime(2026, 1, int(day[0]))

    class AtMidnight(Seen):
        def __call__(self, *args, **kwargs):
            time.sleep(0.5)  # the next round has its prompts meanwhile
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


SCHEDULES = {
    "blocks": {"steps_per_generation": 2, "per_device_train_batch_size": GROUP, "num_train_epochs": 2},
    "two rounds a step": {
        "steps_per_generation": 1, "gradient_accumulation_steps": 2, "per_device_train_batch_size": GROUP,
        "num_train_epochs": 2,
    },
    "iterations": {"num_iterations": 2, "num_train_epochs": 1},
    "a short last step": {
        "steps_per_generation": 1, "gradient_accumulation_steps": 4, "per_device_train_batch_size": GROUP,
        "num_train_epochs": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mode"),
    [("blocks", "drain"), ("iterations", "drain"), ("a short last step", "drain"), ("two rounds a step", "in flight")],
)
def test_every_row_of_every_epoch_is_trained_once(name, mode, tmp_path):
    schedule = {"max_steps": -1, "max_tool_calling_iterations": 1} | SCHEDULES[name]
    trainer, seen = trained(tmp_path, KINDS["tools"], Seen(), rows=6, **schedule, **AHEAD[mode])
    prompts = [one["prompts"][row][0]["content"] for one in seen.rounds for row in range(len(one["prompts"]))]
    epochs = SCHEDULES[name]["num_train_epochs"]
    assert Count(prompts) == Count({f"{i} + {i + 1}?": GROUP * epochs for i in range(6)})
    assert trainer.vllm_generation.continuous.groups.ids == [] and threads_of_groups() == []


def threads_of_groups(limit_s: float = 5.0) -> list[str]:
    """Names of the threads that still make rollouts after so long."""
    found: list[str] = []

    def none_left() -> bool:
        found[:] = [one.name for one in threading.enumerate() if one.name.startswith(("rollouts", "open-groups"))]
        return not found

    wait_until(none_left, limit_s)
    return found


def test_attributes_are_copied_while_another_thread_replaces_methods():
    """As a replay does in the main thread when a group begins."""
    trainer, interval, stop = type("Trainer", (), {"_generate": lambda self: None})(), sys.getswitchinterval(), []
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


# ---- environments ---------------------------------------------------------------------------------------------------


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
def test_environments_keep_their_rows_until_their_rewards_are_read_and_are_used_again(mode, tmp_path):
    Tracked.built, wrong, rounds = [], [], []

    def reads_late(environments, start, completions, **_):
        following, deadline = 2 * GROUP * min(len(rounds) + 2, 10), time.monotonic() + 20
        while sum(one.resets for one in Tracked.built) < following and time.monotonic() < deadline:
            time.sleep(0.005)  # the following round runs meanwhile
        rounds.append([id(one) for one in environments])
        wrong.extend(row for row, one in zip(start, environments, strict=True) if one.row != row)
        return [float(one.total) for one in environments]

    kind = Kind({"environment_factory": Tracked}, {"start": list(range(20))})
    settings = {"max_steps": -1, "num_train_epochs": 1}
    trainer, _ = trained(tmp_path, kind, reads_late, rows=20, **settings, **AHEAD[mode])
    assert wrong == [] and len(rounds) == 10 and all(len(set(one)) == 2 * GROUP for one in rounds)
    in_use = 1 + trainer.rounds_ahead  # rounds: the one that is scored, and those that are open
    assert len(Tracked.built) <= 1 + 2 * GROUP * in_use, "environments are not used again"
    assert len({one for ids in rounds for one in ids}) < 10 * 2 * GROUP
    assert [one.resets for one in Tracked.built].count(0) <= 1  # TRL's probe
    if mode == "drain":
        assert all(not set(one) & set(following) for one, following in zip(rounds, rounds[1:], strict=False))


# ---- evaluation, checkpoints, endings -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AHEAD)
def test_an_evaluation_beside_open_groups_changes_no_row_of_training(mode, tmp_path):
    kind = Kind({"environment_factory": agent_kinds.Counter}, {"start": list(range(12))})
    found, rows = [], []
    for number, evaluates in enumerate((False, True)):
        seen = Seen()
        with engines_here(SPEAKER, turn_s=0.02):
            more = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": GROUP}
            more = more | {"eval_dataset": chats(2, start=[50, 60])} if evaluates else {}
            keywords = kind.keywords | ({"eval_dataset": more.pop("eval_dataset")} if evaluates else {})
            trainer = ours(
                tmp_path / str(number), seen, chats(12, **kind.columns), keywords, learning_rate=0.0,
                num_generations_eval=GROUP, **more, **AHEAD[mode],
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


def groups_of(rounds: list[dict]) -> list[list]:
    return [one["completions"][at : at + GROUP] for one in rounds for at in range(0, len(one["completions"]), GROUP)]


class TakesNotes(agent_kinds.Counter):
    """An environment that writes into its row of the dataset."""

    def reset(self, start: int = 0, notes: list | None = None, **row) -> str:
        notes.append(start)
        self.notes = notes
        return super().reset(start=start, **row)

    def get_reward(self) -> float:
        assert len(self.notes) == 2, f"rows share {self.notes}"
        return super().get_reward()


@pytest.mark.parametrize("mode", AHEAD)
def test_a_resumed_run_begins_its_open_groups_again_and_trains_every_row_once(mode, tmp_path):
    kind = Kind({"environment_factory": TakesNotes}, {"start": list(range(12)), "notes": [[-1]] * 12})
    settings = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 1, **AHEAD[mode]}
    before, after = Seen("start"), Seen("start")
    trained(tmp_path, kind, before, rows=12, max_steps=-1, **settings)
    del before.rounds[2:]
    if mode == "in flight":
        with safe_open(tmp_path / "checkpoint-2" / "rollouts_rank0.safetensors", "pt") as saved:
            assert len(json.loads(saved.metadata()["notes"])["open"]["groups"]) == 4
    with engines_here(SPEAKER):
        resumed = ours(tmp_path, after, chats(12, **kind.columns), kind.keywords, max_steps=-1, **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        resumed.close()
    rows = Count(row for seen in (before, after) for one in seen.rounds for row in one["start"])
    assert len(before.rounds) == 2 and len(after.rounds) == 4
    assert rows == Count(dict.fromkeys(range(12), GROUP))


class Stop(Exception):
    """Ends `train()` early."""


class Waiting(agent_kinds.Counter):
    """An environment whose tool waits, except for the rows of the first round."""

    hold, held = threading.Event(), threading.Event()

    def wait(self, number: int) -> str:
        """
        Waits.

        Args:
            number: A number.
        """
        if self.total > 1:
            self.held.set()
            self.hold.wait(60)
        return "at last"


WAITS = Speaker({"wait": [call_of("wait", number=1)]}, share=0.5)


def stopped(folder: Path):
    """A trainer that has stopped in its first step, while tools of the next round wait."""
    Waiting.hold.clear()
    Waiting.held.clear()
    seen = Seen()
    trainer = ours(
        folder, seen, chats(12, start=list(range(12))), {"environment_factory": Waiting}, max_staleness=1,
        shuffle_dataset=False,
    )  # fmt: skip

    def stop(*args, **kwargs):
        step(*args, **kwargs)
        assert Waiting.held.wait(20)
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
        assert threads_of_groups(0)
        threading.Timer(0.5, Waiting.hold.set).start()  # in the next run, which has groups with the same numbers
        trainer.train()
        trainer.close()
    prompts = [one["prompts"][0][0]["content"] for one in seen.rounds]
    assert len(prompts) == 4 and prompts[0] == prompts[1] and len(set(prompts)) == 3
    assert seen.rounds[0]["prompts"] == seen.rounds[1]["prompts"]
    assert threads_of_groups() == []


def test_a_trainer_that_is_closed_after_an_error_ends_the_rollouts_that_were_open(tmp_path):
    with engines_here(WAITS):
        trainer, _ = stopped(tmp_path)
        trainer.close()
        assert trainer.vllm_generation.continuous.groups.ids == [] and threads_of_groups(0)
        Waiting.hold.set()
        assert threads_of_groups() == []


@pytest.mark.parametrize("closes", [True, False])
def test_a_process_ends_although_a_tool_does_not_return(closes, tmp_path):
    def body(rank: int) -> list[str]:
        with engines_here(WAITS):
            trainer, _ = stopped(tmp_path)
            if closes:
                trainer.close()
            return threads_of_groups(0)

    start = time.monotonic()
    with forked(body, 1, tmp_path) as (one,):
        assert any("rollouts" in name for name in one.result)
    assert time.monotonic() - start < 30  # the tool waits for 60 s


# ---- what ends a run -----------------------------------------------------------------------------------------------


def breaks(number: int) -> str:
    """
    Fails.

    Args:
        number: How.
    """
    raise {1: ValueError, 2: SystemExit, 3: KeyboardInterrupt}[number]("broken")


async def breaks_later(number: int) -> str:
    """
    Fails.

    Args:
        number: How.
    """
    await asyncio.sleep(0)
    return breaks(number)


class BreaksReset(agent_kinds.Counter):
    def reset(self, start: int = 0, **_) -> str:
        if start == 3:
            raise ValueError("broken")
        return super().reset(start)


def breaks_loop(prompts, trainer):
    raise ValueError("broken")


def breaks_by_gathering(prompts, trainer):
    trainer.accelerator.gather(torch.zeros(1))


def caller_of(tool, number: int) -> Speaker:
    return Speaker({tool.__name__: [call_of(tool.__name__, number=number)]}, share=0.4)


RAISES = {"tool_errors": "raise"}
BROKEN = {  # what fails -> the agent, settings, and what the line says
    "tool": (Kind({"tools": [breaks]}), caller_of(breaks, 1), RAISES, "the tool `breaks` failed, for row"),
    "async tool": (
        Kind({"tools": [breaks_later]}), caller_of(breaks_later, 1), RAISES, "the tool `breaks_later` failed, for row",
    ),
    "exit in a tool": (Kind({"tools": [breaks]}), caller_of(breaks, 2), {}, "`breaks` failed, for row"),
    "exit in an async tool": (
        Kind({"tools": [breaks_later]}), caller_of(breaks_later, 2), {}, "`breaks_later` failed",
    ),
    "interrupt in an async tool": (
        Kind({"tools": [breaks_later]}), caller_of(breaks_later, 3), {}, "`breaks_later` failed",
    ),
    "reset": (
        Kind({"environment_factory": BreaksReset}, {"start": list(range(12))}), SPEAKER, {},
        "the `reset` of the environment BreaksReset failed, for row",
    ),
    "rollout_func": (
        Kind({"rollout_func": breaks_loop}), SPEAKER, {}, r"`rollout_func` \(breaks_loop\) failed, for rows 0 to 7",
    ),
}  # fmt: skip


@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "ahead"])
@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.timeout(60)
def test_what_fails_ends_the_run_with_its_place(name, ahead, tmp_path):
    kind, speaker, settings, line = BROKEN[name]
    where = r"node 0, rank 0.*: "
    with pytest.raises(RolloutError, match=where + ".*" + line) as raised:
        trained(tmp_path, kind, speaker=speaker, shuffle_dataset=False, max_staleness=int(ahead), **settings)
    assert "broken" in str(raised.value) and raised.value.__cause__ is not None
    if name != "rollout_func":
        row = int(re.search(r"for row (\d+) of this rank", str(raised.value))[1])
        assert 0 <= row < 2 * GROUP and (name != "reset" or row >= GROUP)


def test_an_error_of_a_tool_is_its_answer_as_in_trl(tmp_path):
    for number, tool in enumerate((breaks, breaks_later)):
        kind = Kind({"tools": [tool]})
        _, seen = trained(tmp_path / str(number), kind, speaker=caller_of(tool, 1), max_staleness=1)
        messages = [message for one in seen.rounds for row in one["completions"] for message in row]
        assert {one["content"] for one in messages if one["role"] == "tool"} == {"{'error': 'broken'}"}


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("tool", [breaks, breaks_later])
def test_wrong_arguments_are_no_error_of_the_tool(tool, ahead, tmp_path):
    speaker = Speaker({tool.__name__: [call_of(tool.__name__, wrong=1)]})
    _, seen = trained(tmp_path, Kind({"tools": [tool]}), speaker=speaker, max_staleness=ahead, **RAISES)
    messages = [message for one in seen.rounds for row in one["completions"] for message in row]
    (answer,) = {one["content"] for one in messages if one["role"] == "tool"}
    assert "unexpected keyword argument 'wrong'" in answer


def test_answers_of_a_turn_have_trls_order(tmp_path, monkeypatch):
    """Wrong arguments of an async tool are answered at once, before the tools that are awaited."""

    def speak(conversation: str, seed: int) -> str:
        calls = call_of("ask", question=2) + call_of("ask", wrong=1)
        return "so be it" if "<tool_response>" in conversation else calls

    kind, found = Kind({"tools": [agent_kinds.ask]}), []
    for number in range(2):
        found.append(trained(tmp_path / str(number), kind, speaker=speak, max_steps=1)[1].rounds[0]["completions"])
        monkeypatch.setattr(ToolCalls, "watch", lambda *_: None)  # TRL's own dictionaries
    tools = [message["content"] for message in found[0][0] if message["role"] == "tool"]
    assert found[0] == found[1] and ["error" in one for one in tools] == [True, False]


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_error_of_an_earlier_run_does_not_end_the_next_one(ahead, tmp_path):
    working = []

    async def look(number: int) -> str:
        """
        Looks.

        Args:
            number: A number.
        """
        if not working:
            raise ValueError("the service is down")
        return "fine"

    with engines_here(caller_of(look, 1)):
        trainer = ours(tmp_path, Seen(), chats(12), {"tools": [look]}, max_staleness=ahead, **RAISES)
        with pytest.raises(RolloutError, match="the service is down"):
            trainer.train()
        working.append(True)
        trainer.train()
        trainer.close()


@pytest.mark.parametrize("ahead", [0, 1])
def test_ctrl_c_is_nobodys_error(ahead, tmp_path):
    """In the main thread it is the user's."""
    with pytest.raises(RolloutError if ahead else KeyboardInterrupt):
        trained(tmp_path, Kind({"tools": [breaks]}), speaker=caller_of(breaks, 3), max_staleness=ahead)


def test_a_reset_in_a_tool_is_no_row_of_trls(tmp_path):
    class ResetsItself(agent_kinds.Counter):
        async def raise_by(self, step: int) -> str:
            """
            Begins again.

            Args:
                step: A number.
            """
            self.reset(start=step)
            return "again"

    for ahead in (0, 1):
        kind = Kind({"environment_factory": ResetsItself}, {"start": list(range(12))})
        _, seen = trained(tmp_path / str(ahead), kind, max_staleness=ahead)
        assert "again" in str(seen.rounds)


def test_a_collective_in_a_rollout_func_that_runs_ahead_is_refused(tmp_path):
    with pytest.raises(RolloutError, match="`accelerator.gather` cannot be called in a rollout that runs ahead"):
        trained(tmp_path, Kind({"rollout_func": breaks_by_gathering}), max_staleness=1)


def generates_in_two_threads(prompts, trainer):
    ids = trainer.processing_class.apply_chat_template(prompts, tokenize=True, return_dict=True)["input_ids"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda row: trainer.vllm_generation.generate([row]), ids))


def test_two_calls_of_generate_at_once_in_one_rollout_are_refused(tmp_path):
    with pytest.raises(RolloutError, match="called `generate` in two threads at once"):
        trained(tmp_path, Kind({"rollout_func": generates_in_two_threads}), max_staleness=1)
