"""Kinds of agents for tests: tools that answer, fail and wait, environments with a state, a loop; and runs of them."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path

from agents import Seen, Speaker, call_of, chats, engines_here, keep_outputs, ours
from waiting import until

AHEAD = {"drain": {"max_staleness": 1}, "in flight": {"max_staleness": 2}}


def tool(function: Callable) -> Callable:
    """Give a tool the docstring from which transformers makes its schema."""
    names = [name for name in signature(function).parameters if name != "self"]
    arguments = [f"    {name}: A number." for name in names]
    function.__doc__ = "\n".join([f"Calls {function.__name__}.", "", "Args:", *arguments])
    return function


@tool
def add(a: int, b: int) -> int:
    time.sleep(0.002 * (a % 3))  # so that rollouts end in another order than they began
    return a + b


@tool
async def ask(question: int) -> str:
    await asyncio.sleep(0.001)
    if question > 5:
        raise ValueError(f"no answer to question {question}")
    return f"answer {question}"


@tool
def refuse(reason: int) -> str:
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

    @tool
    def raise_by(self, step: int) -> str:
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

    @tool
    async def echo(self, number: int) -> str:
        self.said += 1
        await asyncio.sleep(0)
        return f"{number} for the {self.said}. time"


SPEAKER = Speaker({
    "add": [call_of("add", a=1, b=2), call_of("add", a=8, b=b"\"x\"".decode())],
    "ask": [call_of("ask", question=1), call_of("ask", question=7), call_of("ask", wrong=1)],
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
    _, completions, logprobs, _ = generate(
        prompts=ids, images=None, num_generations=trainer.num_generations
    )
    completions, logprobs = (
        [list(c) for c in completions],
        [[top[0] for top in row] for row in logprobs],
    )
    masks, turns = [[1] * len(c) for c in completions], [1] * len(ids)
    second = range(0, len(ids), 2)
    _, more, their_logprobs, _ = generate(
        prompts=[ids[row] + completions[row] + words for row in second],
        images=None,
        num_generations=1,
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


def trained(
    folder: Path, kind: Kind, reward=None, rows: int = 12, speaker: Speaker = SPEAKER, **settings
):
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


def threads_of_groups() -> list[str]:
    """Names of the threads that make rollouts at this moment."""
    return [
        one.name
        for one in threading.enumerate()
        if one.name.startswith(("rollouts", "open-groups"))
    ]


def wait_for_the_end_of_groups() -> None:
    """Wait until no thread makes rollouts."""
    until(lambda: not threads_of_groups(), lambda: f"the end of {threads_of_groups()}")
