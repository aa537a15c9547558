"""Common base of GOLD and IW-OPD: a buffer of one optimizer step, filled by the student or from the dataset."""

from functools import partial
from typing import Any

from ..host import NodeHost
from ..node_trainer import NodeTrainer
from ..rollouts.generation import NodeGeneration


class BufferedNodeTrainer(NodeTrainer):
    """[`NodeTrainer`] for a trainer that generates in `_fill_buffer` and may send weights only every few steps."""

    _sync_mark = "_last_vllm_sync_step"
    _generates_once = True

    @staticmethod
    def _build_generation(host: NodeHost, *, mode: str, **keywords: Any) -> NodeGeneration:
        """Multiply `max_num_seqs` by the TP size, as TRL's other trainers do: `EngineSettings` divides by it."""
        keywords["max_num_seqs"] *= host.settings.vllm_tensor_parallel_size
        return NodeTrainer._build_generation(host, mode=mode, **keywords)

    def _fill_buffer(self, generation_batch: Any, buffer_steps: int) -> None:
        return self._one_round(partial(super()._fill_buffer, generation_batch, buffer_steps))
