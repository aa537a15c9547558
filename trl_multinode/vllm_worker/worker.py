"""Code in vLLM's worker processes: it copies buckets out of the staging slots and loads them."""

import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from ..transports.base import SELF_TEST_S, OpenedSlots, call_with_timeout
from ..transports.opening import open_slots
from ..wire.messages import ADAPTER_TENSORS, OpenSlots, Parts
from ..wire.stop_signals import ignore_stop_signals, obey_stop_signals
from .loading import DirectWrites, load_tensors, parts_to_load
from .logprobs import extend_logprobs
from .quiet import quiet_vllm
from .reloading import begin_reload, end_reload
from .seeds import keep_seeds

ADAPTER = 1  # number of the adapter in vLLM


@dataclass
class SlotsInfo(WeightTransferInitInfo):
    """Request to open the slots, in the form in which vLLM hands it to a worker."""

    request: bytes  # `OpenSlots` as msgpack


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Request to load all buckets of an update, in the form in which vLLM hands it to a worker."""

    turn: int  # number of the update on these slots
    version: list[int]  # update, step
    first: int  # first bucket of this update


class BucketReceiver(WeightTransferEngine[SlotsInfo, UpdateInfo]):
    """Weight-transfer engine that loads the buckets of the local main process, from staging slots of any kind.

    Each worker calls it in this order:

    ```python
    receiver.init_transfer_engine(slots)      # open the slots
    receiver.start_weight_update()
    receiver.receive_weights(update)          # follows the sender: copies each bucket out of its slot, and loads it
    receiver.finish_weight_update()           # vLLM packs the weights; an earlier adapter is dropped
    receiver.commit()                         # the new adapter is active; only now is the version committed
    ```

    Tensors of a LoRA adapter (recognized by name) wait for the commit, which builds a `LoRAModel` of them in memory.
    Its number is always the same, because a running completion keeps its adapter's number across updates; vLLM would
    look for the file of another number. An update may consist of adapter tensors only.
    """

    init_info_cls = SlotsInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.committed = [0, 0]
        self._version = [0, 0]
        self._load_us = 0
        self._reloads = False
        self._lacking: str | None = None
        self._adapter: dict[str, torch.Tensor] = {}
        self._parts: dict[str, Parts] | None = None
        self._writes: DirectWrites | None = None  # of the reload under way
        self.slots: OpenedSlots | None = None

    def init_transfer_engine(self, init_info: SlotsInfo) -> None:
        request = msgspec.msgpack.decode(init_info.request, type=OpenSlots)
        workers = self.parallel_config
        self.shutdown()  # close the slots of a transport that failed its self test
        self.slots = open_slots(request, self.device, workers.rank, workers.world_size)
        # once, because after an update that failed the model is still in a reload
        if self._parts is None:
            with set_current_vllm_config(self.vllm_config):
                self._parts = parts_to_load(self.model, request.buckets)

    def start_weight_update(self) -> None: ...

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """
        Load all buckets of an update, each as soon as it is in its slot.

        Raises:
            `UpdateEndedError`: if the sender ends before the last bucket.
            `RuntimeError`: if the GPU has no room for a bucket beside the engine.
        """
        assert self.slots is not None
        try:
            # vLLM 0.26 does not set it; later versions do
            with set_current_vllm_config(self.vllm_config):
                self._version = list(update_info.version)
                self._reloads = update_info.first == 0
                if self._reloads:
                    self._begin_reload()
                seconds = 0.0
                with closing(self.slots.follow(update_info.turn, update_info.first)) as buckets:
                    for tensors in buckets:
                        start = time.perf_counter()
                        self._load(tensors)
                        seconds += time.perf_counter() - start
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"{self.device} has no room for the weights of a sync beside the engine ({error}). Lower "
                "`vllm_gpu_memory_utilization`, or `sync_bucket_mb`: a reload holds up to three buckets, the largest "
                "layer whole, and this worker's part of it once more."
            ) from error
        self._load_us = round(1e6 * (seconds + self.slots.take_s))

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        weights = []
        for name, tensor in tensors:
            if name.endswith(ADAPTER_TENSORS):
                # in host memory, because vLLM copies the active adapter into its own buffers
                self._adapter[name] = tensor.cpu()
            else:
                weights.append((name, tensor))
        if weights:
            assert self._parts is not None
            assert self._writes is not None
            load_tensors(self.model, weights, self._parts, self._writes)

    def finish_weight_update(self) -> None:
        if self._reloads:
            self._end_reload()

    def commit(self) -> list[int]:
        """Commit the update; return its number, its step, the number of the active adapter (0: none), and the
        microseconds that the buckets took.

        Raises:
            `RuntimeError`: if layers did not get all their weights.
        """
        if self._lacking:
            raise RuntimeError(self._lacking)
        self.committed = self._version
        if self._adapter:
            self._activate()
        return [*self.committed, ADAPTER if self._adapter else 0, self._load_us]

    def shutdown(self) -> None:
        if self.slots is not None:
            self.slots.close()
        self.slots = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Override an abstract method of vLLM 0.26, whose trainers send through it; here `weights/sync.py` sends."""
        raise NotImplementedError

    def _begin_reload(self) -> None:
        """Begin an update that replaces all weights and the adapter."""
        self._lacking = None
        self._adapter = {}
        self._writes = begin_reload(self.model, self.device, self._writes)

    def _end_reload(self) -> None:
        with set_current_vllm_config(self.vllm_config):
            assert self._writes is not None
            self._lacking = end_reload(self.model, self.model_config, self._writes)

    def _activate(self) -> None:
        """Build a LoRA adapter from the received tensors and activate it.

        The sender has multiplied the scaling into B, so r = alpha here and vLLM multiplies by 1. The containers are
        new, because vLLM merges q, k, v and similar entries in them; the tensors stay unchanged.
        """
        manager = self.model.lora_manager
        rank = max(
            tensor.shape[0]
            for name, tensor in self._adapter.items()
            if name.endswith(ADAPTER_TENSORS[0])
        )
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER,
            dict(self._adapter),
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=rename_mapper(self.model),
        )
        manager.remove_all_adapters()
        manager.add_adapter(adapter)
        if unknown := sorted(set(adapter.loras) - set(manager.modules)):
            raise RuntimeError(
                f"vLLM has no LoRA for {unknown[0]} in this model: use `lora_sync='merged'`."
            )
        manager.activate_adapter(ADAPTER)


