"""Rewards of a group as soon as it is complete, in the group's thread or in a process, beside generation."""

import asyncio
import inspect
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..errors import ConfigurationError, RolloutError
from ..images import may_have_images
from ..libraries import replaced
from ..run.endings.error_text import described
from ..run.reporter import report
from .recorded import Recorded, Scores
from .reward_call import Call, as_rewards, with_rows
from .rewards import RewardCalls, is_async
from .scoring_pool import ScoringPool, is_importable, unwrapped

# TRL's functions that need `math_verify`, and limit their time by a signal, which only the main thread can
NEED_MAIN_THREAD = {"accuracy_reward", "reasoning_accuracy_reward"}
COSINE = "cosine_scaled_reward"  # calls TRL's `accuracy_reward`, and no other process can import it
NOT_GIVEN = ("prompt", "completion", "completion_ids")  # columns that TRL leaves out


@dataclass
class Logged:
    """Values that the reward functions of one group gave to `log_extra` and `log_metric`."""

    extras: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    metrics: list[tuple[str, float]] = field(default_factory=list)

    def add_extra(self, column: str, values: list[Any]) -> None:
        self.extras[column].extend(values)

    def add_metric(self, name: str, value: float) -> None:
        self.metrics.append((name, value))


class GroupScorer:
    """
    Scorer of one rank: it calls reward functions for one group at a time, with the arguments that TRL would give them.

    Reward models, whose forward is a collective, and the functions of `score_with_batch` are left to TRL's own call. A
    sync function runs in the group's thread, or in a process of the rank; an async one on the trainer's event loop.

    Args:
        trainer ([`~trl_multinode.MultiNodeGRPOTrainer`]):
            Trainer with the reward functions.
        host ([`~trl_multinode.host.NodeHost`]):
            Host of this rank.
        calls ([`RewardCalls`]):
            Limit for one call of a function.

    Raises:
        `ConfigurationError`: if `score_with_batch` names no reward function of the trainer, or none is left to score.
    """

    def __init__(self, trainer: Any, host: Any, calls: RewardCalls):
        self._trainer, self._calls = trainer, calls
        self._where = str(host.topology)
        self._functions = list(trainer.reward_funcs)
        self._names = list(trainer.reward_func_names)
        self._with_batch = set(host.settings.score_with_batch or ())
        if unknown := sorted(self._with_batch.difference(self._names)):
            raise ConfigurationError(
                f"`score_with_batch` names {unknown}, and the reward functions are {self._names}.",
                setting="score_with_batch",
                got=unknown,
                expected=self._names,
                cure="Use these names.",
            )
        if not self._scored():
            raise ConfigurationError(
                f"`score_groups` has no function to score groups with: {self._names} are reward models or in "
                "`score_with_batch`.",
                setting="score_groups",
                got=self._names,
                cure="Leave `score_groups` out.",
            )
        self._num_processes: int = host.settings.score_groups
        self._has_images = may_have_images(getattr(trainer, "train_dataset", None), getattr(trainer, "_is_vlm", False))
        names = [self._names[one] for one in self._scored() if self._needs_main_thread(one)]
        if names and self._has_images:
            raise ConfigurationError(
                f"{names} need a main thread, so `score_groups` calls them in a process, to which the images of the "
                "dataset cannot be sent.",
                setting="score_groups",
                got=self._num_processes,
                cure=f"Set `score_with_batch={names}`, or leave `score_groups` out.",
            )
        self._in_process = {one for one in self._scored() if self._needs_process(one)}
        modules = sorted({unwrapped(self._functions[one])[0].__module__ for one in self._in_process})
        self._pool = ScoringPool(self._num_processes or 1, self._where, calls, modules) if self._in_process else None
        if host.topology.rank == 0:
            report(self._plan())

    # ---- which function runs where ----------------------------------------------------------------------------------

    def _scored(self) -> list[int]:
        """Return the places of the functions that are called for a group."""
        return [place for place in range(len(self._functions)) if not self._is_trls_call(place)]

    def _is_trls_call(self, place: int) -> bool:
        function, name = self._functions[place], self._names[place]
        limits_time_inside = name == COSINE and is_of_trl(function)
        return isinstance(function, torch.nn.Module) or name in self._with_batch or limits_time_inside

    def _needs_main_thread(self, place: int) -> bool:
        return self._names[place] in NEED_MAIN_THREAD and is_of_trl(self._functions[place])

    def _needs_process(self, place: int) -> bool:
        function = self._functions[place]
        if is_async(function):
            return False
        if self._needs_main_thread(place):
            return True
        # environments and images cannot be sent to a process
        sendable = is_importable(function) and "environments" not in inspect.signature(function).parameters
        sendable = sendable and not self._has_images
        return self._num_processes > 0 and sendable

    def _plan(self) -> str:
        def where(place: int) -> str:
            if self._is_trls_call(place):
                return "with the whole batch"
            if place in self._in_process:
                return "in a process"
            return "on the event loop" if is_async(self._functions[place]) else "in the group's thread"

        each = ", ".join(f"{name} {where(place)}" for place, name in enumerate(self._names))
        return f"score_groups={self._num_processes}: rewards of a group are computed when it is complete: {each}"

    # ---- in the group's thread --------------------------------------------------------------------------------------

    def score(self, recorded: Recorded) -> Scores:
        """Return the rewards of a group. Only the caller's thread waits; the functions may run in several at once.

        Raises:
            `RolloutError`: if a function failed, or returned another number of rewards than the group has rows.
        """
        logged = Logged()
        arguments = self._arguments(recorded, logged)
        values: list[list[float | None] | None] = [None] * len(self._functions)
        begun = {place: self._begin_async(place, arguments) for place in self._scored() if self._is_async(place)}
        for place in self._scored():
            found = begun[place].result() if place in begun else self._call(place, arguments, logged)
            values[place] = self._checked(place, found, len(recorded.completions))
        return Scores(values, dict(logged.extras), logged.metrics)

    def _arguments(self, recorded: Recorded, logged: Logged) -> dict[str, Any]:
        """Return the keywords with which TRL calls its reward functions, of one group."""
        fields = recorded.fields or [{} for _ in recorded.inputs]
        inputs = [row | more for row, more in zip(recorded.inputs, fields, strict=True)]
        columns = [name for name in inputs[0] if name not in NOT_GIVEN]
        found: dict[str, Any] = {name: [row[name] for row in inputs] for name in columns}
        found |= {"trainer_state": self._trainer.state, "log_extra": logged.add_extra, "log_metric": logged.add_metric}
        if recorded.environments is not None:
            found["environments"] = recorded.environments
        rows = {"prompts": recorded.prompts, "completions": recorded.completions}
        if twice := sorted(rows.keys() & set(columns)):  # TRL's call has no value for them either
            raise ConfigurationError(
                f"{self._where}: the dataset has columns {twice}, and reward functions get the rollouts under "
                "these names.",
                setting="train_dataset",
                got=twice,
                cure="Rename the columns.",
            )
        return found | rows | {"completion_ids": recorded.completion_ids}

    def _is_async(self, place: int) -> bool:
        return is_async(self._functions[place])

    def _begin_async(self, place: int, arguments: dict[str, Any]) -> Any:
        async def awaited() -> Any:
            with self._open_call(place, None) as call:
                call.coroutine = self._functions[place](**with_rows(arguments, call))
                return await call.coroutine

        return asyncio.run_coroutine_threadsafe(awaited(), self._trainer.async_loop)

    def _call(self, place: int, arguments: dict[str, Any], logged: Logged) -> Sequence[Any]:
        function: Callable = self._functions[place]
        if place not in self._in_process:
            with self._open_call(place, threading.get_ident()) as call:
                return function(**with_rows(arguments, call))
        assert self._pool is not None
        answer = self._pool.call(function, self._names[place], arguments)
        for column, values in answer.extras.items():
            logged.add_extra(column, values)
        logged.metrics += answer.metrics
        return answer.rewards

    @contextmanager
    def _open_call(self, place: int, thread: int | None) -> Iterator[Call]:
        """Let the limit hold for a call, and name the function and the row in the error of one that fails."""
        call = Call(self._names[place], time.monotonic(), thread, whose="the group's")
        try:
            with self._calls.open_call(call):
                yield call
        except Exception as error:
            raise RolloutError(
                f"{self._where}: the reward function `{call.name}` failed{call.row()} with {described(error)}. "
                "Mend it, or return None for a row that it cannot score."
            ) from error

    def _checked(self, place: int, rewards: Any, rows: int) -> list[float | None]:
        advice = " One that needs the rows of all groups belongs into `score_with_batch`."
        return as_rewards(self._where, self._names[place], rewards, rows, advice)

    # ---- in the round -----------------------------------------------------------------------------------------------

    @contextmanager
    def replaying(self, taken: Sequence[Recorded]) -> Iterator[None]:
        """Let TRL's `_calculate_rewards` get the rewards of the taken groups, and call the other functions itself."""
        functions = [
            one if self._is_trls_call(place) else partial(self._replay, place, taken)
            for place, one in enumerate(self._functions)
        ]
        with replaced(self._trainer, "reward_funcs", functions):
            yield

    def _replay(self, place: int, taken: Sequence[Recorded], **arguments: Any) -> list[float | None]:
        """Return the rewards that one function gave to the rows of the taken groups; the first one logs for all."""
        if place == self._scored()[0]:
            for column in sorted({name for group in taken for name in scores_of(group).extras}):
                arguments["log_extra"](column, joined_column(taken, column))
            for name, value in [pair for group in taken for pair in scores_of(group).metrics]:
                arguments["log_metric"](name, value)
        return [reward for group in taken for reward in scores_of(group).values[place] or []]

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()


def is_of_trl(function: Any) -> bool:
    """Return whether a function, an object that is called, or the function of a partial comes with TRL."""
    function, _ = unwrapped(function)
    return str(getattr(function, "__module__", "")).startswith("trl.")


def scores_of(group: Recorded) -> Scores:
    """Return the scores of a group that was scored."""
    assert group.scores is not None
    return group.scores


def joined_column(taken: Sequence[Recorded], column: str) -> list[Any]:
    """Return a column of the completions' log; a group whose functions logged none of it has `None`."""
    parts: list[list[Any]] = [scores_of(group).extras.get(column, [None] * len(group.inputs)) for group in taken]
    return [value for part in parts for value in part]
