"""Agents beside training, in one process: seeds, loops, environments, evaluation and resume."""

import datetime
import json
import sys
import threading
from collections import Counter as Count
from itertools import product

import agent_kinds
import pytest
from agent_kinds import AHEAD, KINDS, SPEAKER, Kind, trained, wait_for_the_end_of_groups
from agents import GROUP, Seen, chats, engines_here, ours
from safetensors import safe_open
from transformers.utils import chat_template_utils
from waiting import until

from trl_multinode.rollouts.stand_in import own_attributes

# ---- seeds ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("name", "mode"), [("environments", "drain"), ("rollout_func", "drain"), *product(LOOPS, IN_ORDER)]
)
def test_without_a_change_of_weights_a_run_ahead_is_the_synchronous_run(name, mode, tmp_path):
    """Rows of all turns have the seeds of the synchronous run, whenever they are made."""
    kind, frozen = (KINDS | LOOPS)[name], {"learning_rate": 0.0}
    fresh, seen = trained(tmp_path / "fresh", kind, **frozen)
    ahead, seen_ahead = trained(tmp_path / "ahead", kind, **frozen, **IN_ORDER[mode])
    if mode == "scored":
        assert groups_of(seen.rounds) == groups_of(sorted_rounds(seen_ahead.rounds, seen.rounds))
        return
    assert seen.rounds == seen_ahead.rounds and len({str(one) for one in seen.rounds}) == 3
    assert ahead.state.log_history[1]["staleness/rounds_mean"] == 1
    for mine, its in zip(ahead.outputs, fresh.outputs, strict=True):
        assert ("tool_mask" in its) == ("tool_mask" in mine) == (name in KINDS)
        assert name in LOOPS or mine["tool_mask"].equal(its["tool_mask"])
    for mine, its in zip(ahead.gradients, fresh.gradients, strict=True):
        # The engine of this process computes log-probs beside training, which differ in their last bits now and then
        assert (mine - its).abs().max() < 1e-4 * its.abs().max()


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
            groups, stream = trainer.vllm_generation.continuous.groups, trainer.host.ahead_engines.stream
            until(
                lambda: {request.group for request, _ in list(stream.turns)} >= set(groups.ids), "turns of all groups"
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
    assert trainer.vllm_generation.continuous.groups.ids == []
    wait_for_the_end_of_groups()


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
    assert wrong == [] and len(rounds) == num_rounds and all(len(set(one)) == 2 * GROUP for one in rounds)
    in_use = 1 + trainer.rounds_ahead  # rounds: the one that is scored, and those that are open
    assert len(Tracked.built) <= 1 + 2 * GROUP * in_use, "environments are not used again"
    assert len({one for ids in rounds for one in ids}) < num_rounds * 2 * GROUP
    assert [one.resets for one in Tracked.built].count(0) <= 1  # TRL's probe
    if mode == "drain":
        assert all(not set(one) & set(following) for one, following in zip(rounds, rounds[1:], strict=False))


# ---- evaluation and checkpoints -------------------------------------------------------------------------------------


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
    kind = Kind({"environment_factory": TakesNotes}, {"start": list(range(8)), "notes": [[-1]] * 8})
    settings = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 1, **AHEAD[mode]}
    before, after = Seen("start"), Seen("start")
    trained(tmp_path, kind, before, rows=8, max_steps=-1, **settings)
    del before.rounds[2:]
    if mode == "in flight":
        with safe_open(tmp_path / "checkpoint-2" / "rollouts_rank0.safetensors", "pt") as saved:
            assert len(json.loads(saved.metadata()["notes"])["open"]["groups"]) == 4
    with engines_here(SPEAKER):
        resumed = ours(tmp_path, after, chats(8, **kind.columns), kind.keywords, max_steps=-1, **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        resumed.close()
    rows = Count(row for seen in (before, after) for one in seen.rounds for row in one["start"])
    assert len(before.rounds) == 2 and len(after.rounds) == 2
    assert rows == Count(dict.fromkeys(range(8), GROUP))
