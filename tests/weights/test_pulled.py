"""Weights that an agent pulls: its engines have those of the trainer, whatever happens on the way."""

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from forks import forked, on_gloo_ranks
from ported import POOL, running
from served import Keeper, digest, serving
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from waiting import HANG_S, until

from multinode_kit.models import tiny_qwen2
from multinode_kit.namespaces import Namespaces, enter_node, namespaces_available
from trl_multinode.engine.group import EngineGroup
from trl_multinode.errors import PeerFailureError, WeightSyncError
from trl_multinode.transports.host_memory import HostSlots
from trl_multinode.transports.pieces import Pieces
from trl_multinode.weights import serving as weight_serving
from trl_multinode.weights.buckets import WeightMeta
from trl_multinode.weights.gathering import ShardGather
from trl_multinode.weights.pulling import PulledUpdates
from trl_multinode.weights.serving import WEIGHTS, AskBucket, AskNews, WeightService
from trl_multinode.weights.source import ModuleSource, WeightSource
from trl_multinode.weights.sync import WeightSync
from trl_multinode.weights.transport import Transport
from trl_multinode.wire.connection import with_length
from trl_multinode.wire.handshake import PortAddress, dial
from trl_multinode.wire.messages import WeightVersion
from trl_multinode.wire.port import Port

LIMIT = 40_000  # bytes of a bucket of `tiny_qwen2`; a layer is split over two
FROZEN = 2


class Numbers(WeightSource):
    """Six buckets of one tensor each, full of the number of their update; the first two are frozen."""

    def __init__(self, elements: int = 4096):
        super().__init__()
        self.elements = elements
        self.now = [0.0] * 6

    def metadata(self) -> list[WeightMeta]:
        names = [f"layers.{index}.w" for index in range(len(self.now))]
        return [
            WeightMeta(name, torch.float32, (self.elements,), frozen=index < FROZEN)
            for index, name in enumerate(names)
        ]

    def check(self, weights, step, frozen) -> None: ...

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            meta.name: torch.full(meta.shape, value)
            for meta, value in zip(self.metadata(), self.now, strict=True)
        }

    @contextmanager
    def gathering(self, bucket, holder=0) -> Iterator:
        tensors = self.tensors()
        yield lambda: [Pieces.whole(tensors[meta.name]) for meta in bucket]

    def move_to(self, update: int, everything: bool = False) -> None:
        first = 0 if everything or update == 1 else FROZEN
        self.now[first:] = [float(update)] * (len(self.now) - first)


class Trainer:
    """Local main process of a training node without engines, and its port."""

    def __init__(self, source: WeightSource, limit_bytes: int, node: int, transport=None):
        self.source, self.node = source, node
        transport = transport or Transport(staged=True)
        self.sync = WeightSync(source, EngineGroup(), limit_bytes, transport)
        self.service = WeightService(lambda: self.sync)

    @contextmanager
    def serving(
        self, host: str = "127.0.0.1", report: Callable[[str], None] = pytest.fail
    ) -> Iterator[PortAddress]:
        port = Port(host, self.node, POOL, {WEIGHTS: self.service.serve}, report)
        with running(port.serve()):
            yield port.address

    def send(self, update: int) -> None:
        self.sync.run(WeightVersion(update, 10 * update))


@contextmanager
def numbered(count: int = 2, elements: int = 4096) -> Iterator[list[Trainer]]:
    trainers = [Trainer(Numbers(elements), 4 * elements, node) for node in range(count)]
    yield trainers
    for trainer in trainers:
        trainer.sync.close()


def send(trainers: Sequence[Trainer], update: int, everything: bool = False) -> str:
    """Send an update on all nodes, and return the digest of what they have sent by now."""
    for trainer in trainers:
        trainer.source.move_to(update, everything)
        if everything:
            trainer.sync.send_everything()
        trainer.send(update)
    return digest(trainers[0].source.tensors())


@pytest.fixture
def trainers() -> Iterator[list[Trainer]]:
    with numbered() as made:
        yield made


@pytest.fixture
def addresses(trainers) -> Iterator[list[PortAddress]]:
    with on_ports(trainers) as found:
        yield found


@contextmanager
def on_ports(trainers: Sequence[Trainer]) -> Iterator[list[PortAddress]]:
    with ExitStack() as stack:
        yield [stack.enter_context(trainer.serving()) for trainer in trainers]


