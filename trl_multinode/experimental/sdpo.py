"""TRL's experimental SDPO on the engines of every node."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from ..host import NodeHost
from ..rollouts.rewards import RewardCalls
from .self_distillation import SelfDistillationFields, SelfDistillationNodeTrainer


@dataclass
class MultiNodeSDPOConfig(SelfDistillationFields, SDPOConfig):
    """TRL's `SDPOConfig` with the settings and the three changed defaults of [`NodeFields`]."""


class MultiNodeSDPOTrainer(SelfDistillationNodeTrainer, SDPOTrainer):
    """
    TRL's `SDPOTrainer` with the same arguments; every node's engines generate the completions.

    TRL gathers the prompts and completions of all ranks, across nodes too, because a row's teacher may see another
    rank's successful completion.
    """

    _trl, _config = SDPOTrainer, MultiNodeSDPOConfig

    def _wire(self, host: NodeHost) -> None:
        super()._wire(host)
        self._reward_calls = RewardCalls.of(host)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.host is None:
            return super()._calculate_rewards(*args, **kwargs)
        calculate = partial(super()._calculate_rewards, *args, **kwargs)
        return self._reward_calls.rewards(self, self.accelerator, calculate)
