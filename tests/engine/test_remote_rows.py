"""Rows through the port of another node are those of the unix socket, and nothing but rows gets through."""

import asyncio
import multiprocessing
import os
import random
import secrets
import signal
import socket
import subprocess
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from forks import forked
from listening import listeners
from ported import NODE, POOL, impostor, open_port, read
from served import Keeper, serving
from waiting import HANG_S, until

from multinode_kit.engines import FAKE, SyncDriver, running_engines, sockets_of
from multinode_kit.faults import Faults
from multinode_kit.models import tiny_qwen2
from multinode_kit.namespaces import Namespaces, enter_node, namespaces_available
from trl_multinode.engine.client import EngineClient
from trl_multinode.engine.node_engines import EnginePlace, NodeEngines, local_places
from trl_multinode.engine.remote_rows import connect_rows, row_services
from trl_multinode.engine.stream import Request
from trl_multinode.engine_process import server
from trl_multinode.engine_process.backend import CompletionBuffer
from trl_multinode.errors import (
    ConfigurationError,
    EngineDiedError,
    EngineRefusedError,
    EngineStalledError,
)
from trl_multinode.run.addresses import route_to
from trl_multinode.wire import handshake, messages, port, sockets
from trl_multinode.wire.connection import LENGTH, MAX_FRAME_BYTES, frame, with_length
from trl_multinode.wire.messages import (
    Await,
    CheckSlot,
    CloseSession,
    Completions,
    Drain,
    Generate,
    Hello,
    OpenSession,
    OpenSlots,
    Peek,
    Ready,
    RowRequest,
    Score,
    Shutdown,
    UpdateWeights,
    WeightVersion,
    pack_ids,
)

LOG = Path("logs/node3/engine0.log")
NAME = f"engine 0 of node {NODE}, from node 1"
SAMPLING = {"temperature": 1.0, "ignore_eos": True}


class RemoteEngines(NodeEngines):
    """A rank of node 1 on the engines of node 3."""

    def __init__(self, address, local: NodeEngines, load: Path, rank: int = 5, **settings):
        places = [
            EnginePlace(NODE, index, partial(connect_rows, address, index, 1, POOL, LOG))
            for index in range(len(local))
        ]
        super().__init__(places, 1, rank, load, 60.0, 64, **settings)
        for client in self:
            client._sent = local._sent


# ---- on the fake engine


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """Two engines that need 2 ms for a token, and the port of their node."""
    folder, model = tmp_path_factory.mktemp("node"), tiny_qwen2()
    engine = Faults().slow_tokens(0.002).engine(FAKE)
    with running_engines(model, folder, engine, num_engines=2) as engines:
        driver = SyncDriver(model, engines)
        driver.send()
        with open_port(row_services(sockets_of(engines))) as address:
            yield SimpleNamespace(
                driver=driver,
                local=engines,
                address=address,
                folder=folder,
                sockets=sockets_of(engines),
            )


@pytest.fixture
def remote(node, tmp_path):
    with closing(RemoteEngines(node.address, node.local, tmp_path / "load")) as engines:
        yield engines


def requests(count: int = 6, first: int = 5) -> list[Request]:
    return [Request([first, 6, 7 + row], 2, seed=100 * row) for row in range(count)]


def shown(groups) -> list:
    """All that a rank gets of its rows, but the engine, which is that of the moment."""
    return [
        (row.tokens.tolist(), row.logprobs.tobytes(), row.versions)
        for rows in groups
        for row in rows
    ]


def generated(engines: NodeEngines, wanted: list[Request], num_tokens: int = 12) -> list:
    return shown(engines.generate(wanted, num_tokens, SAMPLING, 1))


def test_rows_scores_and_versions_are_those_of_the_unix_socket(node, remote):
    for _ in range(2):
        assert generated(remote, requests()) == generated(node.local, requests())
        ids = [5, 6, 7, 100, 200]
        for near, far in zip(node.local, remote, strict=True):
            assert shown([[near.score(ids, 0.7)]]) == shown([[far.score(ids, 0.7)]])
            done = far.ask(Await(min_update=node.driver.version.update))
            assert done.version == node.driver.version
            assert msgspec.structs.replace(far.ready, request_id=0) == msgspec.structs.replace(
                near.ready, request_id=0
            )
        node.driver.perturb()
        node.driver.send()


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [([5] * 400, SAMPLING), ([5, 6], SAMPLING | {"no_such_setting": 1})],
    ids=["prompt", "sampling"],
)
def test_a_refusal_is_that_of_the_unix_socket(node, remote, prompt, sampling):
    texts = []
    for engines in (node.local, remote):
        with pytest.raises(EngineRefusedError) as found:
            engines.generate([Request(prompt, 1, seed=1)], 4, sampling, 1)
        texts.append(str(found.value))
    assert NAME.partition(" ")[2].partition(" ")[2] in texts[1]
    assert (
        texts[0].partition("Log:")[0].split(": ")[-1]
        == (texts[1].partition("Log:")[0].split(": ")[-1])
    )
    assert generated(remote, requests(1)) == generated(node.local, requests(1))


