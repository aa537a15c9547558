"""TRL's experimental IW-OPD on the engines of every node."""

from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

from ..config import GRPO_ONLY, NO_LOGPROBS, NodeFields
from .buffered import BufferedNodeTrainer


@dataclass
class MultiNodeIWOPDConfig(NodeFields, IWOPDConfig):
    """TRL's `IWOPDConfig` with the settings and the three changed defaults of [`NodeFields`]."""

    _not_for = GRPO_ONLY | NO_LOGPROBS


class MultiNodeIWOPDTrainer(BufferedNodeTrainer, IWOPDTrainer):
    """TRL's `IWOPDTrainer` with the same arguments; every node's engines generate the student's completions."""

    _trl, _config = IWOPDTrainer, MultiNodeIWOPDConfig

    @property
    def _step(self) -> int:
        """`_buffer_step`, under the name that it has in TRL's other trainers."""
        return self._buffer_step

    @_step.setter
    def _step(self, value: int) -> None:
        self._buffer_step = value

    @property
    def _is_resumed(self) -> bool:
        """`True` if this run was resumed from a checkpoint and its data must be fast-forwarded."""
        return (
            self.host is not None
            and self._resume.resuming
            and not isinstance(self.train_dataset, IterableDataset)
        )

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        if self._is_resumed:
            sampler.repeat_count = self.steps_per_round
        return sampler

    def get_train_dataloader(self) -> Any:
        """
        Return TRL's loader; in a resumed run, remove the wrapper with which TRL repeats batches.

        accelerate fast-forwards the loader inside the wrapper by the number of repeated batches, so the run
        would continue with other prompts. In a resumed run the sampler repeats the prompts instead, as GOLD's does.
        """
        loader = super().get_train_dataloader()
        return loader.dataloader if self._is_resumed else loader
