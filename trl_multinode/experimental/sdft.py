"""TRL's experimental SDFT on the engines of every node."""

from dataclasses import dataclass

from trl.experimental.sdft import SDFTConfig, SDFTTrainer

from .self_distillation import SelfDistillationFields, SelfDistillationNodeTrainer


@dataclass
class MultiNodeSDFTConfig(SelfDistillationFields, SDFTConfig):
    """TRL's `SDFTConfig` with the settings and the three changed defaults of [`NodeFields`]."""


class MultiNodeSDFTTrainer(SelfDistillationNodeTrainer, SDFTTrainer):
    """TRL's `SDFTTrainer` with the same arguments; every node's engines generate the completions."""

    _trl, _config = SDFTTrainer, MultiNodeSDFTConfig
