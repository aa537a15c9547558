"""CUDA-only lines around the slots, with a stand-in for the CUDA runtime; `make gpu` runs them on a real one."""

import gc
import logging
from pathlib import Path

import pytest
import torch
from served import Keeper, serving

from trl_multinode.errors import WeightSyncError
from trl_multinode.transports import host_memory, page_lock
from trl_multinode.transports.base import SlotSettings
from trl_multinode.transports.cuda_ipc import without_expandable_segments
from trl_multinode.transports.host_memory import HostSlots, OpenedHostSlots
from trl_multinode.transports.page_lock import ALREADY_REGISTERED
from trl_multinode.transports.pieces import Pieces
from trl_multinode.weights.buckets import WeightMeta, slot_layout
from trl_multinode.weights.transport import Transport

CUDA = torch.device("cuda")
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered


class Cudart:
    """Keeps what is registered; registration number `fails_at` fails."""

    def __init__(self, fails_at: int | None = None):
        self.registered: list[int] = []
        self._calls, self._fails_at = 0, fails_at

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:
        self._calls += 1
        if self._calls == self._fails_at:
            return OUT_OF_MEMORY
        assert pointer not in self.registered, "CUDA refuses an address that is registered already"
        self.registered.append(pointer)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        self.registered.remove(pointer)
        return 0


@pytest.fixture
def cudart(monkeypatch):
    def install(fails_at: int | None = None, kind: type[Cudart] = Cudart) -> Cudart:
        runtime = kind(fails_at)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(page_lock, "_forget_last_error", lambda: None)
        return runtime

    return install


def test_both_ends_register_their_mapping_and_unregister_it_on_close(cudart):
    runtime = cudart()
    slots = HostSlots([256] * 2, SlotSettings(pin=True))
    opened = OpenedHostSlots(slots.open_for(0), (), CUDA, worker=0)
    slots.signals.opened()
    assert len(runtime.registered) == 4
    opened.close()
    opened.close()
    assert sorted(runtime.registered) == sorted(memory.data_ptr() for memory in slots.memory)
    slots.close()
    slots.close()
    assert not runtime.registered


def test_slots_that_nobody_closed_are_unregistered_before_they_are_unmapped(cudart, monkeypatch):
    runtime, mapped = cudart(), []
    unregister = runtime.cudaHostUnregister

    def seen(pointer: int) -> int:
        ranges = [
            [int(end, 16) for end in line.split()[0].split("-")]
            for line in Path("/proc/self/maps").read_text().splitlines()
        ]
        mapped.append(any(first <= pointer < end for first, end in ranges))
        return unregister(pointer)

    monkeypatch.setattr(runtime, "cudaHostUnregister", seen)
    slots = HostSlots([1 << 20] * 2, SlotSettings(pin=True))
    OpenedHostSlots(slots.open_for(0), (), CUDA, worker=0)
    slots.signals.opened()
    del slots
    gc.collect()
    assert not runtime.registered
    assert mapped == [True] * 4


class Stale(Cudart):
    """The second slot lies where memory is registered that was unmapped; only its own start can be unregistered."""

    stale, at_start = True, True

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:
        return (
            ALREADY_REGISTERED
            if self.registered and self.stale
            else super().cudaHostRegister(pointer, num_bytes, 0)
        )

    def cudaHostUnregister(self, pointer: int) -> int:
        if pointer in self.registered:
            return super().cudaHostUnregister(pointer)
        self.stale = not self.at_start
        return NOT_REGISTERED if self.stale else 0


def test_memory_that_was_unmapped_while_registered_is_unregistered(cudart):
    runtime = cudart(kind=Stale)
    slots = HostSlots([256] * 2, SlotSettings(pin=True))
    assert slots.warning is None and len(runtime.registered) == 2
    slots.close()
    assert not runtime.registered


def test_slots_whose_copies_would_be_lost_are_an_error_and_not_only_slower(cudart, monkeypatch):
    monkeypatch.setattr(Stale, "at_start", False)
    runtime = cudart(kind=Stale)
    with pytest.raises(WeightSyncError, match="CUDA error 712"):
        HostSlots([256] * 2, SlotSettings(pin=True))
    assert not runtime.registered


def test_slots_that_cannot_be_page_locked_are_slower_and_the_user_is_told(cudart, tmp_path):
    runtime = cudart(fails_at=2)
    warnings: list[str] = []
    specs = slot_layout((WeightMeta("w", torch.float32, (2, 3)),))
    with serving(engine := Keeper(), folder=tmp_path) as engines:
        slots = Transport("host", pin=True, report=warnings.append).open(engines, [specs])
        (warning,) = warnings
        assert "CUDA error 2 for 1 MiB" in warning and "ulimit -l" in warning
        assert not runtime.registered, "half a lock has no use"
        slots.write(0, specs, [Pieces.whole(torch.ones(2, 3))])
        assert torch.equal(dict(engine.opened.take(0, specs))["w"], torch.ones(2, 3))
        slots.close()


def test_a_worker_that_cannot_page_lock_says_so_in_its_log(cudart, caplog):
    cudart(fails_at=1)
    slots = HostSlots([256] * 2, SlotSettings())
    with caplog.at_level(logging.WARNING):
        OpenedHostSlots(slots.open_for(0), (), CUDA, worker=0).close()
    slots.close()
    assert "not page-locked" in caplog.text and "CUDA error 2" in caplog.text


def test_no_file_is_left_when_page_locking_raises(tmp_path, monkeypatch):
    def broken():
        raise RuntimeError("no CUDA driver")

    monkeypatch.setattr(torch.cuda, "cudart", broken)
    monkeypatch.setattr(host_memory, "SHARED_MEMORY", tmp_path)
    with pytest.raises(RuntimeError, match="no CUDA driver"):
        HostSlots([256] * 2, SlotSettings(pin=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_for_other_processes_is_no_expandable_segment(name, monkeypatch):
    changes: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", changes.append)
    asked = "max_split_size_mb:64,expandable_segments:True"
    monkeypatch.setenv(name, asked)
    with without_expandable_segments():
        assert changes == ["max_split_size_mb:64,expandable_segments:False"]
    assert changes[1:] == [asked], "a setting that is left out would fall back to its default"
    monkeypatch.delenv(name)
    with without_expandable_segments():
        assert len(changes) == 2
