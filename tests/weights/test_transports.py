"""Staging slots in every memory: what is written arrives; which one is chosen and why; what happens if it fails."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from file_transport import FileSlots, OpenedFileSlots
from refusals import refused
from served import Keeper, digest, serving

from multinode_kit.engines import FAKE, FORKED, SyncDriver, running_engines
from multinode_kit.models import tiny_qwen2
from trl_multinode.errors import EngineDiedError, WeightSyncError
from trl_multinode.run.topology import EngineDevices
from trl_multinode.settings import WEIGHT_TRANSPORTS
from trl_multinode.transports.base import Machine, SlotSettings, call_with_timeout
from trl_multinode.transports.broadcast import Broadcast, BroadcastSlots, OpenedBroadcastSlots
from trl_multinode.transports.host_memory import HostSlots
from trl_multinode.transports.opening import TRANSPORTS
from trl_multinode.transports.pieces import Pieces
from trl_multinode.weights.buckets import WeightMeta, slot_layout
from trl_multinode.weights.transport import Transport, choose, machine_of

CPU = torch.device("cpu")
BUCKET = (WeightMeta("w", torch.bfloat16, (2, 3)), WeightMeta("b", torch.float32, (2,)))


@pytest.fixture(params=["host", "nccl"])
def slots(request, tmp_path):
    """`nccl` on a machine without GPUs is the same code over gloo."""
    made = (
        HostSlots([256] * 2, SlotSettings())
        if request.param == "host"
        else BroadcastSlots([256] * 2, SlotSettings(folder=tmp_path, workers=[1], timeout_s=60.0))
    )
    yield made
    made.close()


def test_a_slot_holds_every_tensor_in_its_own_dtype_and_the_receiver_has_copies(slots):
    weights, bias = torch.randn(2, 3), torch.randn(2)
    opened = slots.opened_as(slots.open_for(0), slots.sizes, CPU, worker=0)
    slots.signals.opened()
    specs = slot_layout(BUCKET)
    for _ in range(2):  # the first broadcast also joins the group
        weights += 1
        slots.write(1, specs, [Pieces.whole(weights), Pieces.whole(bias)])
        with ThreadPoolExecutor(1) as receiver:
            taken = receiver.submit(opened.take, 1, specs)
            slots.transmit(1, 72)
        slots.write(1, specs, [Pieces.whole(torch.zeros(2, 3)), Pieces.whole(torch.zeros(2))])
        got = dict(taken.result())
        assert torch.equal(got["w"], weights.bfloat16()) and torch.equal(got["b"], bias)
        # one copy of the bucket
        assert len({tensor.untyped_storage().data_ptr() for tensor in got.values()}) == 1


def test_a_tensor_of_another_shape_is_never_written(slots):
    assert set(WEIGHT_TRANSPORTS) == {"auto", *TRANSPORTS}
    with pytest.raises(WeightSyncError, match=r"^w .*\(3, 2\).*\(2, 3\)"):
        slots.write(0, slot_layout(BUCKET[:1]), [Pieces.whole(torch.zeros(3, 2))])


# ---- which one


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (Machine(None), "CPU"),
        (Machine("NVIDIA", peer_access=True), "NVIDIA GPUs, peer access"),
        (Machine("NVIDIA"), "NVIDIA GPUs, no peer access"),
        (Machine("AMD", shared=True, peer_access=True), "AMD GPUs"),
    ],
)
def test_auto_takes_what_was_executed_and_says_why(machine, reason):
    kind, why = choose("auto", machine)
    assert kind == "host" and re.search(reason, why)
    assert choose("host", machine)[0] == "host"


@pytest.mark.parametrize(
    ("engines", "shared", "peers"),
    [
        ((("GPU-b",),), False, [(1, 2)]),
        ((("GPU-c",),), True, []),
        ((("GPU-a",), ("GPU-c",)), True, [(0, 2)]),
    ],
)
def test_the_machine_is_read_by_the_place_of_a_gpu_among_the_visible_ones(
    engines, shared, peers, monkeypatch
):
    """Stand-in for a machine with three GPUs, named by UUID; the sender trains on the last one."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda gpu, other: asked.append((gpu, other)) or False
    )
    devices = EngineDevices(engines, shared_with_training=shared, sender="GPU-c")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    machine = machine_of(devices)
    assert (machine.gpu, machine.shared, machine.peer_access) == ("NVIDIA", shared, not peers)
    assert asked == peers


@pytest.mark.parametrize(
    ("wanted", "machine", "identifier"),
    [
        ("ipc", Machine(None), "'host'"),
        ("ipc", Machine("NVIDIA"), "nvidia-smi topo"),
        ("nccl", Machine("NVIDIA", shared=True, peer_access=True), "'ipc'"),
    ],
)
def test_one_that_cannot_work_here_is_refused_with_the_way_out(wanted, machine, identifier):
    with refused("weight_transport", got=wanted) as caught:
        choose(wanted, machine)
    assert identifier in str(caught.value)
    for kind, works in (
        ("nccl", Machine("NVIDIA")),
        ("nccl", Machine(None)),
        ("ipc", Machine("AMD", peer_access=True)),
    ):
        assert choose(kind, works)[0] == kind


def test_workers_of_several_engines_have_ranks_of_their_own(tmp_path):
    slots = BroadcastSlots([64] * 2, SlotSettings(folder=tmp_path, workers=[2, 2], timeout_s=60.0))
    told = [slots.open_for(engine) for engine in range(2)]
    assert told == [Broadcast(slots.message.store, 5, first, 60.0) for first in (1, 3)]


