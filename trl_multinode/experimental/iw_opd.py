"""TRL's experimental IW-OPD on the engines of every node."""

from dataclasses import dataclass

from torch.utils.data import IterableDataset
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

    @property
    def _goes_on(self) -> bool:
        """Whether this run was resumed from a checkpoint, and its data must be fast-forwarded."""
        return self.host is not None and self._resume.resuming and not isinstance(self.train_dataset, IterableDataset)

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        if self._goes_on:
            sampler.repeat_count = self.steps_per_round
        return sampler

    def get_train_dataloader(self):
        """
        TRL repeats batches in a wrapper; accelerate would fast-forward the loader inside it, by as many batches as
        were repeated, and other prompts would follow. So the sampler of a resumed run repeats them, as GOLD's does.
        """
        loader = super().get_train_dataloader()
        return loader.dataloader if self._goes_on else loader
