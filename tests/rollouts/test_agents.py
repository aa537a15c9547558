"""Agents beside training, in one process: seeds, schedules, resume, and what ends a run."""

import asyncio
import re
from collections import Counter as Count
from itertools import product

import agent_kinds
import pytest
import torch
from agent_kinds import AHEAD, KINDS, SPEAKER, Kind, tool, trained, wait_for_the_end_of_groups
from agents import GROUP, Seen, Speaker, call_of, chats, engines_here, numbers, ours
from safetensors import safe_open

from trl_multinode.errors import RolloutError
from trl_multinode.rollouts.saved_groups import decoded
from trl_multinode.rollouts.tool_calls import ToolCalls

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
        _, (tokens,), (tops,), _ = trainer.vllm_generation.generate(
            prompts=[row], images=None, num_generations=1
        )
        completions.append(list(tokens))
        logprobs.append([top[0] for top in tops])
    images = [["screenshot"] for _ in ids]
    return {
        "prompt_ids": ids,
        "completion_ids": completions,
        "logprobs": logprobs,
        "images": images,
    }


LOOPS = {
    "no tools": Kind({"environment_factory": ObservesOnly}, {"start": list(range(12))}, ("start",)),
    "row by row": Kind(
        {"rollout_func": row_by_row}, {"level": list(range(12))}, ("level", "images")
    ),
}
IN_ORDER = {
    "drain": AHEAD["drain"],
    "in flight": AHEAD["in flight"] | {"max_age": 2},
    "scored": {"score_groups": 0},
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((kind, "drain") for kind in ("tools", "environments", "rollout_func")),
        *((kind, "in flight") for kind in ("environments", "rollout_func")),
        *product(LOOPS, IN_ORDER),
    ],
)
def test_without_a_change_of_weights_a_run_ahead_is_the_synchronous_run(name, mode, tmp_path):
    """Rows of all turns have the seeds of the synchronous run, which is TRL's (e2e/test_features), whenever they are
    made. The engine of this process computes log-probs beside training, which differ in their last bits now and then.
    """
    kind, frozen = (KINDS | LOOPS)[name], {"learning_rate": 0.0}
    fresh, seen = trained(tmp_path / "fresh", kind, **frozen)
    ahead, seen_ahead = trained(tmp_path / "ahead", kind, **frozen, **IN_ORDER[mode])
    if mode == "scored":
        assert groups_of(seen.rounds) == groups_of(sorted_rounds(seen_ahead.rounds, seen.rounds))
        return
    assert seen.rounds == seen_ahead.rounds and len({str(one) for one in seen.rounds}) == 3
    assert ahead.state.log_history[1]["staleness/rounds_mean"] == 1
    for mine, its in zip(ahead.outputs, fresh.outputs, strict=True):
        assert mine.keys() - {"present_logps"} == its.keys() and ("tool_mask" in its) == (
            name in KINDS
        )
        tensors = {field: value for field, value in its.items() if isinstance(value, torch.Tensor)}
        different = [
            field
            for field, value in tensors.items()
            if not torch.allclose(mine[field], value, atol=1e-4)
        ]
        assert different == [] and its["advantages"].abs().max() > 0
    for mine, its in zip(ahead.gradients, fresh.gradients, strict=True):
        assert (mine - its).abs().max() < 1e-4 * its.abs().max()
    logs = [
        [of_rollouts(entry) for entry in numbers(one.state.log_history)] for one in (ahead, fresh)
    ]
    assert logs[0] == logs[1] and "reward" in logs[0][0]
    if name in ("tools", "environments"):
        assert min(entry["tools/call_frequency"] for entry in logs[0] if entry) > 0.2
        assert max(entry["tools/failure_frequency"] for entry in logs[0] if entry) > 0


def of_rollouts(entry: dict) -> dict:
    """TRL's metrics of the rows of a step, without those of the model's log-probs."""
    names = ("reward", "completions/", "tools/", "frac_reward_zero_std", "num_tokens")
    return {name: value for name, value in entry.items() if name.startswith(names)}


