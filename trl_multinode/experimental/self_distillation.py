"""Common base of SDFT and SDPO, for which TRL has the same generation code."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from trl.generation import vllm_generation

from ..config import GRPO_ONLY, NO_LOGPROBS, NodeFields
from ..errors import ConfigurationError
from ..node_settings import is_node_mode
from ..node_trainer import NodeTrainer


@dataclass
class SelfDistillationFields(NodeFields):
    """[`NodeFields`] with a check that the teacher needs no TRL server."""

    _not_for = GRPO_ONLY | NO_LOGPROBS

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_node_mode(self) and self.use_teacher_server:
            raise ConfigurationError(
                "`use_teacher_server=True` needs TRL's generation server for the teacher's log-probs, and "
                "node mode has none.",
                setting="use_teacher_server",
                got=True,
                expected=False,
                cure="Use `use_teacher_server=False`: the ranks compute them; or `vllm_mode='server'`.",
            )


class SelfDistillationNodeTrainer(NodeTrainer):
    """[`NodeTrainer`] for a trainer that imports `VLLMGeneration` in its `__init__`."""

    _builds_in = vllm_generation
    _generates_once = True

    def _prepare_training_batch(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        return self._one_round(partial(super()._prepare_training_batch, inputs))
