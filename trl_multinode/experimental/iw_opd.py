"""TRL's experimental IW-OPD on the engines of every node."""

from dataclasses import dataclass

from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

from ..config import GRPO_ONLY, NO_LOGPROBS, NodeFields
from .buffered import BufferedNodeTrainer


@dataclass
class MultiNodeIWOPDConfig(NodeFields, IWOPDConfig):
    """TRL's `IWOPDConfig` with the settings, and the three other defaults, of [`NodeFields`]."""

    _not_for = GRPO_ONLY | NO_LOGPROBS


class MultiNodeIWOPDTrainer(BufferedNodeTrainer, IWOPDTrainer):
    """TRL's `IWOPDTrainer`, same arguments, where every node's engines generate the student's completions."""

    _trl, _config = IWOPDTrainer, MultiNodeIWOPDConfig

    @property
    def _step(self) -> int:
        """What TRL's other trainers call it."""
        return self._buffer_step

    @_step.setter
    def _step(self, value: int) -> None:
        self._buffer_step = value
