"""Nothing gets past a node's port without a proof of the secret, and a flood costs it little."""

import asyncio
import itertools
import os
import random
import select
import socket
import stat
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from ported import FACTS, KEY, NODE, POOL, SECRET, Hand, impostor, open_port, read, right_facts
from waiting import HANG_S, until

from trl_multinode.errors import ConfigurationError
from trl_multinode.wire import port
from trl_multinode.wire import secret as secret_module
from trl_multinode.wire.connection import LENGTH, MAX_HELLO_BYTES, with_length
from trl_multinode.wire.handshake import BYTES, FROM_PORT, GREETING, Facts, Pool, Verdict, dial
from trl_multinode.wire.secret import SECRET_FILE, Secret, pool_secret

OTHER = Secret(KEY[::-1])
VARIABLE = secret_module.SECRET


class Echo:
    """Service that sends back what it gets."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self, stream: socket.socket) -> None:
        self.count += 1
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(stream, 4096):
            await loop.sock_sendall(stream, data)


@pytest.fixture
def echo():
    return Echo()


@pytest.fixture
def lines():
    return []


@pytest.fixture
def address(echo, lines):
    with open_port({"echo": echo}, lines.append) as address:
        yield address


def echoed(address) -> bytes:
    with closing(dial(address, POOL, "echo", HANG_S)) as stream:
        stream.settimeout(HANG_S)
        stream.sendall(b"text")
        return read(stream, 4)


def refused(
    address, secret: Secret = SECRET, facts: Facts = FACTS, service: str = "echo"
) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as found:
        dial(address, Pool(secret, facts), service, HANG_S)
    assert found.value.node == address.node
    assert KEY.decode() not in str(found.value)
    return found.value


# ---- proofs


def test_a_service_gets_the_connection_once_both_sides_have_proved_the_secret(address, echo, lines):
    assert echoed(address) == b"text"
    with Hand(address) as hand:  # the control of all tests with wrong bytes
        body = hand.body()
        answer = hand.answer(with_length(body))
        proof = body[BYTES : 2 * BYTES]
        theirs, verdict = answer[:BYTES], answer[BYTES:]
        assert SECRET.proves(theirs, FROM_PORT, proof + verdict)
        assert msgspec.msgpack.decode(verdict, type=Verdict) == ("", "")
    until(lambda: echo.count == 2)
    assert lines == []


def test_another_secret_is_named_for_the_peer_and_reaches_no_service(address, echo):
    assert refused(address, OTHER).setting == SECRET_FILE
    assert echo.count == 0 and echoed(address) == b"text"


def test_a_peer_without_the_secret_gets_no_proof_and_nothing_to_compare(address, monkeypatch):
    monkeypatch.setattr(port.Port, "_judge", lambda *_: pytest.fail("a claim without a proof"))
    with Hand(address) as hand:
        assert hand.answer(with_length(hand.body(OTHER))) == b"" and read(hand.stream, 1) == b""


def test_a_replayed_proof_is_wrong_on_another_connection(address, echo):
    with Hand(address) as first, Hand(address) as second:
        body = first.body()
        assert first.answer(with_length(body))
        assert second.answer(with_length(body)) == b""
    until(lambda: echo.count == 1)


def test_the_proof_of_the_ports_direction_is_wrong_for_a_peer(address):
    with Hand(address) as hand:
        assert hand.answer(with_length(hand.body(direction=FROM_PORT))) == b""


def test_each_flipped_bit_of_a_peers_bytes_is_found(address, echo):
    """In the random number, the proof and the claim."""
    dice = random.Random(3)
    with Hand(address) as hand:
        length = len(hand.body())
    assert length > 2 * BYTES + 60
    for position in range(length):
        with Hand(address) as hand:
            body = bytearray(hand.body())
            body[position] ^= 1 << dice.randrange(8)
            assert hand.answer(with_length(bytes(body))) == b"", position
    assert echo.count == 0


def test_flipped_bits_of_the_length_and_cut_bodies_are_found(address, echo, monkeypatch):
    monkeypatch.setattr(port, "PROOF_S", 0.2)  # the wait for bytes that a greater length claims
    for bit in range(8 * LENGTH.size):
        with Hand(address) as hand:
            data = bytearray(with_length(hand.body()))
            data[bit // 8] ^= 1 << bit % 8
            assert not hand.answer(bytes(data)), bit
    for length in (0, 1, BYTES, 2 * BYTES, 2 * BYTES + 1):
        with Hand(address) as hand:
            assert hand.answer(with_length(hand.body()[:length])) == b"", length
    assert echo.count == 0


def test_a_proven_claim_that_is_none_closes_the_connection(address, echo, lines):
    for told in (b"", b"\xc1", msgspec.msgpack.encode({"node": 3}), b"\x91" * 3000):
        with Hand(address) as hand:
            assert hand.answer(with_length(hand.body(told=told))) is None
    assert echo.count == 0 and len(lines) == 1 and echoed(address) == b"text"


def test_a_port_that_does_not_know_the_secret_gets_nothing_after_the_claim():
    """Each flipped bit of a right answer, the peer's own proof sent back, another secret, a replayed answer."""

    def right(body: bytes) -> bytes:
        verdict = msgspec.msgpack.encode(("", ""))
        proof = body[BYTES : 2 * BYTES]
        return SECRET.proof(FROM_PORT, proof + verdict) + verdict

    answers: list[bytes] = []
    dice, positions = random.Random(5), itertools.count()

    def flipped(body: bytes) -> bytes:
        answer = bytearray(right(body))
        answer[next(positions)] ^= 1 << dice.randrange(8)
        return bytes(answer)

    with impostor(lambda body: answers.append(right(body)) or answers[-1]) as (address, later):
        dial(address, POOL, "echo", HANG_S).close()  # the control
    for answer_to in (
        lambda body: body[BYTES : 2 * BYTES],
        lambda body: body[BYTES : 2 * BYTES] + right(body)[BYTES:],
        lambda body: answers[0],
        lambda body: bytes(BYTES) + right(body)[BYTES:],
        lambda body: b"",
    ):
        with impostor(answer_to) as (address, later):
            assert refused(address).setting == SECRET_FILE
        assert later == [b""]
    with impostor(flipped) as (address, later):
        for _ in answers[0]:
            assert refused(address).setting == SECRET_FILE
    assert later == [b""] * len(answers[0])


