"""TRL's experimental GOLD on the engines of every node."""

from dataclasses import dataclass
from typing import Any

from trl.experimental.gold import GOLDConfig, GOLDTrainer

from ..config import GRPO_ONLY, NO_LOGPROBS, NodeFields
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
