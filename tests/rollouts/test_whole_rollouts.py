"""Whole rollouts ahead against TRL's own trainer: on the same engine output all else is equal, to the bit."""

import asyncio
import math
import time
from dataclasses import dataclass, field

import pytest
import torch
from agents import GROUP, Seen, Speaker, call_of, chats, engines_here, keep_outputs, keep_rounds, ours, trls

AHEAD = {"drain": {"max_staleness": 1}, "in flight": {"weight_update": "in_flight", "open_rounds": 2}}


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The sum.
    """
    time.sleep(0.002 * (a % 3))  # so that rollouts end in another order than they began
    return a + b


async def ask(question: int) -> str:
    """
    Asks an oracle.

    Args:
        question: Its number.

    Returns:
        What the oracle says.
    """
    await asyncio.sleep(0.001)
    if question > 5:
        raise ValueError(f"no answer to question {question}")
    return f"answer {question}"


def refuse(reason: int) -> str:
    """
    Fails.

    Args:
        reason: A number.
    """
    raise RuntimeError(f"refused for reason {reason}")


@dataclass
class Counter:
    """An environment with an observation, a tool with a state, and a reward of its own."""

    total: int = 0
    resets: int = 0
    history: list = field(default_factory=list)

    def reset(self, start: int = 0, **_) -> str:
        self.total, self.history = start, []
        self.resets += 1
        return f" Begin at {start}."

    def raise_by(self, step: int) -> str:
        """
        Raises the counter.

        Args:
            step: By how much.

        Returns:
            The counter.
        """
        self.total += step
        self.history.append(step)
        if step > 5:
            raise ValueError(f"{step} is too much")
        return f"now {self.total}"

    def get_reward(self) -> float:
        return float(self.total)


class Echo:
    """Another environment, without an observation and a reward."""

    def reset(self, **_) -> None:
        self.said = 0

    async def echo(self, number: int) -> str:
        """
        Says a number.

        Args:
            number: The number.

        Returns:
            The number and how often it was asked.
        """
        self.said += 1
        await asyncio.sleep(0)
        return f"{number} for the {self.said}. time"


SPEAKER = Speaker({
    "add": [call_of("add", a=1, b=2), call_of("add", a=8, b=b"\"x\"".decode())],
    "ask": [call_of("ask", question=1), call_of("ask", question=7)],
    "refuse": [call_of("refuse", reason=3)],
    "raise_by": [call_of("raise_by", step=step) for step in (1, 2, 3, 6)],
    "echo": [call_of("echo", number=4), call_of("missing", number=4)],
})  # fmt: skip


def two_turns(prompts, trainer) -> dict:
    """A loop of the user's: a turn, words that do not count, another turn of every second row."""
    template = trainer.processing_class.apply_chat_template
    ids = template(prompts, add_generation_prompt=True, tokenize=True, return_dict=False)
    words = trainer.processing_class(text=" then")["input_ids"]
    generate = trainer.vllm_generation.generate
    _, completions, logprobs, _ = generate(prompts=ids, images=None, num_generations=trainer.num_generations)
    completions, logprobs = [list(c) for c in completions], [[top[0] for top in row] for row in logprobs]
    masks, turns = [[1] * len(c) for c in completions], [1] * len(ids)
    second = range(0, len(ids), 2)
    _, more, their_logprobs, _ = generate(
        prompts=[ids[row] + completions[row] + words for row in second], images=None, num_generations=1
    )
    for row, new, tops in zip(second, more, their_logprobs, strict=True):
        completions[row] += words + list(new)
        logprobs[row] += [0.0] * len(words) + [top[0] for top in tops]
        masks[row] += [0] * len(words) + [1] * len(new)
        turns[row] = 2
    return {
        "prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs, "env_mask": masks, "turns": turns,
        "loop": "two turns",
    }  # fmt: skip


@dataclass
class Kind:
    """A kind of agent: the trainer's arguments, columns of the dataset, and what the reward function gets too."""

    keywords: dict
    columns: dict = field(default_factory=dict)
    seen: tuple = ()


