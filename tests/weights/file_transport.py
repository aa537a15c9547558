"""A transport as one file, for a test: buckets travel through files. It shows all that a new one has to write."""

import itertools
import time
from pathlib import Path

import msgspec
import torch
from waiting import HANG_S

from trl_multinode.transports.base import OpenedSlots, Slots


class FolderOfSlots(msgspec.Struct, frozen=True):
    """The message: where a worker finds the files."""

    path: str


class OpenedFileSlots(OpenedSlots):
    """The worker's end: it waits for the next file and reads it."""

    def __init__(self, memory, sizes, device, worker):
        super().__init__([torch.empty(size, dtype=torch.uint8) for size in sizes], device)
        self._files = (Path(memory.path, f"bucket{number}") for number in itertools.count())

    def arrive(self, data):
        file, deadline = next(self._files), time.monotonic() + HANG_S
        while not file.exists():
            assert time.monotonic() < deadline, f"{file} did not arrive"
            time.sleep(0.001)
        data.copy_(torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8))


class FileSlots(Slots):
    """The sender's end: it writes a file per bucket, and renames it when it is complete."""

    kind = "file"
    memory_type = FolderOfSlots
    opened_as = OpenedFileSlots

    def __init__(self, sizes, settings):
        super().__init__(sizes, settings)
        self.memory = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self._folder, self._numbers = settings.folder, itertools.count()

    def open_for(self, engine):
        return FolderOfSlots(str(self._folder))

    def transmit(self, slot, num_bytes):
        draft = Path(self._folder, "draft")
        draft.write_bytes(self.memory[slot][:num_bytes].numpy().tobytes())
        draft.rename(Path(self._folder, f"bucket{next(self._numbers)}"))
