"""An engine that copies buckets out of the slots and drops them, to measure the transport alone, without vLLM.

`python -m gpu_kit.holder SPEC.json`
"""

import asyncio
import os

import torch

from trl_multinode.engine_process.backend import Backend
from trl_multinode.engine_process.main import main
from trl_multinode.transports.opening import open_slots
from trl_multinode.wire.messages import EngineSpec, OpenSlots, Ready, UpdateWeights, WeightVersion


class HolderBackend(Backend):
    """Backend that keeps one bucket at a time, on the first GPU that it sees or on the CPU."""

    def __init__(self, spec: EngineSpec):
        self._device = torch.device("cuda:0" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu")

    async def start(self) -> None:
        torch.zeros(1, device=self._device)

    def ready(self) -> Ready:
        return Ready(pid=0, max_model_len=1)

    def tokens_done(self) -> int:
        return 0

    async def generate(self, request, growing):
        raise NotImplementedError

    async def score(self, request):
        raise NotImplementedError

    async def open_slots(self, request: OpenSlots) -> None:
        self._slots = open_slots(request, self._device)

    async def check_slot(self, slot: int, num_bytes: int) -> list[int]:
        return [self._slots.crc(slot, num_bytes)]

    async def begin_update(self, update: UpdateWeights) -> None:
        self._version = update.version

    async def load_buckets(self, update: UpdateWeights) -> None:
        await asyncio.to_thread(self._follow, update)

    def _follow(self, update: UpdateWeights) -> None:
        for tensors in self._slots.follow(update.turn, update.first_bucket):
            self._taken = tensors
        self.load_s = self._slots.take_s

    async def commit_update(self) -> list[WeightVersion]:
        return [self._version]

    async def stop(self) -> None:
        self._slots.close()


if __name__ == "__main__":
    main(HolderBackend)
