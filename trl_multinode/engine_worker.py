"""What runs inside vLLM's worker processes: take buckets out of the staging slots and load them."""

from dataclasses import dataclass

import msgspec
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from . import faults
from .process_group import SELF_TEST_S, within
from .protocol import OpenSlots
from .receiving import OpenedSlots


@dataclass
class SlotsInfo(WeightTransferInitInfo):
    request: bytes  # `OpenSlots` as msgpack


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    bucket: int
    slot: int
    version: list[int]  # update, step


class BucketReceiver(WeightTransferEngine[SlotsInfo, BucketInfo]):
    """Loads weights that the local main process wrote into staging slots, wherever those are.

    A usage loop, as vLLM calls it in every worker:

    ```python
    receiver.init_transfer_engine(slots)      # open them
    receiver.start_weight_update()            # the first bucket begins vLLM's layer-wise reload
    for bucket in buckets:
        receiver.receive_weights(bucket)      # *copies out of the slot*, then loads; returning is the acknowledgement
    receiver.finish_weight_update()           # vLLM packs the weights; only now is the version committed
    ```
    """

    init_info_cls = SlotsInfo
    update_info_cls = BucketInfo

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.committed = [0, 0]
        self._version = [0, 0]
        self._next_bucket = 0
        self._skip = False

    def init_transfer_engine(self, init_info: SlotsInfo) -> None:
        request = msgspec.msgpack.decode(init_info.request, type=OpenSlots)
        self._buckets = request.buckets
        worker = self.parallel_config.rank
        self.slots: OpenedSlots | None = OpenedSlots(request.memory, request.slot_bytes, self.device, worker)

    def start_weight_update(self) -> None:
        self._next_bucket = 0

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Raises `RuntimeError` if buckets come out of order: an update is the whole model or nothing."""
        if update_info.bucket != self._next_bucket:
            raise RuntimeError(f"Weight bucket {update_info.bucket} came, bucket {self._next_bucket} was due.")
        if update_info.bucket == 0:
            self._begin(list(update_info.version))
        self._next_bucket += 1
        assert self.slots is not None
        tensors = self.slots.take(update_info.slot, self._buckets[update_info.bucket])
        if not self._skip:
            self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        if self._next_bucket != len(self._buckets):
            raise RuntimeError(f"Only {self._next_bucket} of {len(self._buckets)} weight buckets came.")
        if not self._skip:
            finalize_layerwise_reload(self.model, self.model_config)
            if not faults.is_active("stale_head", self._version[0]):
                self._repack_vocabulary_layers()
        if not faults.is_active("skip_load", self._version[0]):
            self.committed = self._version

    def shutdown(self) -> None:
        self.slots = None

    def _begin(self, version: list[int]) -> None:
        self._version = version
        self._skip = faults.is_active("skip_load", version[0]) or faults.is_active("skip_load_silently", version[0])
        if not self._skip:
            initialize_layerwise_reload(self.model)

    def _repack_vocabulary_layers(self) -> None:
        """On CPU a head tied to the embedding has a packed copy that vLLM's reload does not rebuild (log-probs -5.16
        where the trainer had -6.01). A no-op on GPUs."""
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "quant_method"):
                module.quant_method.process_weights_after_loading(module)


class WorkerExtension:
    """Methods that the engine calls in every worker by `collective_rpc`."""

    def committed_weight_version(self) -> list[int]:
        """`[update, step]` of the last update that this worker loaded to the end."""
        return self.weight_transfer_engine.committed  # type: ignore[attr-defined]

    def crc_of_slot(self, slot: int, num_bytes: int) -> int:
        """Raises `TimeoutError` if the slot's bytes do not arrive, so that the sender can try another transport."""
        slots = self.weight_transfer_engine.slots  # type: ignore[attr-defined]
        return within(SELF_TEST_S, lambda: slots.crc(slot, num_bytes))