def rename_mapper(model: torch.nn.Module) -> Any:
    """Return the mapper from a checkpoint's module names to vLLM's, with q, k and v separate.

    The method that returns it has another name in vLLM 0.26 and 0.28.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    return (
        mapper.get_rename_mapper()
        if hasattr(mapper, "get_rename_mapper")
        else mapper.get_unstacked_mapper()
    )


class WorkerExtension:
    """Methods that the engine calls in every worker by `collective_rpc`."""

    quiet_vllm = staticmethod(quiet_vllm)
    ignore_stop_signals = staticmethod(ignore_stop_signals)
    obey_stop_signals = staticmethod(obey_stop_signals)

    def extend_logprobs(self) -> str:
        """Extend vLLM's log-probs; return why those over the whole vocabulary are lacking, empty if they are not."""
        return extend_logprobs(self.vllm_config, self.model_runner)  # type: ignore[attr-defined]

    def keep_seeds(self) -> None:
        """Let seeded requests be computed in several parts; see [`keep_seeds`](seeds.py)."""
        keep_seeds(self.model_runner)  # type: ignore[attr-defined]

    def commit_weights(self) -> list[int]:
        """Commit; return `[update, step, adapter, microseconds]` of the update that this worker loaded completely."""
        return self.weight_transfer_engine.commit()  # type: ignore[attr-defined]

    def crc_of_slot(self, slot: int, num_bytes: int) -> int:
        """Return the CRC-32 of a slot's first bytes.

        Raises:
            `TimeoutError`: if they do not arrive; the sender then tries another transport.
        """
        slots = self.weight_transfer_engine.slots  # type: ignore[attr-defined]
        return call_with_timeout(SELF_TEST_S, lambda: slots.crc(slot, num_bytes))