def sorted_rounds(groups: list[dict], rounds: list[dict]) -> list[dict]:
    """Groups that were scored one by one, in the order of the prompts of `rounds`."""
    found = {str(one["prompts"][0]): one for one in groups}
    return [
        found[str(one["prompts"][at])]
        for one in rounds
        for at in range(0, len(one["prompts"]), GROUP)
    ]


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
    [
        ("blocks", "drain"),
        ("iterations", "drain"),
        ("a short last step", "drain"),
        ("two rounds a step", "in flight"),
    ],
)
def test_every_row_of_every_epoch_is_trained_once(name, mode, tmp_path):
    schedule = {"max_steps": -1, "max_tool_calling_iterations": 1} | SCHEDULES[name]
    trainer, seen = trained(tmp_path, KINDS["tools"], Seen(), rows=6, **schedule, **AHEAD[mode])
    prompts = [
        one["prompts"][row][0]["content"]
        for one in seen.rounds
        for row in range(len(one["prompts"]))
    ]
    epochs = SCHEDULES[name]["num_train_epochs"]
    assert Count(prompts) == Count({f"{i} + {i + 1}?": GROUP * epochs for i in range(6)})
    assert trainer.vllm_generation.rounds.groups.ids == []
    recorded = (tmp_path / "_multinode" / "log.jsonl").read_text().splitlines()
    assert len(recorded) == len(trainer.state.log_history)
    wait_for_the_end_of_groups()


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def groups_of(rounds: list[dict]) -> list[list]:
    return [
        one["completions"][at : at + GROUP]
        for one in rounds
        for at in range(0, len(one["completions"]), GROUP)
    ]


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
            assert len(decoded(saved.get_tensor("open").numpy().tobytes()).groups) == 4
    with engines_here(SPEAKER):
        resumed = ours(
            tmp_path, after, chats(8, **kind.columns), kind.keywords, max_steps=-1, **settings
        )
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        resumed.close()
    rows = Count(row for seen in (before, after) for one in seen.rounds for row in one["start"])
    assert len(before.rounds) == 2 and len(after.rounds) == 2
    assert rows == Count(dict.fromkeys(range(8), GROUP))


# ---- what ends a run -----------------------------------------------------------------------------------------------


@tool
def breaks(number: int) -> str:
    raise {1: ValueError, 2: SystemExit, 3: KeyboardInterrupt}[number]("broken")


@tool
async def breaks_later(number: int) -> str:
    await asyncio.sleep(0)
    return breaks(number)


def test_answers_and_errors_of_tools_are_those_of_trls_own_dictionaries(tmp_path, monkeypatch):
    """Wrong arguments of an async tool are answered at once, before the tools that are awaited."""

    def speak(conversation: str, seed: int) -> str:
        calls = call_of("ask", question=2) + call_of("ask", wrong=1) + call_of("refuse", reason=3)
        return (
            "so be it" if "<tool_response>" in conversation else calls + call_of("ask", question=7)
        )

    found = []
    for number in range(2):
        _, seen = trained(tmp_path / str(number), KINDS["tools"], speaker=speak, max_steps=1)
        found.append(seen.rounds[0]["completions"])
        monkeypatch.setattr(ToolCalls, "watch", lambda *_: None)
    tools = [message["content"] for message in found[0][0] if message["role"] == "tool"]
    assert found[0] == found[1] and len(tools) == 4
    assert (
        "answer 2" in tools
        and ["error" in one for one in tools].count(True) == 3
        and "error" in tools[0]
    )


class BreaksReset(agent_kinds.Counter):
    def reset(self, start: int = 0, **_) -> str:
        if start == 3:
            raise ValueError("broken")
        return super().reset(start)


def breaks_loop(prompts, trainer):
    raise ValueError("broken")


def caller_of(tool, number: int) -> Speaker:
    return Speaker({tool.__name__: [call_of(tool.__name__, number=number)]}, share=0.4)


RAISES = {"tool_errors": "raise"}


BROKEN = {  # what fails -> the agent, settings, and the names in the error
    "tool": (Kind({"tools": [breaks]}), caller_of(breaks, 1), RAISES, "`breaks`"),
    "async tool": (Kind({"tools": [breaks_later]}), caller_of(breaks_later, 1), RAISES, "`breaks_later`"),
    "exit in a tool": (Kind({"tools": [breaks]}), caller_of(breaks, 2), {}, "`breaks`"),
    "exit in an async tool": (Kind({"tools": [breaks_later]}), caller_of(breaks_later, 2), {}, "`breaks_later`"),
    "interrupt in an async tool": (Kind({"tools": [breaks_later]}), caller_of(breaks_later, 3), {}, "`breaks_later`"),
    "reset": (
        Kind({"environment_factory": BreaksReset}, {"start": list(range(12))}), SPEAKER, {}, "`reset`.*BreaksReset",
    ),
    "rollout_func": (Kind({"rollout_func": breaks_loop}), SPEAKER, {}, r"`rollout_func` \(breaks_loop\).* 0 to 7"),
}  # fmt: skip


@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "ahead"])
@pytest.mark.parametrize("name", BROKEN)
def test_what_fails_ends_the_run_with_its_place(name, ahead, tmp_path):
    kind, speaker, settings, names = BROKEN[name]
    with pytest.raises(RolloutError, match=f"node 0, rank 0.*{names}") as raised:
        trained(
            tmp_path,
            kind,
            speaker=speaker,
            shuffle_dataset=False,
            max_staleness=int(ahead),
            **settings,
        )
    assert "broken" in str(raised.value) and raised.value.__cause__ is not None
    if name != "rollout_func":
        row = int(re.search(r"row (\d+) of this rank", str(raised.value))[1])
        assert 0 <= row < 2 * GROUP and (name != "reset" or row >= GROUP)
