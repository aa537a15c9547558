"""An engine's server in a thread of this process, with a backend that only keeps what it was sent: starts at once."""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from waiting import until

from trl_multinode.engine.node_engines import NodeEngines, local_places
from trl_multinode.engine_process.backend import Backend, CompletionBuffer
from trl_multinode.engine_process.server import EngineServer
from trl_multinode.errors import EngineDiedError
from trl_multinode.transports.opening import open_slots
from trl_multinode.wire.connection import connect
from trl_multinode.wire.messages import EngineSpec, Ready, UpdateWeights, WeightVersion


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Keeper(Backend):
    """Keeps the tensors of the last committed update.

    Args:
        before_load (`Callable[[int, int], None]`):
            Called with update and bucket before a slot is read; may take its time, or raise.
    """

    def __init__(self, before_load: Callable[[int, int], None] = lambda update, bucket: None):
        self._before_load = before_load
        self.tensors: dict[str, torch.Tensor] = {}
        self.loaded: list[tuple[int, int]] = []  # update and bucket

    async def start(self) -> None: ...

    def ready(self) -> Ready:
        return Ready(pid=0, max_model_len=256)

    def tokens_done(self) -> int:
        return 0

    async def generate(self, request, growing):
        raise NotImplementedError

    async def score(self, request):
        return CompletionBuffer()

    async def open_slots(self, request) -> None:
        self.opened = open_slots(request, torch.device("cpu"))

    async def check_slot(self, slot: int, num_bytes: int) -> list[int]:
        return [self.opened.crc(slot, num_bytes)]

    async def begin_update(self, update: UpdateWeights) -> None:
        self._version, self._coming = update.version, {}

    async def load_buckets(self, update: UpdateWeights) -> None:
        await asyncio.to_thread(self._follow, update)

    def _follow(self, update: UpdateWeights) -> None:
        take, bucket = self.opened.take, update.first_bucket

        def take_next(slot, specs):
            self._before_load(update.version.update, bucket)
            return take(slot, specs)

        with mock.patch.object(self.opened, "take", take_next):
            for tensors in self.opened.follow(update.turn, bucket):
                self._coming |= tensors
                self.loaded.append((update.version.update, bucket))
                bucket += 1
        self.load_s = self.opened.take_s

    async def commit_update(self) -> list[WeightVersion]:
        self.tensors |= self._coming
        return [self._version]

    async def stop(self) -> None: ...


@contextmanager
def serving(
    *backends: Backend, folder: Path, stall_timeout_s: float = 60.0
) -> Iterator[NodeEngines]:
    """One rank's connections to an engine per backend."""
    folder.mkdir(exist_ok=True)
    sockets = [folder / f"engine{index}.sock" for index in range(len(backends))]
    threads = []
    for index, (backend, socket) in enumerate(zip(backends, sockets, strict=True)):
        thread = threading.Thread(target=_serve, args=(backend, socket, index), daemon=True)
        thread.start()
        threads.append(thread)
        # one after the other: a server changes the umask while it starts
        _wait_until_listening(socket)
    engines = NodeEngines(
        local_places(sockets, 0, folder), 0, 0, folder / "load", stall_timeout_s, 8
    )
    try:
        yield engines
    finally:
        engines.shutdown(10.0)
        engines.close()
        for thread in threads:
            thread.join(0.2)  # one whose connection broke serves on, and ends with this process


def _wait_until_listening(path: Path) -> None:
    def connects() -> bool:
        try:
            connect(str(path), path.name, path).close()
        except EngineDiedError:
            return False
        return True

    until(connects, f"an engine listens on {path}")


def _serve(backend: Backend, socket: Path, index: int) -> None:
    spec = EngineSpec(index, str(socket.parent), 0, {})
    asyncio.run(EngineServer(spec, backend).serve())
