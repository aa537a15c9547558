"""An engine that copies buckets out of the slots and drops them, to measure the transport alone, without vLLM.

`python -m gpu_kit.holder SPEC.json`
"""

import os

import torch

from trl_multinode.engine_process.backend import Backend
from trl_multinode.engine_process.main import main
from trl_multinode.transports.opening import open_slots
from trl_multinode.wire.messages import BeginUpdate, EngineSpec, OpenSlots, Ready, WeightVersion


class HolderBackend(Backend):
    """Backend that keeps one bucket at a time, on the first GPU that it sees or on the CPU."""

    def __init__(self, spec: EngineSpec):
        self._device = torch.device("cuda:0" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu")

    async def start(self) -> None:
        torch.zeros(1, device=self._device)

    def ready(self) -> Ready:
        return Ready(pid=os.getpid(), max_model_len=1, vllm_version="none")

    def tokens_done(self) -> int:
        return 0

    async def generate(self, request, growing):
        raise NotImplementedError

    async def score(self, request):
        raise NotImplementedError

    async def open_slots(self, request: OpenSlots) -> None:
        self._buckets = request.buckets
        self._slots = open_slots(request, self._device)

    async def check_slot(self, slot: int, num_bytes: int) -> list[int]:
        return [self._slots.crc(slot, num_bytes)]

    async def begin_update(self, update: BeginUpdate) -> None:
        self._version = update.version

    async def load_bucket(self, bucket: int, slot: int) -> None:
        self._taken = self._slots.take(slot, self._buckets[bucket])
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    async def commit_update(self) -> list[WeightVersion]:
        return [self._version]

    async def digests(self) -> list[str]:
        return []

    async def stop(self) -> None:
        self._slots.close()


if __name__ == "__main__":
    main(HolderBackend)