KINDS = {
    "tools": Kind({"tools": [add, ask, refuse]}, {"level": list(range(12))}, ("level",)),
    "environment": Kind({"environment_factory": Counter}, {"start": list(range(12))}, ("start",)),
    "environments": Kind(
        {"environment_factory": {"counter": Counter, "echo": Echo}, "tools": [add]},
        {"environment": ["counter", "echo", "echo", "counter"] * 3, "start": list(range(12))}, ("environment",),
    ),
    "rollout_func": Kind({"rollout_func": two_turns}, {"level": list(range(12))}, ("turns", "loop", "level")),
}  # fmt: skip


def rewarded(kind: Kind) -> Seen:
    return Seen(*kind.seen)


def numbers(log: list[dict]) -> list[dict]:
    """What TRL logs and no clock made."""
    clocks = ("time", "runtime", "per_second", "flos", "vllm")
    return [{key: value for key, value in entry.items() if not any(word in key for word in clocks)} for entry in log]


class Pair:
    """A run ahead, and TRL's trainer on its engine output."""

    def __init__(self, folder, kind: Kind, **settings):
        torch.manual_seed(0)
        dataset, rewards = chats(12, **kind.columns), [rewarded(kind), rewarded(kind)]
        with engines_here(SPEAKER):
            self.ours = ours(folder / "ours", rewards[0], dataset, kind.keywords, **settings)
            rounds = keep_rounds(self.ours)
            self.our_outputs = keep_outputs(self.ours)
            self.ours.train()
            self.ours.close()
        self.trls = trls(folder / "trl", rounds, rewards[1], dataset, kind.keywords)
        self.trl_outputs = keep_outputs(self.trls)
        self.trls.train()
        self.rounds, self.rewards = rounds, rewards


@pytest.fixture(scope="module", params=[(kind, mode) for mode in AHEAD for kind in KINDS], ids=" ".join)
def pair(request, tmp_path_factory):
    kind, mode = request.param
    made = Pair(tmp_path_factory.mktemp("pair"), KINDS[kind], **AHEAD[mode])
    made.kind, made.mode = kind, mode
    return made


def test_rewards_get_what_trls_own_loop_gives_them(pair):
    mine, its = (seen.rounds for seen in pair.rewards)
    assert mine == its and len(mine) == 3
    turns = {len(completion) for one in mine for completion in one["completions"]}
    assert len(turns) > (2 if pair.kind != "rollout_func" else 0), "all conversations end at the same turn"


def test_tokens_masks_logprobs_and_advantages_are_trls(pair):
    for mine, its in zip(pair.our_outputs, pair.trl_outputs, strict=True):
        assert mine.keys() == its.keys() and {"tool_mask", "sampling_per_token_logps"} <= mine.keys()
        different = [name for name in its if isinstance(its[name], torch.Tensor) and not its[name].equal(mine[name])]
        assert different == []
        assert 0 < its["tool_mask"].float().mean() < 1


def test_gradients_are_trls_to_the_bit(pair):
    assert len(pair.ours.gradients) == len(pair.trls.gradients) == 3
    for mine, its in zip(pair.ours.gradients, pair.trls.gradients, strict=True):
        assert mine.equal(its) and mine.abs().max() > 1e-4


def test_the_log_is_trls(pair):
    mine, its = numbers(pair.ours.state.log_history), numbers(pair.trls.state.log_history)
    for ours_at, trls_at in zip(mine, its, strict=True):
        differing = {
            key: (value, ours_at.get(key))
            for key, value in trls_at.items()
            if ours_at.get(key) != value and not (isinstance(value, float) and math.isnan(value))
        }
        assert differing == {}
    if pair.kind != "rollout_func":
        calls = [entry["tools/call_frequency"] for entry in its if "loss" in entry]
        failures = [entry["tools/failure_frequency"] for entry in its if "loss" in entry]
        assert min(calls) > 0.5 and max(failures) > 0


def test_rows_are_the_datasets_in_its_order(pair):
    """A round in flight may take groups in another order."""
    for batch, rows in pair.trls.batches:
        assert pair.mode == "in flight" or batch == rows
        assert len(rows) == 2 * GROUP


def test_later_rounds_ran_ahead_of_their_weights(pair):
    steps = [[rollout.version.step for row in rows for _, rollout in row] for _, rows in pair.rounds]
    assert set(steps[0]) == {0}
    assert all(max(made_at) <= number for number, made_at in enumerate(steps))
    assert any(min(made_at) < number for number, made_at in enumerate(steps))
    log = [entry for entry in pair.ours.state.log_history if "loss" in entry]
    assert max(entry["staleness/rounds_mean"] for entry in log) > 0