@contextmanager
def agent(
    addresses: Sequence[PortAddress],
    folder: Path,
    *engines: Keeper,
    limit_s: float = 60.0,
    report: Callable[[str], None] = pytest.fail,
) -> Iterator[PulledUpdates]:
    with serving(*engines, folder=folder) as clients:
        transport = Transport(folder=folder)
        with closing(
            PulledUpdates(clients, transport, addresses, POOL, report, limit_s)
        ) as updates:
            yield updates


def version(update: int) -> WeightVersion:
    return WeightVersion(update, 10 * update)


@pytest.fixture
def asked(monkeypatch) -> list[tuple[int, int]]:
    """Bucket and update of each request to any node."""
    found: list[tuple[int, int]] = []
    send_bucket = WeightService._send_bucket

    async def recorded(service, stream, request) -> None:
        found.append((request.bucket, request.update))
        await send_bucket(service, stream, request)

    monkeypatch.setattr(WeightService, "_send_bucket", recorded)
    return found


@pytest.fixture
def on_the_way(monkeypatch) -> Iterator[list]:
    """Functions that get the stream and the bytes of a bucket, one for each bucket that is sent from now on."""
    waiting: list = []
    send_in_thread = weight_serving._send_in_thread

    async def sent(stream: socket.socket, data: memoryview) -> None:
        replace = waiting.pop(0) if waiting else None
        await (send_in_thread if replace is None else replace)(stream, data)

    monkeypatch.setattr(weight_serving, "_send_in_thread", sent)
    return waiting


# ---- the marks ------------------------------------------------------------------------------------------------------


def test_a_slot_is_marked_while_it_is_written_and_an_update_once_it_is_whole(monkeypatch):
    marks, write = [], HostSlots.write

    def failing_write(slots: HostSlots, slot: int, *rest) -> None:
        marks.append(slots.marks.tolist())
        if len(marks) == 6 + 3:
            raise WeightSyncError("no room")
        write(slots, slot, *rest)

    monkeypatch.setattr(HostSlots, "write", failing_write)
    with numbered(1) as trainers:
        send(trainers, 1)
        with pytest.raises(WeightSyncError):
            send(trainers, 2)
        slots = trainers[0].sync.slots
        assert marks[:6] == [[1] * k + [0] * (6 - k) + [0, 0] for k in range(6)]
        whole = [1, 10]
        second = [[1, 1] + [2] * k + [0] + [1] * (3 - k) + whole for k in range(3)]
        assert marks[6:] == second and slots.marks.tolist() == second[-1]
        # a worker maps the slots alone
        assert slots.open_for(0).ends[-1] == 6 * 4 * 4096


def test_without_a_slot_for_each_bucket_no_agent_sees_an_update():
    trainer = Trainer(Numbers(), 4 * 4096, 0, Transport())
    trainer.send(1)
    assert not trainer.sync.slots.marks.any() and trainer.service._news(0) is None
    trainer.sync.close()


# ---- what arrives ---------------------------------------------------------------------------------------------------


