"""TRL's other trainers that generate with vLLM, extended by [`NodeTrainer`]: RLOO and distillation."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from trl import DistillationConfig, DistillationTrainer, RLOOConfig, RLOOTrainer

from .config import GRPO_ONLY, NO_LOGPROBS, NodeFields
from .node_trainer import NodeTrainer, RewardedNodeTrainer


@dataclass
class MultiNodeRLOOConfig(NodeFields, RLOOConfig):
    """TRL's [`~trl.RLOOConfig`] with the settings of [`NodeFields`] and its three changed defaults."""

    _not_for = GRPO_ONLY


class MultiNodeRLOOTrainer(RewardedNodeTrainer, RLOOTrainer):
    """
    TRL's [`~trl.RLOOTrainer`] with generation on each node's own vLLM engines. The arguments are the same, with a
    [`MultiNodeRLOOConfig`]. The check for stale weights compares log-probs in every round, as for GRPO.
    """

    _trl, _config = RLOOTrainer, MultiNodeRLOOConfig
    # log-probs of this round's completions; the trained model's come first
    _scores: list[torch.Tensor] | None = None

    def _get_per_token_logps_and_entropies(
        self, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Any, Any]:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._scores is not None:
            self._scores.append(found[0])
        return found

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._check_groups(inputs)
        self._scores = [] if self.host is not None else None
        output = self._one_round(partial(super()._generate_and_score_completions, inputs))
        self._scores = None
        return output

    def _check_completions(self, output: dict[str, Any]) -> tuple[int, int]:
        assert self._scores, "TRL scored no completion of this round"
        sampled = torch.zeros_like(self._scores[0])
        for row, made in zip(sampled, self.vllm_generation.rows, strict=True):
            row[: len(made.logprobs)] = torch.tensor(made.logprobs)
        scores = {"old_per_token_logps": self._scores[0], "sampling_per_token_logps": sampled}
        return self._monitor.check(output | scores)


@dataclass
class MultiNodeDistillationConfig(NodeFields, DistillationConfig):
    """TRL's [`~trl.DistillationConfig`] with the settings of [`NodeFields`] and its three changed defaults."""

    _not_for = GRPO_ONLY | NO_LOGPROBS


class MultiNodeDistillationTrainer(NodeTrainer, DistillationTrainer):
    """
    TRL's [`~trl.DistillationTrainer`] with the student's completions generated on each node's own vLLM engines. The
    arguments are the same, with a [`MultiNodeDistillationConfig`].
    """

    _trl, _config = DistillationTrainer, MultiNodeDistillationConfig

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        return self._one_round(partial(super()._generate_and_score_completions, inputs))
