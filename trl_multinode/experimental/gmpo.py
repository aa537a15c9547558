"""TRL's experimental GMPO on the engines of every node."""

from dataclasses import dataclass

from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from ..config import NodeFields
from ..trainer import MultiNodeGRPOTrainer

NO_CORRECTION = (
    "GMPO's loss does not use TRL's importance-sampling correction, which completions of older weights need. Leave it "
    "out, or use GRPO."
)


@dataclass
class MultiNodeGMPOConfig(NodeFields, GMPOConfig):
    """TRL's `GMPOConfig` with the settings and the three changed defaults of [`NodeFields`]."""

    _not_for = {"max_staleness": NO_CORRECTION}


class MultiNodeGMPOTrainer(MultiNodeGRPOTrainer, GMPOTrainer):
    """
    TRL's `GMPOTrainer` with the same arguments; every node's engines generate the completions. All but rounds ahead
    is as for [`MultiNodeGRPOTrainer`].
    """

    _trl, _config = GMPOTrainer, MultiNodeGMPOConfig
    _rounds_of = GRPOTrainer
    loss_reduction = "rows"
    _name = "GMPO"  # TRL's class has GRPO's name