def test_each_update_of_uneven_ranks_is_in_the_agents_engine_bit_by_bit(tmp_path):
    """Two ranks of node 0 take turns, node 1 has one; the agent is in the rank that has no port."""
    main_ranks, updates = (0, 2), 5

    def body(rank: int) -> tuple[list[bool], int]:
        gather = ShardGather(torch.device("cpu"), [2, 1])
        model = tiny_qwen2()
        source = ModuleSource(model, torch.bfloat16, gather)
        fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
        trainer = Trainer(source, LIMIT, rank // 2)
        sync = trainer.sync
        if gather.is_local_main:
            sync._transport.reserve(sync.layouts)
        else:
            sync._engines = None
        place = gather.meet(*sync._transport.reserved_at)
        assert gather.is_local_main or sync.join(place)
        with ExitStack() as stack:
            own = stack.enter_context(trainer.serving()) if rank in main_ranks else None
            addresses = [None] * 3
            dist.all_gather_object(addresses, own)
            keeper, pulls = Keeper(), None
            if rank == 1:
                ports = [addresses[main] for main in main_ranks]
                pulls = stack.enter_context(agent(ports, tmp_path / "agent", keeper))
            equal = []
            for update in range(1, updates + 1):
                train(model, seed=3 * update + rank)
                sync.run(version(update))
                expected = [None] * 3
                dist.all_gather_object(expected, gathered(source))
                if pulls is not None:
                    arrived = pulls.pull(HANG_S) == version(update)
                    equal.append(arrived and digest(keeper.tensors) == expected[0] == expected[2])
                dist.barrier()
            sync.close()
        return equal, len(sync.buckets)

    found = on_gloo_ranks(body, 3, tmp_path)
    assert [equal for equal, _ in found] == [[], [True] * updates, []]
    assert found[0][1] > 4


@torch.no_grad()
def train(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        local = parameter.to_local()
        local.add_(torch.randn(local.shape, generator=generator))


def gathered(source: ModuleSource) -> str:
    """Return the digest of what a sync would send now. A collective; only local main processes have all of it."""
    metadata = tuple(source.metadata())
    with source.gathering(metadata) as finish:
        pieces = finish()
        if not source.gather.is_local_main:
            return ""
        pairs = zip(metadata, pieces, strict=True)
        return digest({meta.name: one.copy().to(meta.dtype) for meta, one in pairs})


def test_every_agent_pulls_each_bucket_that_changed_once(trainers, addresses, asked, tmp_path):
    """Frozen ones with the first update, and if the nodes send everything; a late agent has the present update."""
    engines = [Keeper() for _ in range(3)]
    every = list(range(6))
    with agent(addresses, tmp_path / "first", *engines[:2]) as first:
        assert first.pull(0.0) is None and asked == []
        for update, buckets in ((1, every), (2, every[FROZEN:]), (3, every), (4, every[2:])):
            sent = send(trainers, update, everything=update == 3)
            assert first.pull(HANG_S) == first.version == version(update)
            assert first.pull(0.0) is None
            assert {digest(one.tensors) for one in engines[:2]} == {sent}
            assert sorted(bucket for bucket, _ in asked) == buckets
            asked.clear()
        with agent(addresses, tmp_path / "second", engines[2]) as second:
            assert second.pull(0.0) == version(4)
            assert sorted(asked) == [(0, 3), (1, 3)] + [(bucket, 4) for bucket in every[2:]]
            sent = send(trainers, 5)
            assert first.pull(HANG_S) == second.pull(HANG_S) == version(5)
            assert {digest(one.tensors) for one in engines} == {sent}


def test_agents_share_the_checksums_of_a_node_and_each_bucket_has_one_node(
    trainers, addresses, asked, tmp_path, monkeypatch
):
    sums, crc32 = [], weight_serving.zlib.crc32

    def counted(data, *before: int) -> int:
        # an agent computes them piece by piece
        sums.extend(["node"] * (not before))
        return crc32(data, *before)

    monkeypatch.setattr(weight_serving.zlib, "crc32", counted)
    with (
        agent(addresses, tmp_path / "first", Keeper()) as first,
        agent(addresses, tmp_path / "second", Keeper()) as second,
    ):
        for update in (1, 2):
            send(trainers, update)
            assert first.pull(HANG_S) == second.pull(HANG_S)
    assert (len(asked), len(sums)) == (2 * (6 + 4), 6 + 4)
    assert [sorted(trainer.service._crcs) for trainer in trainers] == [[0, 2, 4], [1, 3, 5]]


# ---- updates that come meanwhile ------------------------------------------------------------------------------------


@pytest.mark.fault("agent_pull")
@pytest.mark.parametrize("whole_before", [0, 3])
def test_an_update_that_overwrites_a_bucket_under_way_is_the_one_that_is_loaded(
    whole_before, trainers, addresses, on_the_way, asked, tmp_path
):
    """Half of a bucket's bytes are those of update 2, and half those of update 3."""
    sent = []

    async def overwritten(stream: socket.socket, data: memoryview) -> None:
        loop, half = asyncio.get_running_loop(), len(data) // 2
        await loop.sock_sendall(stream, data[:half])
        await asyncio.to_thread(lambda: sent.append(send(trainers, 3)))
        await loop.sock_sendall(stream, data[half:])

    engine = Keeper()
    with (
        agent(addresses, tmp_path, engine) as updates,
    ):
        send(trainers, 1)
        updates.pull(HANG_S)
        send(trainers, 2)
        asked.clear()
        on_the_way += [None] * whole_before + [overwritten]
        assert updates.pull(HANG_S) == version(3)
        assert [digest(engine.tensors)] == sent
    # an engine gets no part of an update that is not whole
    assert {update for update, _ in engine.loaded} == {1, 3}
    assert sorted(bucket for bucket, update in asked if update == 3) == [2, 3, 4, 5]


def test_a_checksum_of_bytes_that_a_rank_overwrote_is_no_checksum(
    on_the_way, tmp_path, monkeypatch
):
    """Bytes and checksum of the last bucket are those of update 3: only the mark shows that it is not update 2."""
    over, sent, make_crc = threading.Event(), [], WeightService._crc
    engine = Keeper()

    async def overwritten(stream: socket.socket, data: memoryview) -> None:
        await asyncio.to_thread(lambda: sent.append(send(trainers, 3)))
        over.set()
        await asyncio.get_running_loop().sock_sendall(stream, data)

    def late_crc(service, request, data) -> asyncio.Future:
        def computed() -> int:
            assert over.wait(HANG_S)
            return weight_serving.zlib.crc32(data)

        if (request.bucket, request.update) != (5, 2):
            return make_crc(service, request, data)
        return asyncio.get_running_loop().run_in_executor(None, computed)

    monkeypatch.setattr(WeightService, "_crc", late_crc)
    with (
        numbered(1) as trainers,
        on_ports(trainers) as addresses,
        agent(addresses, tmp_path, engine) as updates,
    ):
        send(trainers, 1)
        updates.pull(HANG_S)
        send(trainers, 2)
        on_the_way += [None, None, None, overwritten]
        assert updates.pull(HANG_S) == version(3) and [digest(engine.tensors)] == sent


def test_a_node_that_has_not_written_a_bucket_yet_is_waited_for(
    trainers, addresses, tmp_path, monkeypatch
):
    looks = []
    filled = WeightService._filled

    def look(service, request):
        found = filled(service, request)
        looks.append((service, found is None))
        return found

    monkeypatch.setattr(WeightService, "_filled", look)
    engine, found = Keeper(), []
    with agent(addresses, tmp_path, engine) as updates:
        send(trainers[:1], 1)
        thread = threading.Thread(target=lambda: found.append(updates.pull(HANG_S)))
        thread.start()
        until(lambda: (trainers[1].service, True) in looks)
        assert not found and engine.loaded == []
        sent = send(trainers[1:], 1)
        thread.join(HANG_S)
    assert found == [version(1)] and digest(engine.tensors) == sent


def test_pulls_that_are_always_overtaken_are_reported(on_the_way, tmp_path):
    lines: list[str] = []

    def overtaken_by(update: int):
        async def overtaken(stream: socket.socket, data: memoryview) -> None:
            await asyncio.to_thread(send, trainers, update)
            await asyncio.get_running_loop().sock_sendall(stream, data)

        return overtaken

    def pulled_at(update: int) -> None:
        assert updates.pull(HANG_S) == version(update)

    engine = Keeper()
    with (
        numbered(1) as trainers,
        on_ports(trainers) as addresses,
        agent(addresses, tmp_path, engine, report=lines.append) as updates,
    ):
        send(trainers, 1)
        on_the_way += [overtaken_by(update) for update in (2, 3)]
        pulled_at(3)
        assert lines == []
        send(trainers, 4)
        on_the_way += [overtaken_by(update) for update in (5, 6, 7)]
        pulled_at(7)
    assert len(lines) == 1 and "gradient_accumulation_steps" in lines[0]
    assert {update for update, _ in engine.loaded} == {3, 7}


# ---- faults ---------------------------------------------------------------------------------------------------------


async def flipped(stream: socket.socket, data: memoryview) -> None:
    wrong = bytearray(data)
    wrong[len(wrong) // 3] ^= 1
    await asyncio.get_running_loop().sock_sendall(stream, wrong)


@pytest.mark.fault("agent_pull")
def test_a_flipped_bit_is_pulled_again(trainers, addresses, on_the_way, asked, tmp_path):
    engine = Keeper()
    with (
        agent(addresses, tmp_path, engine) as updates,
    ):
        sent = send(trainers, 1)
        on_the_way += [None, flipped, None, flipped]
        assert updates.pull(HANG_S) == version(1)
    assert digest(engine.tensors) == sent and len(asked) == 6 + 2


def test_a_node_whose_bytes_are_always_wrong_is_named(on_the_way, asked, tmp_path):
    engine = Keeper()
    with (
        numbered(1) as trainers,
        on_ports(trainers) as addresses,
        agent(addresses, tmp_path, engine) as updates,
    ):
        send(trainers, 1)
        on_the_way += [flipped] * 3
        with pytest.raises(WeightSyncError, match="node 0"):
            updates.pull(HANG_S)
    assert asked == [(0, 1)] * 3 and engine.loaded == []


@pytest.mark.fault("agent_pull")
def test_a_node_that_is_silent_in_a_bucket_is_named(on_the_way, tmp_path):
    async def half(stream: socket.socket, data: memoryview) -> None:
        await asyncio.get_running_loop().sock_sendall(stream, data[: len(data) // 2])
        await asyncio.sleep(HANG_S)

    engine = Keeper()
    with (
        numbered(1) as trainers,
        on_ports(trainers) as addresses,
        agent(addresses, tmp_path, engine, limit_s=0.5) as updates,
    ):
        send(trainers, 1)
        on_the_way += [None, half]
        with pytest.raises(PeerFailureError, match="node 0"):
            updates.pull(HANG_S)
    assert engine.loaded == []


@pytest.mark.fault("agent_pull")
def test_a_node_that_dies_in_a_bucket_is_named(on_the_way, tmp_path):
    def node(number: int) -> None:
        async def die(stream: socket.socket, data: memoryview) -> None:
            await asyncio.get_running_loop().sock_sendall(stream, data[: len(data) // 2])
            os._exit(9)

        trainer = Trainer(Numbers(), 4 * 4096, number)
        if number == 1:
            on_the_way.extend([None, die])
        with trainer.serving(report=print) as address:
            send([trainer], 1)
            print("PORT", address.port, flush=True)
            threading.Event().wait(HANG_S)

    engine = Keeper()
    with forked(node, 2, tmp_path) as nodes:
        for one in nodes:
            one.wait_for("PORT")
        ports = [int(one.text.partition("PORT ")[2]) for one in nodes]
        addresses = [PortAddress(number, "127.0.0.1", port) for number, port in enumerate(ports)]
        with (
            agent(addresses, tmp_path / "agent", engine) as updates,
            pytest.raises(PeerFailureError, match="node 1"),
        ):
            updates.pull(HANG_S)
        assert nodes[1].wait() == 9 and engine.loaded == []


def test_a_node_that_cannot_be_reached_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nowhere = PortAddress(1, *listener.getsockname())
    with (
        numbered(1) as trainers,
        on_ports(trainers) as addresses,
        pytest.raises(PeerFailureError, match="node 1"),
        agent([*addresses, nowhere], tmp_path, Keeper()),
    ):
        pass


def test_a_node_without_a_model_has_no_news(trainers, addresses, tmp_path):
    """An agent that comes before the model is there opens its slots with the first update."""
    engine = Keeper()
    syncs = [trainer.sync for trainer in trainers]
    for trainer in trainers:
        trainer.sync = None
    with agent(addresses, tmp_path, engine) as updates:
        assert updates.pull(0.0) is None and updates.slots is None
        for trainer, sync in zip(trainers, syncs, strict=True):
            trainer.sync = sync
        assert updates.pull(0.0) is None and updates.slots is None
        sent = send(trainers, 1)
        assert updates.pull(HANG_S) == version(1) and digest(engine.tensors) == sent


@pytest.fixture
def ends(monkeypatch) -> list[BaseException]:
    """Errors with which the services end their connections."""
    found: list[BaseException] = []
    serve = WeightService.serve

    async def recorded(service, stream) -> None:
        try:
            await serve(service, stream)
        except BaseException as error:
            found.append(error)
            raise

    monkeypatch.setattr(WeightService, "serve", recorded)
    return found


def asking(address: PortAddress, request: object) -> socket.socket:
    stream = dial(address, POOL, WEIGHTS, HANG_S)
    stream.sendall(with_length(msgspec.msgpack.encode(request)))
    return stream


@pytest.mark.parametrize("request_", [AskNews(0, HANG_S), AskBucket(0, 1)])
def test_an_agent_that_leaves_while_it_waits_is_forgotten(request_, ends):
    with numbered(1) as trainers, on_ports(trainers) as (address,):
        asking(address, request_).close()
        until(lambda: ends)
        assert isinstance(ends[0], EOFError | OSError)


def test_a_frozen_agent_holds_no_thread_of_a_node_for_ever(ends, monkeypatch):
    """The bucket is larger than all buffers on the way."""
    monkeypatch.setattr(weight_serving, "PEER_S", 1.0)
    with numbered(1, elements=8 << 20) as (trainer,), on_ports([trainer]) as (address,):
        trainer.sync.run(version(1))
        with asking(address, AskBucket(0, 1)):
            until(lambda: ends)
            assert isinstance(ends[0], OSError)


def test_a_port_that_closes_ends_a_send_under_way(ends):
    with numbered(1, elements=8 << 20) as (trainer,):
        trainer.sync.run(version(1))
        with trainer.serving() as address:
            stream = asking(address, AskBucket(0, 1))
            until(lambda: [t for t in threading.enumerate() if t.name.startswith("asyncio")])
        with stream:
            assert isinstance(ends[0], asyncio.CancelledError)
            until(lambda: not [t for t in threading.enumerate() if t.name.startswith("asyncio")])


@pytest.mark.parametrize("request_", [{"type": "Shutdown"}, AskBucket(99, 1)])
def test_another_request_closes_the_connection_with_a_line(request_):
    lines: list[str] = []
    with numbered(1) as (trainer,), trainer.serving(report=lines.append) as address:
        trainer.sync.run(version(1))
        with asking(address, request_) as stream:
            stream.settimeout(HANG_S)
            assert stream.recv(1) == b"" and len(lines) == 1


# ---- on other hosts -------------------------------------------------------------------------------------------------

MBIT_PER_S = 200
ELEMENTS = 1 << 20  # of a bucket, float32


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    if reason := namespaces_available():
        pytest.skip(reason)
    made = Namespaces(f"tmn-{secrets.token_hex(3)}", 4)
    yield made
    made.close()


@pytest.mark.real
def test_two_agents_on_other_hosts_pull_a_model_once_each_half_from_each_node(hosts, tmp_path):
    """Every link carries the bytes of the model once, although all are slow."""
    (temporary := tmp_path / "tmp").mkdir()
    hosts.limit_links(MBIT_PER_S)

    def happened(name: str) -> None:
        until((tmp_path / name).exists, name)

    def node(number: int) -> None:
        trainer = Trainer(Numbers(ELEMENTS), 4 * ELEMENTS, number)
        with trainer.serving(host=hosts.address(number)) as address:
            print("PORT", address.port, flush=True)
            for update in (1, 2):
                happened(f"send{update}")
                send([trainer], update)
                print(f"SENT{update}", flush=True)
            happened("over")

    def pulls() -> list[list]:
        addresses = []
        for number in range(2):
            happened(f"port{number}")
            port = int((tmp_path / f"port{number}").read_text())
            addresses.append(PortAddress(number, hosts.address(number), port))
        found, engine = [], Keeper()
        with agent(addresses, temporary, engine) as updates:
            for update in (1, 2):
                print(f"READY{update}", flush=True)
                happened(f"pull{update}")
                assert updates.pull(HANG_S) == version(update)
                print(f"PULLED{update}", flush=True)
                timings = updates.timings
                found.append([digest(engine.tensors), timings.num_bytes, timings.gather_s])
        return found

    def host(rank: int) -> list | None:
        enter_node(hosts.namespace(rank), hosts.mounts(rank, temporary))
        return node(rank) if rank < 2 else pulls()

    def link_bytes() -> list[int]:
        return [hosts.link_bytes(number) for number in range(4)]

    source, expected, links = Numbers(ELEMENTS), [], []
    with forked(host, 4, tmp_path) as ranks:
        nodes, agents = ranks[:2], ranks[2:]
        for number, rank in enumerate(nodes):
            rank.wait_for("PORT")
            (tmp_path / "new").write_text(rank.text.partition("PORT ")[2].split()[0])
            (tmp_path / "new").rename(tmp_path / f"port{number}")
        for update in (1, 2):
            for rank in agents:
                rank.wait_for(f"READY{update}")
            (tmp_path / f"send{update}").touch()
            for rank in nodes:
                rank.wait_for(f"SENT{update}")
            before = link_bytes()
            (tmp_path / f"pull{update}").touch()
            for rank in agents:
                rank.wait_for(f"PULLED{update}")
            links.append([new - old for new, old in zip(link_bytes(), before, strict=True)])
            source.move_to(update)
            expected.append(digest(source.tensors()))
        (tmp_path / "over").touch()
        for rank in agents:
            found = rank.result
            assert [sent for sent, *_ in found] == expected
            for (_, num_bytes, seconds), passed in zip(found, links, strict=True):
                at_best_s = 8e-6 * num_bytes / MBIT_PER_S
                print(f"{num_bytes} bytes in {seconds:.2f} s, {seconds / at_best_s:.3f} x the link")
                assert all(num_bytes <= one <= 1.02 * num_bytes for one in passed), passed
