"""Classes of the argument `harness` of a trainer: an agent with its limits, and a session that it gets."""

import inspect
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from ..engine.environment import is_kept
from ..errors import ConfigurationError
from ..wire.marked import MARK
from ..wire.messages import Serving

Outcome = float | str | None


@dataclass(frozen=True)
class Session:
    """One run of an agent, for one completion of a prompt.

    Args:
        row (`dict`):
            Row of the dataset.
        base_url (`str`), api_key (`str`), model (`str`):
            Address, key and model name for a client of OpenAI's API. The key is valid until the session ends.
        folder (`Path`):
            Folder of the session, which no other user can open; it is removed at the end.
        timeout_s (`float`), max_calls (`int`):
            Limits of the session: after so many seconds it is cancelled, and further calls are refused.

    Attributes:
        environment (`dict[str, str]`):
            Environment for a process of the agent: address and key under the names that clients of OpenAI's API read,
            and neither the variables of the launch nor secrets. Processes that have it are killed with the session.
    """

    row: dict[str, Any]
    base_url: str
    api_key: str = field(repr=False)
    model: str
    folder: Path
    timeout_s: float
    max_calls: int

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if is_kept(name)}
        return kept | {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            MARK: self.api_key,
        }


@dataclass(frozen=True)
class Harness:
    """An agent that owns its loop, with its limits.

    Args:
        run (`Callable`):
            Async function that gets a [`Session`], and returns its reward or, if the trainer has `reward_funcs`, the
            text that they get as the completion. `None`: the session is left out of training.
        session_timeout (`float`, *optional*, defaults to 600.0):
            Seconds after which a session is cancelled. What the function returns within 5 s of it still counts.
        max_calls (`int`, *optional*, defaults to 100):
            Calls of a session that the engine answers. A call makes at most `max_completion_length` tokens.
        tool_call_parser (`str`, *optional*), reasoning_parser (`str`, *optional*):
            vLLM's parsers for the model's calls of tools and for its reasoning. Without one, both are plain text.

    Raises:
        `ConfigurationError`: for a value that cannot be used.
    """

    run: Callable[[Session], Awaitable[Outcome]]
    session_timeout: float = 600.0
    max_calls: int = 100
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def __post_init__(self) -> None:
        run = self.run
        if not any(map(inspect.iscoroutinefunction, (run, type(run).__call__))):
            raise ConfigurationError(
                f"`harness` must be an async function of a session, got {run!r}.",
                setting="harness",
                got=run,
                cure="Define it with `async def`; `asyncio.to_thread` calls what blocks.",
            )
        for name, kind in (("session_timeout", int | float), ("max_calls", int)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
                expected = "an integer" if kind is int else "a number"
                raise ConfigurationError(
                    f"`{name}` of a `Harness` must be {expected} above 0, got {value!r}.",
                    setting=name,
                    got=value,
                )

    @classmethod
    def of(cls, given: Any) -> Self:
        """Return the harness for a trainer's argument: a function, or a harness already."""
        return given if isinstance(given, cls) else cls(given)

    @property
    def name(self) -> str:
        """Name of the function, for messages and for the comparison of ranks."""
        run = self.run.func if isinstance(self.run, partial) else self.run
        return getattr(run, "__name__", type(run).__name__)

    def serving(self, chat_template_kwargs: dict[str, Any]) -> Serving:
        """Return the settings of the engines' endpoints."""
        return Serving(self.tool_call_parser, self.reasoning_parser, chat_template_kwargs)


def harness_reward(harness_reward: list[float | None], **_: Any) -> list[float | None]:
    """Return the rewards that the sessions of a harness have returned, for a trainer without reward functions."""
    return harness_reward
