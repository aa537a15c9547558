"""What GOLD and IW-OPD have in common: a buffer of one optimizer step, filled by the student or by the dataset."""

from functools import partial

from ..node_trainer import NodeTrainer


class BufferedNodeTrainer(NodeTrainer):
    """[`NodeTrainer`] for a trainer that generates in `_fill_buffer` and may send weights every few steps only."""

    _sync_mark = "_last_vllm_sync_step"

    @property
    def steps_per_round(self) -> int:
        return self.args.gradient_accumulation_steps

    def _fill_buffer(self, generation_batch, buffer_steps: int):
        return self._one_round(partial(super()._fill_buffer, generation_batch, buffer_steps))