def test_ranks_of_two_nodes_at_once_get_their_own_rows(node, tmp_path):
    expected = [generated(node.local, requests(5, first)) for first in range(5, 11)]
    near, far = sockets_of(node.local), node.address

    def rank(number: int) -> list:
        load = tmp_path / f"load{number % 2}"
        if number % 2:
            engines = RemoteEngines(far, node.local, load, number)
        else:
            engines = NodeEngines(local_places(near, 0, LOG.parent), 0, number, load, 60.0, 64)
        with closing(engines):
            return [generated(engines, requests(5, 5 + number)) for _ in range(3)]

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(rank, range(6))) == [[rows] * 3 for rows in expected]


def test_rows_under_way_are_read_while_they_run(node, remote):
    stream = remote.open_stream(100, SAMPLING)
    wanted = [Request([5, 6, 7 + row], 1, seed=row, min_update=1) for row in range(4)]
    stream.add(wanted)
    ended, begun = {}, {}
    while not begun:
        peeking = stream.peek()
        while not peeking.complete.is_set():
            ended |= {request: row.tokens.tolist() for request, (row,) in stream.poll()}
        begun = {request: row.tokens.tolist() for request, row in peeking.rows}
        assert len(ended) < len(wanted)
    while stream.rows_left:
        ended |= {request: row.tokens.tolist() for request, (row,) in stream.poll()}
    stream.close()
    remote._stream = None
    (near,) = zip(*node.local.generate(wanted, 100, SAMPLING, 1), strict=True)
    assert [ended[request] for request in wanted] == [row.tokens.tolist() for row in near]
    assert all(ended[request][: len(tokens)] == tokens for request, tokens in begun.items())
    assert any(len(tokens) < 100 for tokens in begun.values())


def test_rows_of_an_engine_that_ends_are_generated_on_another_one(tmp_path):
    engine = Faults().slow_tokens(0.005).engine(FAKE)
    model = tiny_qwen2()
    with running_engines(model, tmp_path, engine, num_engines=2) as local:
        SyncDriver(model, local).send()
        expected = generated(local, requests(4), 60)
        with (
            open_port(row_services(sockets_of(local))) as address,
            closing(RemoteEngines(address, local, tmp_path / "far", tolerant=True)) as remote,
            closing(RemoteEngines(address, local, tmp_path / "alone")) as strict,
        ):
            with ThreadPoolExecutor(1) as pool:
                rows = pool.submit(generated, remote, requests(4), 60)
                until(lambda: remote.rows_left and remote._stream.rows_under_way)
                os.kill(local[0].ready.pid, signal.SIGKILL)
                assert rows.result(HANG_S) == expected
            assert isinstance(remote[0].lost, EngineDiedError) and remote[1].lost is None
            with pytest.raises(EngineDiedError, match=NAME):
                strict[0].score([5, 6, 7])
            with pytest.raises(EngineDiedError, match=NAME):  # as of an engine that has ended
                RemoteEngines(address, local, tmp_path / "again")
        for client in local[:1]:
            client.lose(EngineDiedError("killed by this test"))


# ---- on the engine's server with rows that this process makes


class Rows(Keeper):
    """Backend whose rows have as many tokens as the settings name, or run until their request is cancelled."""

    def __init__(self, pid: int = 0):
        super().__init__()
        self.pid = pid
        self.seen: list[messages.Message] = []  # all requests of all connections
        self.begun = self.cancelled = 0

    def ready(self) -> Ready:
        return msgspec.structs.replace(super().ready(), pid=self.pid, slots=8)

    def tokens_done(self) -> int:
        return -1  # no reports of progress between the replies

    async def generate(self, request, growing):
        self.begun += 1
        try:
            while request.sampling.get("endless"):
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        count = request.sampling["tokens"]
        growing.rows = [CompletionBuffer(np.arange(count), np.zeros(count))]


