"""Rewards of a group as soon as it is complete, in the group's thread or in a process, beside generation."""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from trl.trainer.utils import is_async_callable

from ..errors import ConfigurationError, RolloutError
from ..images import may_have_images
from ..libraries import replaced
from ..run.endings.error_text import described
from ..run.reporter import report
from .recorded import Recorded, Scores
from .reward_call import Call, as_rewards, with_rows
from .rewards import reward_call
from .scoring_pool import ScoringPool, is_importable, without_partial
from .user_calls import UserCalls

# TRL's functions that need `math_verify`, and limit their time by a signal, which only the main thread can
NEED_MAIN_THREAD = {"accuracy_reward", "reasoning_accuracy_reward"}
COSINE = "cosine_scaled_reward"  # calls TRL's `accuracy_reward`, and no other process can import it
NOT_GIVEN = ("prompt", "completion", "completion_ids")  # columns that TRL leaves out


# Where a function runs, as rank 0 reports it
WITH_BATCH = "with the whole batch"
ON_LOOP = "on the event loop"
IN_PROCESS = "in a process"
IN_THREAD = "in the group's thread"


class RewardFunction(NamedTuple):
    """Reward function of a trainer."""

    name: str
    call: Any
    runs: str  # where it does


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
        calls ([`UserCalls`]):
            Limit for one call of a function.

    Raises:
        `ConfigurationError`: if `score_with_batch` names no reward function of the trainer, or none is left to score.
    """

    def __init__(self, trainer: Any, host: Any, calls: UserCalls):
        self._trainer, self._calls = trainer, calls
        self._where = str(host.topology)
        self._with_batch = set(host.settings.score_with_batch or ())
        self._num_processes: int = host.settings.score_groups
        self._has_images = may_have_images(
            getattr(trainer, "train_dataset", None), getattr(trainer, "_is_vlm", False)
        )
        named = zip(trainer.reward_func_names, trainer.reward_funcs, strict=True)
        self._functions = [RewardFunction(*one, self._place_of(*one)) for one in named]
        # by the place among the trainer's functions
        self._scored = {
            index: one for index, one in enumerate(self._functions) if one.runs != WITH_BATCH
        }
        in_process = [one for one in self._functions if one.runs == IN_PROCESS]
        self._check_settings([one.name for one in in_process])
        self._pool: ScoringPool | None = None
        if in_process:
            functions = [one.call for one in in_process]
            self._pool = ScoringPool(self._num_processes or 1, self._where, calls, functions)
        if host.topology.rank == 0:
            report(self._plan())

    def _place_of(self, name: str, function: Any) -> str:
        """Return where a function runs."""
        comes_with_trl = is_of_trl(function)
        limits_time_inside = comes_with_trl and name == COSINE
        if isinstance(function, torch.nn.Module) or name in self._with_batch or limits_time_inside:
            return WITH_BATCH
        if is_async_callable(function):
            return ON_LOOP
        if comes_with_trl and name in NEED_MAIN_THREAD:
            return IN_PROCESS
        return IN_PROCESS if self._num_processes and self._can_be_sent(function) else IN_THREAD

    def _can_be_sent(self, function: Any) -> bool:
        """Return whether a process can call a function: environments and images cannot be sent to it."""
        if self._has_images or not is_importable(function):
            return False
        return "environments" not in inspect.signature(function).parameters

    def _check_settings(self, in_process: list[str]) -> None:
        names = [one.name for one in self._functions]
        if unknown := sorted(self._with_batch.difference(names)):
            raise ConfigurationError(
                f"`score_with_batch` names {unknown}, and the reward functions are {names}.",
                setting="score_with_batch",
                got=unknown,
                expected=names,
                cure="Use these names.",
            )
        if not self._scored:
            raise ConfigurationError(
                f"`score_groups` has no function to score groups with: {names} are reward models or in "
                "`score_with_batch`.",
                setting="score_groups",
                got=names,
                cure="Leave `score_groups` out.",
            )
        if in_process and self._has_images:
            raise ConfigurationError(
                f"{in_process} need a main thread, so `score_groups` calls them in a process, to which the images of "
                "the dataset cannot be sent.",
                setting="score_groups",
                got=self._num_processes,
                cure=f"Set `score_with_batch={in_process}`, or leave `score_groups` out.",
            )

    def _plan(self) -> str:
        each = ", ".join(f"{one.name} {one.runs}" for one in self._functions)
        return f"score_groups={self._num_processes}: rewards of a group are computed when it is complete: {each}"

    # ---- in the group's thread --------------------------------------------------------------------------------------

    def score(self, recorded: Recorded) -> Scores:
        """Return the rewards of a group. Only the caller's thread waits; the functions may run in several at once.

        Raises:
            `RolloutError`: if a function failed, or returned another number of rewards than the group has rows.
        """
        scores = Scores([None] * len(self._functions))
        arguments = self._arguments(recorded, scores)
        begun = {
            index: asyncio.run_coroutine_threadsafe(
                self._await(one, arguments), self._trainer.async_loop
            )
            for index, one in self._scored.items()
            if one.runs == ON_LOOP
        }
        for index, one in self._scored.items():
            found = begun[index].result() if index in begun else self._call(one, arguments, scores)
            scores.values[index] = as_rewards(
                self._where,
                one.name,
                found,
                len(recorded.completions),
                advice=" One that needs the rows of all groups belongs into `score_with_batch`.",
            )
        return scores

    def _arguments(self, recorded: Recorded, scores: Scores) -> dict[str, Any]:
        """Return the keywords with which TRL calls its reward functions, of one group."""
        fields = zip(recorded.inputs, recorded.fields, strict=True)
        inputs = [row | more for row, more in fields]
        columns = [name for name in inputs[0] if name not in NOT_GIVEN]
        found: dict[str, Any] = {name: [row[name] for row in inputs] for name in columns}
        found |= {
            "trainer_state": self._trainer.state,
            "log_extra": scores.add_extra,
            "log_metric": scores.add_metric,
        }
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

    async def _await(self, function: RewardFunction, arguments: dict[str, Any]) -> Any:
        with self._open_call(function.name) as call:
            call.coroutine = function.call(**with_rows(arguments, call))
            return await call.coroutine

    def _call(
        self, function: RewardFunction, arguments: dict[str, Any], scores: Scores
    ) -> Sequence[Any]:
        if function.runs == IN_THREAD:
            with self._open_call(function.name) as call:
                return function.call(**with_rows(arguments, call))
        assert self._pool is not None
        answer = self._pool.call(function.call, function.name, arguments)
        for column, values in answer.extras.items():
            scores.add_extra(column, values)
        scores.metrics += answer.metrics
        return answer.rewards

    @contextmanager
    def _open_call(self, name: str) -> Iterator[Call]:
        """Let the limit hold for a call, and name the function and the row in the error of one that fails."""
        call = reward_call(name, whose="the group's")
        try:
            with self._calls.open_call(call):
                yield call
        except Exception as error:
            raise RolloutError(
                f"{self._where}: {call.name} failed{call.row()} with {described(error)}. "
                "Mend it, or return None for a row that it cannot score."
            ) from error

    # ---- in the round -----------------------------------------------------------------------------------------------

    @contextmanager
    def replaying(self, taken: Sequence[Recorded]) -> Iterator[None]:
        """Let TRL's `_calculate_rewards` get the rewards of the taken groups, and call the other functions itself."""
        scores = [one.scores for one in taken if one.scores is not None]
        assert len(scores) == len(taken)
        functions = [one.call for one in self._functions]
        for index in self._scored:
            functions[index] = partial(self._replay, index, scores)
        with replaced(self._trainer, "reward_funcs", functions):
            yield

    def _replay(
        self,
        index: int,
        groups: list[Scores],
        /,
        log_extra: Callable,
        log_metric: Callable,
        **arguments: Any,
    ) -> list[float | None]:
        """Return the rewards that one function gave to the rows of all groups; the first one logs for all."""
        if index == min(self._scored):
            for column in sorted({name for group in groups for name in group.extras}):
                log_extra(column, joined_column(groups, index, column))
            for group in groups:
                for name, value in group.metrics:
                    log_metric(name, value)
        return [reward for group in groups for reward in group.rewards_of(index)]

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()


def is_of_trl(function: Any) -> bool:
    """Return whether a function, an object that is called, or the function of a partial comes with TRL."""
    function, _ = without_partial(function)
    return str(getattr(function, "__module__", "")).startswith("trl.")


def joined_column(groups: list[Scores], index: int, column: str) -> list[Any]:
    """Return a column of the completions' log; a group whose functions logged none of it has `None` in its rows, of
    which there are as many as rewards of function `index`."""
    values: list[Any] = []
    for group in groups:
        values += group.extras.get(column, [None] * len(group.rewards_of(index)))
    return values