def test_the_group_of_a_broadcast_ends_with_its_slots(tmp_path):
    """Otherwise torch warns at exit that a process group was never destroyed. Its peers may have ended before."""
    slots, ended = (
        BroadcastSlots([16] * 2, SlotSettings(folder=tmp_path, workers=[1], timeout_s=60.0)),
        [],
    )
    slots._group._group = SimpleNamespace(abort=lambda: ended.append("sender") or 1 / 0)
    opened = OpenedBroadcastSlots(slots.open_for(0), slots.sizes, CPU, 0)
    opened._group._group = SimpleNamespace(abort=lambda: ended.append("worker"))
    for _ in range(2):
        slots.close()
        opened.close()
    assert ended == ["sender", "worker"]


@pytest.mark.nightly  # an example of the documentation
def test_a_new_transport_is_one_file_and_its_name(monkeypatch, tmp_path):
    monkeypatch.setitem(TRANSPORTS, "file", FileSlots)
    model = tiny_qwen2()
    with serving(engine := Keeper(), folder=tmp_path / "node") as engines:
        trainer = SyncDriver(
            model, engines, transport=Transport("file", folder=tmp_path, report=pytest.fail)
        )
        for _ in range(2):
            trainer.perturb()
            trainer.send()
            assert trainer.sync.slots.kind == "file" and isinstance(engine.opened, OpenedFileSlots)
            assert digest(engine.tensors) == digest(dict(model.named_parameters()))


# ---- with an engine


@pytest.mark.parametrize(
    "module", [FAKE, pytest.param(FORKED, marks=pytest.mark.engine)], ids=["fake", "vllm"]
)
def test_the_engine_agrees_after_broadcast_syncs_and_disagrees_before(module, tmp_path):
    model = tiny_qwen2(tied=False)
    with running_engines(model, tmp_path, module) as engines:
        transport = Transport("nccl", folder=tmp_path, report=pytest.fail)
        trainer = SyncDriver(model, engines, transport=transport)
        for sync in range(3):
            trainer.perturb()
            if sync:
                assert distance(trainer) > 0.1
            trainer.send()
            assert trainer.sync.slots.kind == "nccl"
            assert distance(trainer) < 1e-3


def distance(trainer) -> float:
    scored = torch.from_numpy(trainer.engines[0].score([5, 6, 7, 290, 299]).logprobs.copy())
    return (scored - trainer.logprobs([5], [6, 7, 290, 299])).abs().max().item()


class Garbling(BroadcastSlots):
    """Loses a byte on the way."""

    def transmit(self, slot: int, num_bytes: int) -> None:
        self.memory[slot][num_bytes // 2] += 1
        super().transmit(slot, num_bytes)


class Silent(BroadcastSlots):
    """Fails before anything is sent: the workers wait for nothing."""

    def transmit(self, slot: int, num_bytes: int) -> None:
        raise RuntimeError("no communicator")


# The worker of `Silent` waits for the whole limit
@pytest.mark.parametrize(
    ("broken", "limit_s", "said"), [(Garbling, 60.0, "checksums"), (Silent, 1.0, "no communicator")]
)
def test_a_failed_self_test_falls_back_to_host_memory_with_a_warning(
    broken, limit_s, said, tmp_path
):
    model = tiny_qwen2()
    warnings: list[str] = []

    class Failing(Transport):
        def _make(self, kind, layouts):
            if kind != "nccl":
                return super()._make(kind, layouts)
            return broken(
                [1 << 20] * 2, SlotSettings(folder=tmp_path, workers=[1], timeout_s=limit_s)
            )

    with running_engines(model, tmp_path, FAKE) as engines:
        trainer = SyncDriver(model, engines, transport=Failing("nccl", report=warnings.append))
        trainer.perturb()
        trainer.send()
        assert trainer.sync.slots.kind == "host" and distance(trainer) < 1e-3
    (warning,) = warnings
    assert said in warning and "host memory" in warning


@pytest.mark.nightly  # a broadcast and a restart
def test_weights_go_through_host_memory_while_an_engine_is_lost_and_are_broadcast_again_when_it_is_back(
    tmp_path,
):
    """The group of a broadcast waits for all its members. The file of a group stays if one of them was killed."""
    model, backends = tiny_qwen2(), [Keeper(), Keeper()]
    with serving(*backends, folder=tmp_path / "node") as engines:
        engines.tolerant = True
        for engine in engines:
            engine.tolerant = True
        transport = Transport(
            "nccl", workers=[1, 1], folder=tmp_path, timeout_s=60.0, report=pytest.fail
        )
        trainer = SyncDriver(model, engines, transport=transport)
        trainer.send()
        assert trainer.sync.slots.kind == "nccl"
        # whose destructor never ran
        of_a_killed_worker = dist.FileStore(str(trainer.sync.slots.message.store), 3)
        engines[1].lose(EngineDiedError("killed"))
        trainer.perturb()
        version = trainer.send()
        assert (
            trainer.sync.slots.kind == "host"
            and holds(backends[0], model)
            and not holds(backends[1], model)
        )
        engines.renew([1])
        trainer.sync.send_again(version, engines.serving([1]))
        assert holds(backends[1], model)
        trainer.perturb()
        trainer.send()
        assert trainer.sync.slots.kind == "nccl" and all(
            holds(backend, model) for backend in backends
        )
        trainer.sync.close()
        del of_a_killed_worker


def holds(backend: Keeper, model: torch.nn.Module) -> bool:
    return digest(backend.tensors) == digest(dict(model.named_parameters()))


def test_a_call_that_hangs_is_left_behind():
    forever = threading.Event()
    with pytest.raises(TimeoutError):
        call_with_timeout(0.05, forever.wait)
    forever.set()
    assert call_with_timeout(60.0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(60.0, lambda: 1 / 0)