@pytest.fixture
def backend(monkeypatch):
    """An engine with weights, whose `seen` has what came through its socket."""
    backend = Rows()

    class Gate(server.WeightGate):
        def __init__(self):
            super().__init__()
            self.version, self.attempted = WeightVersion(1, 10), 1

    def keeping(read_next):
        async def read_and_keep(*args):
            request = None  # as at the end of the connection
            try:
                request = await read_next(*args)
                return request
            finally:
                backend.seen.append(request)

        return read_and_keep

    monkeypatch.setattr(server, "WeightGate", Gate)
    for name in ("read_hello", "read_request"):
        monkeypatch.setattr(server, name, keeping(getattr(server, name)))
    return backend


@pytest.fixture
def lines():
    return []


@pytest.fixture
def address(backend, lines, tmp_path):
    with (
        serving(backend, folder=tmp_path / "node") as engines,
        open_port(row_services(sockets_of(engines)), lines.append) as address,
    ):
        backend.seen.clear()
        yield address


def connected(address):
    connection = connect_rows(address, 0, 1, POOL, LOG)
    connection.send(Hello(request_id=1), HANG_S)
    assert isinstance(connection.receive(HANG_S), Ready)
    return connection


def a_row(tokens: int, request_id: int = 2, **sampling) -> Generate:
    return Generate(
        request_id=request_id, prompt=pack_ids([1]), num_completions=1, max_tokens=9,
        sampling={"tokens": tokens} | sampling,
    )  # fmt: skip


NO_MEMORY = msgspec.Raw(msgspec.msgpack.encode(1))
FORBIDDEN = [
    OpenSlots(request_id=5, transport="host", memory=NO_MEMORY, sizes=(), buckets=()),
    CheckSlot(request_id=7, slot=0, num_bytes=1, crc=0),
    UpdateWeights(request_id=8, version=WeightVersion(2, 2)),
    Drain(request_id=9),
    OpenSession(request_id=10, key="k", max_calls=1, max_tokens=1, sampling={}),
    CloseSession(request_id=11, key="k"),
    Shutdown(request_id=12),
]
ALLOWED = [
    Hello(request_id=3),
    a_row(1, 4),
    Score(request_id=5, prompt=pack_ids([4, 5])),
    Await(request_id=6, min_update=1),
    Peek(request_id=7),
]


def test_each_message_is_allowed_or_forbidden():
    assert {type(message) for message in ALLOWED} == set(RowRequest.__args__)
    assert {type(message) for message in ALLOWED + FORBIDDEN} == set(messages.Request.__args__)


def test_each_allowed_message_reaches_the_engine_as_it_was_sent(address, backend):
    with closing(connected(address)) as connection:
        for message in ALLOWED:
            connection.send(message, HANG_S)
        replies = [connection.receive(HANG_S).request_id for _ in ALLOWED]
    assert sorted(replies) == sorted(message.request_id for message in ALLOWED)
    assert backend.seen[1 : 1 + len(ALLOWED)] == ALLOWED


def two_tags(first: str, second: str) -> bytes:
    """A map with two types; a decoder that takes the second one reads another message."""
    text = [bytes([0xA0 + len(word)]) + word.encode() for word in ("type", first, second)]
    return b"\x82" + text[0] + text[1] + text[0] + text[2]


BYTES = {
    "no message": with_length(b"\xc1"),
    "nothing": with_length(b""),
    "a length above the limit": LENGTH.pack(MAX_FRAME_BYTES + 1),
    "a reply": frame(Completions(rows=())),
    "two types": with_length(two_tags("Peek", "Shutdown")),
    "two types the other way": with_length(two_tags("Shutdown", "Peek")),
    "bytes behind a message": with_length(frame(ALLOWED[-1])[LENGTH.size :] + b"\x00"),
    "a deep nest": with_length(
        b"\x82\xa4type\xa8Generate\xa8sampling" + b"\x81\xa1x" * 100_000 + b"\xc0"
    ),
}


@pytest.mark.parametrize(
    "data",
    [*map(frame, FORBIDDEN), *BYTES.values()],
    ids=[*(type(message).__name__ for message in FORBIDDEN), *BYTES],
)
@pytest.mark.parametrize("said_hello", [True, False])
def test_anything_else_closes_the_connection_and_the_engine_never_sees_it(
    address, backend, lines, data, said_hello
):
    connection = connected(address) if said_hello else connect_rows(address, 0, 1, POOL, LOG)
    with closing(connection):
        # behind it a request that would pass; in one piece, so that the port has both at once
        connection._socket.sendall(data + frame(a_row(1)))
        with pytest.raises(EngineDiedError, match=NAME):
            connection.receive(HANG_S)
    until(lambda: backend.seen and backend.seen[-1] is None, "the engine has seen the end")
    assert [type(request) for request in backend.seen[:-1]] == [Hello] * said_hello
    assert len(lines) == 1 and len(lines[0]) < 400
    with closing(connected(address)) as other:  # the engine serves on
        other.send(a_row(3), HANG_S)
        assert len(other.receive(HANG_S).rows[0].tokens) == 12