def test_another_program_at_the_address_is_named():
    with (
        impostor(lambda body: body, greeting=b"SSH-2.0-OpenSSH_") as (address, later),
        pytest.raises(ConnectionError, match="another program"),
    ):
        dial(address, POOL, "echo", HANG_S)
    assert later == [b""]


# ---- refusals with a name


@pytest.mark.parametrize(
    ("facts", "setting", "got", "expected"),
    [
        ({"run": "run-8"}, "run", "run-8", "run-7"),
        ({"trl_multinode": "1.2.4"}, "trl_multinode", "1.2.4", "1.2.3"),
        ({"vllm": "0.30.0"}, "vllm", "0.30.0", "0.31.0"),
        ({"more": "x"}, "more", "x", ""),
    ],
)
def test_a_peer_of_another_run_or_version_is_refused_by_name(
    address, echo, lines, facts, setting, got, expected
):
    for _ in range(2):
        error = refused(address, facts={**FACTS, **facts})
        assert (error.setting, error.got, error.expected) == (setting, got, expected)
    until(lambda: lines)
    assert len(lines) == 1 and setting in lines[0] and echo.count == 0


def test_a_fact_that_the_peer_lacks_is_named(address):
    error = refused(address, facts={"run": "run-7", "trl_multinode": "1.2.3"})
    assert (error.setting, error.got, error.expected) == ("vllm", None, "0.31.0")


def test_an_address_that_another_node_has_now_is_named(address):
    error = refused(replace(address, node=4))
    assert (error.setting, error.got, error.expected) == ("node", "4", str(NODE))


@pytest.mark.parametrize("service", ["rows 0", "echo 0", ""])
def test_a_service_that_a_port_does_not_have_is_named(address, echo, service):
    error = refused(address, service=service)
    assert (error.setting, error.got, error.expected) == ("service", service, "echo")
    assert echo.count == 0


# ---- limits before a proof


def test_a_flood_of_wrong_proofs_costs_one_line_per_address(address, lines, monkeypatch):
    monkeypatch.setattr(port, "MAX_NAMED", 2)
    for source in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
        for _ in range(20):
            with Hand(address, source) as hand:
                assert hand.answer(with_length(hand.body(OTHER))) == b""
    assert ["127.0.0.1 (" in line for line in lines] == [True, False]
    assert ["127.0.0.2 (" in line for line in lines] == [False, True]
    assert echoed(address) == b"text"


def test_a_first_frame_above_the_limit_is_not_read(address, echo):
    with Hand(address) as hand:
        assert hand.answer(LENGTH.pack(MAX_HELLO_BYTES + 1)) is None
    with Hand(address) as hand:
        told = bytes(MAX_HELLO_BYTES + 1 - BYTES - BYTES)
        body = hand.body(told=told)
        assert len(body) == MAX_HELLO_BYTES + 1 and hand.answer(with_length(body)) is None
        with Hand(address) as hand:  # the control
            assert hand.answer(with_length(hand.body(OTHER, told=told[1:]))) == b""
    assert echo.count == 0


def test_a_peer_that_sends_a_byte_at_a_time_is_closed_after_the_limit(address, echo, monkeypatch):
    monkeypatch.setattr(port, "PROOF_S", 0.5)
    with Hand(address) as hand:
        data = with_length(hand.body())
        sent = 0
        while not select.select([hand.stream], [], [], 0.1)[0]:
            hand.stream.sendall(data[sent : sent + 1])
            sent += 1
        assert read(hand.stream, 1) == b"" and 1 < sent < len(data) / 2
    assert echo.count == 0


