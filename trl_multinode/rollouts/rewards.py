"""Calls of reward functions: a limit for one that does not return, a look at what it returns, rewards that are NaN."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from trl.trainer.utils import is_async_callable

from ..libraries import replaced
from ..run.reporter import warn
from ..run.values import listed
from .aligning import aligned_before_gather
from .reward_call import Call, as_rewards, with_rows
from .user_calls import UserCalls


class RewardCalls(UserCalls):
    """
    Reward functions of one rank.

    ```python
    calls = RewardCalls.of(host)
    rewards = calls.rewards(trainer, module, partial(trainer._calculate_rewards, ...))
    ```
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._warned: set[tuple[int, ...]] = set()

    @contextmanager
    def limited(self, trainer: Any) -> Iterator[None]:
        """Give every reward function of a trainer the limit while the context is open, and check what it returns.

        Reward models are left as they are.
        """
        functions = [
            function if isinstance(function, torch.nn.Module) else self.limit(function, name)
            for function, name in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
        ]
        with replaced(trainer, "reward_funcs", functions):
            yield

    def rewards(
        self, trainer: Any, gathers: Any, calculate: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return the rewards of a round that `calculate`, TRL's method, gathers with the `gather` of `gathers`."""
        aligned = aligned_before_gather(gathers, trainer.host.updates.align)
        with trainer.host.phases("reward"), aligned, self.limited(trainer):
            rewards = calculate()
        self.log_all_nan(trainer, rewards)
        return rewards

    def limit(self, function: Callable, name: str) -> Callable:
        """Return a reward function whose calls have the limit, and are seen by [`state`]."""
        checked = functools.partial(as_rewards, str(self.topology), name)

        def given(kwargs: dict[str, Any], call: Call) -> dict[str, Any]:
            # lists that know their row cost a reward nothing, but a few libraries take plain lists only
            return kwargs if self.timeout_s is None else with_rows(kwargs, call)

        # below this name `user_code.py` finds a user's frame
        def _calculate_rewards(
            **kwargs: Any,
        ) -> Any:
            with self.open_call(reward_call(name)) as call:
                rewards = function(**given(kwargs, call))
            return checked(rewards, len(kwargs["prompts"]))

        async def _calculate_rewards_async(**kwargs: Any) -> Any:
            with self.open_call(reward_call(name)) as call:
                call.coroutine = function(**given(kwargs, call))
                rewards = await call.coroutine
            return checked(rewards, len(kwargs["prompts"]))

        return _calculate_rewards_async if is_async_callable(function) else _calculate_rewards

    # ---- NaN --------------------------------------------------------------------------------------------------------

    def log_all_nan(self, trainer: Any, rewards: torch.Tensor) -> None:
        """Add the number of rows without a reward to the trainer's next log, and warn if a rank has no other ones."""
        count = self.count_all_nan(rewards, trainer.state.global_step + 1)
        trainer._metrics["train" if trainer.model.training else "eval"][
            "rewards/all_nan_rows"
        ].append(float(count))

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
        is_nan = rewards.isnan().all(dim=1).view(self.topology.world_size, -1).cpu()
        ranks = tuple(is_nan.all(dim=1).nonzero().flatten().tolist())
        if ranks and ranks not in self._warned and self.topology.rank == 0:
            self._warned.add(ranks)
            names = listed([self.topology.name_of(rank) for rank in ranks], 8)
            what = (
                f"no reward function gave a reward to any of the {is_nan.shape[1]} rows of {names}"
            )
            what += (
                " (got NaN or None). TRL trains on none of them; `rewards/all_nan_rows` counts them"
            )
            warn(f"step {step}: {what}")
        return int(is_nan.sum())


def reward_call(name: str, **fields: Any) -> Call:
    """Return the call of the reward function `name`, with these fields of [`Call`]."""
    return Call(f"the reward function `{name}`", **fields)