def test_a_fuzz_behind_the_proof_reaches_the_engine_as_requests_for_rows_only(
    address, backend, lines
):
    dice, count = random.Random(11), 300
    for _ in range(count):
        stream = bytearray(b"".join(map(frame, dice.choices(ALLOWED + FORBIDDEN, k=4))))
        for _ in range(dice.randrange(4)):
            stream[dice.randrange(len(stream))] ^= 1 << dice.randrange(8)
        with closing(connected(address)) as connection:
            connection._socket.sendall(stream[: dice.randint(1, len(stream))])
            with suppress(OSError):  # the port was faster
                connection._socket.shutdown(socket.SHUT_WR)
            read(connection._socket, 1 << 30)  # until the port closes it
    until(lambda: backend.seen.count(None) == count, "the engine has seen all ends")
    kinds = Counter(map(type, backend.seen))
    assert set(kinds) == {*RowRequest.__args__, type(None)} and kinds[Hello] > count
    assert len(lines) == 1 and len(lines[0]) < 400


def test_the_requests_of_a_rank_that_vanishes_are_cancelled(address, backend):
    with closing(connected(address)) as other, closing(connected(address)) as connection:
        for number in range(3):
            connection.send(a_row(1, 2 + number, endless=True), HANG_S)
        other.send(a_row(1, endless=True), HANG_S)
        until(lambda: backend.begun == 4)
        connection.close()
        until(lambda: backend.cancelled == 3)
        other.send(a_row(2, 9), HANG_S)
        assert other.receive(HANG_S).request_id == 9
    until(lambda: backend.cancelled == 4)


def client_of(connection) -> EngineClient:
    place = EnginePlace(NODE, 0, lambda timeout_s: connection)
    return EngineClient(place, 0, 5, 1, HANG_S, {}, tolerant=True)


@pytest.mark.parametrize("error", [EngineStalledError("late"), EngineDiedError("gone")])
def test_a_lost_engine_of_another_node_is_left_alone(address, backend, error, tmp_path):
    """Its pid is that of another process on this node, and the node of the engine has its own files."""
    with subprocess.Popen(["sleep", "600"]) as process:
        backend.pid = process.pid
        client = client_of(connect_rows(address, 0, 1, POOL, LOG))
        client.post(a_row(1, endless=True))
        until(lambda: backend.begun == 1)
        client.lose(error)
        until(lambda: backend.cancelled == 1)  # the connection is closed
        assert process.poll() is None and client.has_ended and client._process is None
        assert not list(tmp_path.rglob("*.failure"))
        process.kill()


def test_errors_of_a_connection_say_which_node(address):
    with closing(connect_rows(address, 0, 1, POOL, LOG)) as connection:
        assert connection.name == NAME
        with pytest.raises(EngineStalledError, match=NAME):
            connection.receive(0.01)
    with pytest.raises(ConfigurationError) as found:
        connect_rows(address, 7, 1, POOL, LOG)
    assert (found.value.node, found.value.got) == (NODE, "rows 7")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = handshake.PortAddress(NODE, *closed.getsockname())
    with impostor(lambda body: None) as (closing_port, _):
        for where in (nowhere, closing_port):
            with pytest.raises(EngineDiedError, match=NAME):
                connect_rows(where, 0, 1, POOL, LOG)


# ---- memory


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process that no file backs; pages that it shares with its parent always count."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def port_process(path: Path, sender) -> None:
    def report(line: str) -> None:
        print(line, flush=True)

    with open_port(row_services([path]), report) as address:
        sender.send(address)
        threading.Event().wait()


