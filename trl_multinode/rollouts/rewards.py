"""Calls of reward functions: a limit for one that does not return, a look at what it returns, rewards that are NaN."""

import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ..run.endings.exit_codes import USER_CODE
from ..run.reporter import warn
from ..run.topology import Topology
from .reward_call import Call, as_rewards, with_rows

SUSPENDED_S = 5.0  # between two looks; this process was stopped meanwhile, and so was the function
AnyCall = TypeVar("AnyCall", bound=Call)


class RewardCalls:
    """
    Reward functions of one rank, as the watch thread sees them.

    ```python
    calls = RewardCalls(topology, timeout_s, watch.report)
    watch.add_chore(calls.check)
    with calls.limited(trainer):
        rewards = trainer._calculate_rewards(...)
    all_nan = calls.count_all_nan(rewards, step)
    ```

    Args:
        topology ([`Topology`]):
            Topology of this rank.
        timeout_s (`float`, *optional*):
            Limit for one call of one function; `None` for no limit.
        report (`Callable[..., None]`):
            Function that ends the run, with a line and its exit code as `code`.
    """

    def __init__(self, topology: Topology, timeout_s: float | None, report: Callable[..., None]):
        self._topology = topology
        self._timeout_s = timeout_s
        self._report = report
        self._open: list[Call] = []
        self._looked: float | None = None
        self._warned: set[tuple[int, ...]] = set()

    @classmethod
    def of(cls, host: Any) -> "RewardCalls":
        """Return the calls of a rank's trainer, watched by the watch thread of its [`NodeHost`]."""
        calls = cls(host.topology, host.settings.call_timeout, host.watch.report)
        host.watch.add_chore(calls.check)
        return calls

    # ---- the limit --------------------------------------------------------------------------------------------------

    @contextmanager
    def limited(self, trainer: Any) -> Iterator[None]:
        """Give every reward function of a trainer the limit while the context is open, and check what it returns.

        Reward models are left as they are.
        """
        functions = trainer.reward_funcs
        named = zip(functions, trainer.reward_func_names, strict=True)
        trainer.reward_funcs = [
            function if isinstance(function, torch.nn.Module) else self.limit(function, name)
            for function, name in named
        ]
        try:
            yield
        finally:
            trainer.reward_funcs = functions

    def limit(self, function: Callable, name: str) -> Callable:
        """Return a reward function whose calls have the limit, and are seen by [`state`]."""
        # lists that know their row cost a reward nothing, but a few libraries take plain lists only
        given = with_rows if self._timeout_s is not None else lambda kwargs, call: kwargs
        if not is_async(function):

            def _calculate_rewards(**kwargs: Any) -> Any:  # below this name `user_code.py` finds a user's frame
                with self._call(name, threading.get_ident()) as call:
                    rewards = function(**given(kwargs, call))
                return as_rewards(str(self._topology), name, rewards, len(kwargs["prompts"]))

            return _calculate_rewards

        async def _calculate_rewards_async(**kwargs: Any) -> Any:
            with self._call(name, None) as call:
                call.coroutine = function(**given(kwargs, call))
                rewards = await call.coroutine
            return as_rewards(str(self._topology), name, rewards, len(kwargs["prompts"]))

        return _calculate_rewards_async

    @contextmanager
    def _call(self, name: str, thread: int | None) -> Iterator[Call]:
        with self.open_call(Call(name, time.monotonic(), thread)) as call:
            yield call

    @contextmanager
    def open_call(self, call: AnyCall) -> Iterator[AnyCall]:
        """Let the limit hold for a call while the context is open."""
        self._open.append(call)
        try:
            yield call
        finally:
            self._open.remove(call)

    def check(self, store: Any = None) -> None:
        """End the run if a function exceeds its limit. The watch thread calls this twice a second."""
        now = time.monotonic()
        gap, self._looked = now - (self._looked or now), now
        for call in list(self._open):
            if gap > SUSPENDED_S:
                call.since += gap
            if self._timeout_s is not None and now - call.since >= self._timeout_s:
                self._report(self._cause(call, now - call.since), code=USER_CODE)

    def _cause(self, call: Call, seconds: float) -> str:
        what = f"{self._what(call)} has not returned after {seconds:.0f} s{call.row()}{call.where()}"
        return f"{what}. Give what it waits for a limit, or raise `call_timeout` (got {self._timeout_s:g} s)"

    def state(self) -> str:
        """Return the call that has run longest, if any. Any thread calls it."""
        calls = sorted(self._open, key=lambda call: call.since)
        if not calls:
            return ""
        more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
        return f"{self._what(calls[0])}{calls[0].known_row()} runs for {time.monotonic() - calls[0].since:.0f} s{more}"

    def _what(self, call: Call) -> str:
        return f"the reward function `{call.name}`"

    # ---- NaN --------------------------------------------------------------------------------------------------------

    def log_all_nan(self, trainer: Any, rewards: torch.Tensor) -> None:
        """Add the number of rows without a reward to the trainer's next log, and warn if a rank has no other ones."""
        count = self.count_all_nan(rewards, trainer.state.global_step + 1)
        trainer._metrics["train" if trainer.model.training else "eval"]["rewards/all_nan_rows"].append(float(count))

    def count_all_nan(self, rewards: torch.Tensor, step: int) -> int:
        """
        Return the number of rows of all ranks without a reward, and warn if a rank has no other ones.

        Args:
            rewards (`torch.Tensor`):
                Rewards of all ranks of shape (rows, functions), in the order of the ranks; TRL has made `None` NaN.
            step (`int`):
                Number of the optimizer step, for the warning.
        """
        if rewards.shape[1] == 0:
            return 0
        is_nan = rewards.isnan().all(dim=1).view(self._topology.world_size, -1).cpu()
        ranks = tuple(is_nan.all(dim=1).nonzero().flatten().tolist())
        if ranks and ranks not in self._warned and self._topology.rank == 0:
            self._warned.add(ranks)
            names = ", ".join(f"{rank} (node {rank // self._topology.ranks_per_node})" for rank in ranks[:8])
            more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
            what = f"no reward function gave a reward to any of the {is_nan.shape[1]} rows of rank {names}{more}"
            what += " (got NaN or None). TRL trains on none of them; `rewards/all_nan_rows` counts them"
            warn(f"step {step}: {what}")
        return int(is_nan.sum())


def is_async(function: Any) -> bool:
    """Return whether TRL awaits a reward function."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
