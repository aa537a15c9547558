"""Mutual proof of a pool's secret, with which a TCP connection between nodes begins.

    port -> peer   greeting, 32 random bytes
    peer -> port   length, 32 random bytes, proof, facts
    port -> peer   length, proof, verdict            (a length of 0: the peer's proof is wrong)

The facts are texts by name: the run, versions, the port's node, and the service that the peer wants, such as "rows 0"
for those of engine 0. A proof is an HMAC-SHA256 over a label of its direction, both random numbers and the facts; that
of the port also covers its verdict. Each side decodes what the other one says only after the proof. The bytes that
follow are neither encrypted nor authenticated.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from ..errors import ConfigurationError
from .connection import MAX_HELLO_BYTES, read_body, receive_body, with_length
from .secret import SECRET_FILE, Secret
from .sockets import notice_cuts, read_exactly

GREETING = b"trl_multinode 1\n"  # with the number of this form of the handshake
BYTES = 32  # of a random number and of a proof
FROM_PEER, FROM_PORT = b"peer", b"port"
SERVICE = "service"
EVERY_HOST = "0.0.0.0"  # noqa: S104 - a port with it listens on each address of its host
LINK_S = 30.0  # silence after which a rank gives a link up; as `heartbeat_timeout`

Facts = dict[str, str]
# name of a fact that differs, and the port's text; two empty ones: accepted
Verdict = tuple[str, str]


class Pool(NamedTuple):
    """What all processes of a run have: the secret, and facts that must agree."""

    secret: Secret
    facts: Facts


@dataclass(frozen=True)
class PortAddress:
    """Address of a node's port."""

    node: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"the port of node {self.node} ({self.host}, port {self.port})"


async def check_peer(
    stream: socket.socket, secret: Secret, judge: Callable[[Facts], Verdict]
) -> str:
    """Return the service that a peer wants which has proved the secret. The port calls it.

    Args:
        stream (`socket.socket`):
            Connection that does not block.
        judge (`Callable[[Facts], Verdict]`):
            Function that compares a peer's facts with the port's. Only facts with a proof reach it.

    Raises:
        `PermissionError`: if the proof is wrong, or if the verdict refuses the peer.
        `EngineDiedError`, `EOFError`, `OSError`: if no whole proof arrives.
    """
    loop = asyncio.get_running_loop()
    nonce = os.urandom(BYTES)
    await loop.sock_sendall(stream, GREETING + nonce)
    body = bytes(await receive_body(stream, MAX_HELLO_BYTES))
    theirs, proof, told = body[:BYTES], body[BYTES : 2 * BYTES], body[2 * BYTES :]
    if not secret.proves(proof, FROM_PEER, nonce + theirs + told):
        await loop.sock_sendall(stream, with_length(b""))
        raise PermissionError("its proof of the secret is wrong")
    facts = msgspec.msgpack.decode(told, type=Facts)
    setting, expected = verdict = judge(facts)
    answer = msgspec.msgpack.encode(verdict)
    proven = secret.proof(FROM_PORT, proof + answer) + answer
    await loop.sock_sendall(stream, with_length(proven))
    if setting:
        raise PermissionError(f"its `{setting}` is not {expected!r}")
    return facts[SERVICE]


def dial(address: PortAddress, pool: Pool, service: str, timeout_s: float) -> socket.socket:
    """Return a connection to a service of a port, after both sides have proved the secret.

    Args:
        address (`PortAddress`):
            Port, as its node has published it.
        pool ([`Pool`]):
            Secret and facts of the run.
        service (`str`):
            Name of the service.
        timeout_s (`float`):
            Limit in seconds, once to connect and once for the proofs.

    Raises:
        `ConfigurationError`: if the secrets or a fact differ, or if the port lacks the service.
        `EngineDiedError`, `EOFError`, `OSError`: if nothing answers in time, or if another program does.
    """
    facts = {**pool.facts, "node": str(address.node), SERVICE: service}
    stream = socket.create_connection((address.host, address.port), timeout_s)
    try:
        _prove(stream, address, pool.secret, facts, time.monotonic() + timeout_s)
        notice_cuts(stream, LINK_S)
    except BaseException:
        stream.close()
        raise
    return stream


def _prove(
    stream: socket.socket, address: PortAddress, secret: Secret, facts: Facts, deadline: float
) -> None:
    greeting = bytes(read_exactly(stream, len(GREETING) + BYTES, deadline))
    if not greeting.startswith(GREETING):
        raise ConnectionError("another program answers")
    nonce, told = os.urandom(BYTES), msgspec.msgpack.encode(facts)
    proof = secret.proof(FROM_PEER, greeting[len(GREETING) :] + nonce + told)
    stream.sendall(with_length(nonce + proof + told))
    answer = bytes(read_body(stream, deadline, MAX_HELLO_BYTES))
    theirs, verdict = answer[:BYTES], answer[BYTES:]
    setting, expected = SECRET_FILE, "the same on all nodes"
    if secret.proves(theirs, FROM_PORT, proof + verdict):
        setting, expected = msgspec.msgpack.decode(verdict, type=Verdict)
    if setting:
        got = facts.get(setting)
        raise ConfigurationError(
            f"{address} refuses this process: `{setting}` is {got or 'another one'}, expected {expected}.",
            setting=setting,
            got=got,
            expected=expected,
            cure="Give all nodes of a run the same secret, the same versions and the same run.",
            node=address.node,
        )