def test_silent_connections_keep_others_out_only_until_the_limit(echo, lines, monkeypatch):
    monkeypatch.setattr(port, "MAX_UNPROVEN", 3)
    with open_port({"echo": echo}, lines.append) as address, ExitStack() as ends:
        proven = []
        for _ in range(4):  # these do not count
            proven.append(dial(address, POOL, "echo", HANG_S))
            ends.enter_context(closing(proven[-1]))
        silent = [ends.enter_context(Hand(address)) for _ in range(3)]
        late = ends.enter_context(
            socket.create_connection((address.host, address.port), timeout=HANG_S)
        )
        for stream in proven:
            stream.sendall(b"text")
            stream.settimeout(HANG_S)
            assert read(stream, 4) == b"text"
        assert not select.select([late], [], [], 0.5)[0]  # no greeting, although others are served
        monkeypatch.setattr(port, "PROOF_S", HANG_S)  # of `late`
        assert read(late, len(GREETING)) == GREETING
        assert echoed(address) == b"text"
        assert all(read(hand.stream, 1) == b"" for hand in silent)
    assert len(lines) == 1


def test_a_port_that_closes_a_connection_before_its_proof_is_an_error():
    with (
        impostor(lambda body: None) as (address, later),
        pytest.raises((EOFError, ConnectionError)),
    ):
        dial(address, POOL, "echo", HANG_S)


def test_a_port_without_a_descriptor_left_takes_connections_again(address, monkeypatch):
    accept, failures = asyncio.selector_events.BaseSelectorEventLoop._sock_accept, []

    def without_descriptor(loop, future, listener):
        if len(failures) < 3:
            failures.append(1)
            future.set_exception(OSError(24, "Too many open files"))
        else:
            accept(loop, future, listener)

    loop = asyncio.selector_events.BaseSelectorEventLoop
    monkeypatch.setattr(loop, "_sock_accept", without_descriptor)
    echoed(address)  # taken by the accept that was waiting
    assert echoed(address) == b"text" and len(failures) == 3


# ---- end


def test_a_port_that_ends_leaves_no_socket_and_no_task(echo):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    with ExitStack() as ends:
        with open_port({"echo": echo}) as address:  # which finds the tasks
            served = ends.enter_context(closing(dial(address, POOL, "echo", HANG_S)))
            silent = ends.enter_context(Hand(address)).stream
            until(lambda: echo.count == 1)
        served.settimeout(HANG_S)
        assert read(served, 1) == read(silent, 1) == b""
        with pytest.raises(ConnectionRefusedError):
            Hand(address)
    assert descriptors() == before


# ---- the secret


@pytest.fixture
def secret_file(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_bytes(KEY + b"\n")
    path.chmod(0o600)
    monkeypatch.setenv(SECRET_FILE, str(path))
    monkeypatch.delenv(VARIABLE, raising=False)
    return path


def is_that_of(secret: Secret, key: bytes) -> bool:
    return secret.proof(FROM_PORT, b"x") == Secret(key).proof(FROM_PORT, b"x")


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_the_secret_is_that_of_the_file_or_of_the_variable(secret_file, mode, monkeypatch):
    secret_file.chmod(mode)
    monkeypatch.setenv(VARIABLE, "another-secret-of-24-byte")
    assert is_that_of(pool_secret(), KEY)
    monkeypatch.delenv(SECRET_FILE)
    assert is_that_of(pool_secret(), b"another-secret-of-24-byte")
    assert not is_that_of(pool_secret(), KEY)


def refusal() -> ConfigurationError:
    with pytest.raises(ConfigurationError) as found:
        pool_secret()
    assert KEY.decode() not in f"{found.value!r} {found.value} {vars(found.value)}"
    return found.value


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o602, 0o610])
def test_a_file_that_others_may_use_is_refused(secret_file, mode):
    secret_file.chmod(mode)
    error = refusal()
    assert (
        error.setting == SECRET_FILE
        and stat.filemode(0o100000 | mode) in error.got
        and "0600" in error.expected
    )


def another_owner(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


def a_link(path: Path, _) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to("target")


def a_pipe(path: Path, _) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def a_folder(path: Path, _) -> None:
    path.unlink()
    path.mkdir(0o700)


def a_socket(path: Path, _) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as stream:
        stream.bind(str(path))


def nothing(path: Path, _) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [another_owner, a_link, a_pipe, a_folder, a_socket, nothing])
def test_what_is_no_file_of_this_user_is_refused(secret_file, change, monkeypatch):
    change(secret_file, monkeypatch)
    assert refusal().setting == SECRET_FILE


@pytest.mark.parametrize("length", [0, 1, 15])
def test_a_secret_that_is_too_short_is_refused(secret_file, length, monkeypatch):
    secret_file.write_bytes(b" " + b"x" * length + b"\n")
    assert stat.S_IMODE(secret_file.stat().st_mode) == 0o600
    assert refusal().setting == SECRET_FILE
    monkeypatch.delenv(SECRET_FILE)
    monkeypatch.setenv(VARIABLE, "x" * length)
    assert (refusal().setting, refusal().got) == (VARIABLE, f"it has {length} bytes")


def test_no_text_of_a_secret_shows_it(address, lines):
    with Hand(address) as hand:
        hand.answer(with_length(hand.body(OTHER)))
    texts = f"{SECRET!r} {SECRET} {address} {right_facts()} {lines}"
    assert KEY.decode() not in texts and KEY.hex() not in texts