@contextmanager
def port_of_its_own(path: Path):
    """A port in another process, whose memory a test can read."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=port_process, args=(path, theirs))
    process.start()
    try:
        yield ours.recv(), process.pid
    finally:
        process.kill()
        process.join()


def test_replies_that_a_rank_does_not_read_wait_in_the_engine(backend, tmp_path):
    tokens, count = 250_000, 100  # 2 MB a row
    with (
        serving(backend, folder=tmp_path / "node") as engines,
        port_of_its_own(sockets_of(engines)[0]) as (address, pid),
        closing(connected(address)) as connection,
    ):
        before = anonymous_bytes(pid)
        for number in range(count):
            connection.send(a_row(tokens, 2 + number), HANG_S)
        until(lambda: backend.begun == count)
        with closing(connected(address)) as other:  # the port serves others meanwhile
            other.send(a_row(3), HANG_S)
            assert len(other.receive(HANG_S).rows[0].tokens) == 12
        assert anonymous_bytes(pid) - before < 16 << 20
        got = [connection.receive(HANG_S) for _ in range(count)]
    assert sorted(reply.request_id for reply in got) == list(range(2, 2 + count))
    assert {len(reply.rows[0].tokens) for reply in got} == {4 * tokens}


def test_requests_that_an_engine_does_not_read_wait_in_the_rank(tmp_path):
    message, megabytes = frame(Score(prompt=bytes(1 << 20))), 0
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(str(tmp_path / "s"))
        engine.listen()
        with (
            port_of_its_own(tmp_path / "s") as (address, pid),
            closing(connect_rows(address, 0, 1, POOL, LOG)) as connection,
        ):
            before = anonymous_bytes(pid)
            connection._socket.settimeout(1.0)
            with suppress(TimeoutError):
                while megabytes < 100:
                    connection._socket.sendall(message)
                    megabytes += 1
            assert megabytes < 50 and anonymous_bytes(pid) - before < 16 << 20


# ---- other hosts


@pytest.fixture(scope="module")
def hosts():
    if reason := namespaces_available():
        pytest.skip(reason)
    made = Namespaces(f"tmn-{secrets.token_hex(3)}", 2)
    yield made
    made.close()


SECOND = "10.88.0.1"  # of host 0, on the same interface


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=HANG_S)


@pytest.mark.real
def test_another_host_reaches_a_port_on_one_address_and_both_notice_a_cut_link(
    hosts, backend, tmp_path, monkeypatch
):
    monkeypatch.setattr(sockets, "KEEP_ALIVE_S", 1)
    monkeypatch.setattr(handshake, "LINK_S", 3.0)
    monkeypatch.setattr(port, "PEER_S", 3.0)
    (temporary := tmp_path / "tmp").mkdir()
    ip("-n", hosts.namespace(0), "address", "add", f"{SECOND}/24", "dev", "eth0")
    ip("-n", hosts.namespace(1), "address", "add", "10.88.0.2/24", "dev", "eth0")

    def refused(address, host: str) -> str:
        try:
            socket.create_connection((host, address.port), HANG_S).close()
        except OSError as error:
            return type(error).__name__
        return "connected"

    def engines_node() -> list:
        own = route_to(hosts.address(1))
        with serving(backend, folder=temporary / "node") as engines:
            with open_port(row_services(sockets_of(engines)), host=own) as address:
                print("PORT", address.port, flush=True)
                found = [own, route_to("127.0.0.1"), listeners(os.getpid())]
                found += [refused(address, host) for host in (own, "127.0.0.1", SECOND)]
                until(lambda: backend.begun == 2)
                print("BEGUN", flush=True)
                until(lambda: backend.cancelled == 1)
            return found

    def rank_node() -> list:
        number = until(lambda: (tmp_path / "port").exists() and (tmp_path / "port").read_text())
        address = handshake.PortAddress(NODE, hosts.address(0), int(number))
        found = [route_to(hosts.address(0)), refused(address, SECOND)]
        with closing(connected(address)) as connection:
            connection.send(a_row(4), HANG_S)
            found.append(len(connection.receive(HANG_S).rows[0].tokens))
            connection.send(a_row(1, 3, endless=True), HANG_S)
            with pytest.raises(EngineDiedError, match=NAME):
                connection.receive(HANG_S)
        return found

    def host(rank: int) -> list:
        enter_node(hosts.namespace(rank), hosts.mounts(rank, temporary))
        return rank_node() if rank else engines_node()

    with forked(host, 2, tmp_path) as (engines, rank):
        engines.wait_for("PORT")
        (tmp_path / "new").write_text(engines.text.partition("PORT ")[2].split()[0])
        (tmp_path / "new").rename(tmp_path / "port")
        engines.wait_for("BEGUN")
        hosts.cut_link(0)
        try:
            own = hosts.address(0)
            expected = [own, "127.0.0.1", [own], "connected"] + ["ConnectionRefusedError"] * 2
            assert engines.result == expected
            assert rank.result == [hosts.address(1), "ConnectionRefusedError", 16]
        finally:
            ip("-n", hosts.hub, "link", "set", "node0", "master", "bridge")
