"""TRL's experimental GOLD on the engines of every node."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from trl.experimental.gold import GOLDConfig, GOLDTrainer

from ..config import GRPO_ONLY, NO_LOGPROBS, NodeFields
from ..host import NodeHost
from ..rollouts.text_logging import TextLogging
from .buffered import BufferedNodeTrainer


@dataclass
class MultiNodeGOLDConfig(NodeFields, GOLDConfig):
    """TRL's `GOLDConfig` with the settings and the three changed defaults of [`NodeFields`]."""

    _not_for = GRPO_ONLY | NO_LOGPROBS


class MultiNodeGOLDTrainer(BufferedNodeTrainer, GOLDTrainer):
    """TRL's `GOLDTrainer` with the same arguments; every node's engines generate the student's completions."""

    _trl, _config = GOLDTrainer, MultiNodeGOLDConfig

    @staticmethod
    def _engine_keywords(args: Any) -> dict[str, Any]:
        context = args.vllm_max_model_length or args.max_length
        return BufferedNodeTrainer._engine_keywords(args) | {"max_model_length": context}

    def _wire(self, host: NodeHost) -> None:
        super()._wire(host)
        self._texts = TextLogging(self._code(), keep=self.args.log_completions)

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch)
        if self.host is not None and self.model.training:
            texts = self._buffered_text_logs[(self._step - 1) % self.steps_per_round]
            self._texts.remember(*(texts or ((), ())))
        return inputs

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._texts.during_scoring() if self.host is not None else nullcontext():
            return super().training_step(*args, **kwargs)
