"""The weight receiver with faults, in the vLLM workers of [`faulty_engine`](faulty_engine.py).

vLLM imports this module for its worker extension, before it builds the receiver; the import registers the faulty one.
"""

import zlib
from collections.abc import Iterator
from unittest.mock import patch

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import LinearBase

from trl_multinode.vllm_worker import reloading
from trl_multinode.vllm_worker.plugin import BACKEND
from trl_multinode.vllm_worker.worker import BucketReceiver, WorkerExtension

from .faults import WEIGHTS, Faults


class FaultyReceiver(BucketReceiver):
    """Receiver that copies every bucket out of its slot, but leaves out steps of the load that follows."""

    @property
    def _faults(self) -> Faults:
        return Faults(tuple(self.vllm_config.additional_config["faults"]))

    def _begin_reload(self) -> None:
        if not self._faults.skips_load(self._version[0]):
            super()._begin_reload()

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        if not self._faults.skips_load(self._version[0]):
            super()._load(tensors)

    def _end_reload(self) -> None:
        if self._faults.skips_load(self._version[0]):
            return
        if self._faults.keeps_head(self._version[0]):
            with patch.object(reloading, "repack_vocabulary_layers"):
                super()._end_reload()
        else:
            super()._end_reload()

    def commit(self) -> list[int]:
        if self._faults.skips_commit(self._version[0]):
            self._version = self.committed
        return super().commit()


class FaultyWorkerExtension(WorkerExtension):
    """The product's extension, under a name that makes vLLM import this module."""

    def crc_of_slot(self, slot: int, num_bytes: int) -> int:
        if slot != WEIGHTS:
            return super().crc_of_slot(slot, num_bytes)
        crc = 0
        for name, tensor in _weights(self.weight_transfer_engine.model):  # type: ignore[attr-defined]
            crc = zlib.crc32(name.encode(), crc)
            bits = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            crc = zlib.crc32(bits.numpy(), crc)
        return crc


@torch.no_grad()
def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, buffers, and the weights that a CPU kernel has packed.

    The packed weights are read back as the kernel's product with the identity, which is exact.
    """
    yield from model.named_parameters()
    yield from model.named_buffers()
    for name, module in model.named_modules():
        if isinstance(module, LinearBase) and hasattr(module, "cpu_linear"):
            identity = torch.eye(module.input_size_per_partition, dtype=module.params_dtype)
            yield f"{name} packed", module.cpu_linear(identity, module.weight, None)


WeightTransferEngineFactory._registry[BACKEND] = lambda: FaultyReceiver
