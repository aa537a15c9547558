"""A node's port on an event loop of this process, and a peer that shakes hands by hand."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress

import msgspec
from waiting import HANG_S

from trl_multinode.wire.connection import LENGTH, with_length
from trl_multinode.wire.handshake import (
    BYTES,
    FROM_PEER,
    GREETING,
    SERVICE,
    Facts,
    Pool,
    PortAddress,
)
from trl_multinode.wire.port import Port, Service
from trl_multinode.wire.secret import Secret

NODE = 3
KEY = b"0123456789abcdef-of-a-test"
SECRET = Secret(KEY)
FACTS = {"run": "run-7", "trl_multinode": "1.2.3", "vllm": "0.31.0"}
POOL = Pool(SECRET, FACTS)


@contextmanager
def running(main: Coroutine) -> Iterator[None]:
    """Run a coroutine in a thread until the end, which cancels it; none of its tasks may be left then."""
    loop = asyncio.new_event_loop()
    task, left = loop.create_task(main), []

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        left.extend(asyncio.all_tasks(loop))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        with suppress(RuntimeError):  # it has ended, and its loop is closed
            loop.call_soon_threadsafe(task.cancel)
        thread.join(HANG_S)
        assert not thread.is_alive() and not left
        if not task.cancelled():
            task.result()


@contextmanager
def open_port(
    services: Mapping[str, Service],
    report: Callable[[str], None] = print,
    host: str = "127.0.0.1",
) -> Iterator[PortAddress]:
    port = Port(host, NODE, POOL, services, report)
    with running(port.serve()):
        yield port.address


# ---- by hand


class Hand:
    """Connection of a peer whose bytes a test makes, and what the port says first."""

    def __init__(self, address: PortAddress, source: str = "127.0.0.1"):
        self.stream = socket.create_connection((address.host, address.port), HANG_S, (source, 0))
        self.greeting = read(self.stream, len(GREETING) + BYTES)

    def body(
        self, secret: Secret = SECRET, direction: bytes = FROM_PEER, told: bytes | None = None
    ) -> bytes:
        """Return random bytes, proof and facts: the right ones, but for what is given."""
        if told is None:
            told = msgspec.msgpack.encode(right_facts())
        nonce = os.urandom(BYTES)
        proof = secret.proof(direction, self.greeting[len(GREETING) :] + nonce + told)
        return nonce + proof + told

    def answer(self, data: bytes) -> bytes | None:
        """Send bytes, and return the body of the answer; `None`: the port has closed the connection."""
        self.stream.sendall(data)
        header = read(self.stream, LENGTH.size)
        return read(self.stream, LENGTH.unpack(header)[0]) if header else None

    def __enter__(self) -> "Hand":
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()


def right_facts() -> Facts:
    return {**FACTS, "node": str(NODE), SERVICE: "echo"}


def read(stream: socket.socket, num_bytes: int) -> bytes:
    """Return so many bytes, or those before the end."""
    data = b""
    with suppress(ConnectionResetError):
        while len(data) < num_bytes and (piece := stream.recv(num_bytes - len(data))):
            data += piece
    return data


@contextmanager
def impostor(
    answer_to: Callable[[bytes], bytes | None], greeting: bytes = GREETING
) -> Iterator[tuple]:
    """A port that answers a peer's body with `answer_to(body)`, or closes the connection if that is `None`.

    Yields its address, and what peers sent after the answers.
    """
    later: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):  # closed at the end
            while True:
                with listener.accept()[0] as stream:
                    stream.settimeout(HANG_S)
                    stream.sendall(greeting + bytes(BYTES))
                    if header := read(stream, LENGTH.size):
                        answer = answer_to(read(stream, LENGTH.unpack(header)[0]))
                        if answer is None:
                            continue
                        stream.sendall(with_length(answer))
                    later.append(read(stream, 1))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with listener:
        yield PortAddress(NODE, "127.0.0.1", listener.getsockname()[1]), later
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(HANG_S)
