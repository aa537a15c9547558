"""Mutual proof of a pool's secret, with which a TCP connection between nodes begins.

    port -> peer   greeting, 32 random bytes
    peer -> port   length, 32 random bytes, proof, claim
    port -> peer   length, proof, verdict            (a length of 0: the peer's proof is wrong)

A proof is an HMAC-SHA256 over a label of its direction, both random numbers and the claim; that of the port also
covers its verdict. Each side decodes what the other one says only after the proof. The bytes that follow are neither
encrypted nor authenticated.
"""

import asyncio
import os
import random
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from ..errors import ConfigurationError
from .connection import LENGTH, MAX_HELLO_BYTES, body_length, receive_body, with_length
from .secret import SECRET_FILE, Secret
from .sockets import notice_cuts, read_exactly

GREETING = b"trl_multinode 1\n"  # number of this form of the handshake
NONCE_BYTES = PROOF_BYTES = 32
FROM_PEER, FROM_PORT = b"peer", b"port"
LINK_S = 30.0  # silence after which a rank gives a link up; as `heartbeat_timeout`
LONGEST_PAUSE_S = 0.5  # before another attempt


@dataclass(frozen=True)
class Pool:
    """Processes that work for one run.

    Attributes:
        secret (`Secret`):
            Secret that all of them have.
        identity (`Mapping[str, str]`):
            Facts that all of them must agree on, by name: the run, the version of this package.
    """

    secret: Secret
    identity: Mapping[str, str]


@dataclass(frozen=True)
class PortAddress:
    """Address of a node's port."""

    node: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"the port of node {self.node} ({self.host}, port {self.port})"


class Claim(msgspec.Struct, frozen=True):
    """What a peer wants of a port, and who it believes to have reached."""

    role: str
    engine: int  # index on the port's node
    identity: dict[str, str]  # of the pool, with the number of the port's node


class Verdict(msgspec.Struct, frozen=True):
    """Answer of a port to a claim."""

    setting: str = ""  # fact that differs; empty: accepted
    expected: str = ""


def identity_at(pool: Pool, node: int) -> dict[str, str]:
    """Return the facts that a peer and the port of a node must agree on."""
    return {**pool.identity, "node": str(node)}


async def check_peer(
    stream: socket.socket, secret: Secret, judge: Callable[[Claim], Verdict]
) -> Claim:
    """Return what a peer wants that has proved the secret. The port calls it on a socket that does not block.

    Args:
        judge (`Callable[[Claim], Verdict]`):
            Function that compares a claim with what this port has. Only claims with a proof reach it.

    Raises:
        `PermissionError`: if the proof is wrong, or if the claim is refused.
        `EngineDiedError`, `EOFError`, `OSError`: if no whole proof arrives.
    """
    loop = asyncio.get_running_loop()
    nonce = os.urandom(NONCE_BYTES)
    await loop.sock_sendall(stream, GREETING + nonce)
    body = bytes(await receive_body(stream, MAX_HELLO_BYTES))
    theirs, rest = body[:NONCE_BYTES], body[NONCE_BYTES:]
    proof, claimed = rest[:PROOF_BYTES], rest[PROOF_BYTES:]
    if not secret.proves(proof, FROM_PEER, nonce + theirs + claimed):
        await loop.sock_sendall(stream, with_length(b""))
        raise PermissionError("its proof of the secret is wrong")
    claim = msgspec.msgpack.decode(claimed, type=Claim)
    verdict = judge(claim)
    answer = msgspec.msgpack.encode(verdict)
    proven = secret.proof(FROM_PORT, proof + answer) + answer
    await loop.sock_sendall(stream, with_length(proven))
    if verdict.setting:
        raise PermissionError(f"its `{verdict.setting}` is not {verdict.expected!r}")
    return claim


def dial(
    address: PortAddress, pool: Pool, role: str, engine: int, timeout_s: float
) -> socket.socket:
    """Return a connection to a port, after both sides have proved the secret.

    A port closes connections at once while it has as many without a proof as it takes, so an attempt that it closes is
    repeated.

    Args:
        address (`PortAddress`):
            Port, as its node has published it.
        pool (`Pool`):
            Secret and facts of this process.
        role (`str`), engine (`int`):
            Service that is wanted.
        timeout_s (`float`):
            Limit for all attempts, in seconds.

    Raises:
        `ConfigurationError`: if the secrets differ, or if the port refuses the claim by name.
        `EngineDiedError`, `OSError`: if nothing answers in time, or if another program does.
    """
    claim = Claim(role, engine, identity_at(pool, address.node))
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _attempt(address, pool.secret, claim, deadline)
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"{address} closed each connection for {timeout_s:.0f} s"
                ) from error
        time.sleep(random.uniform(0.1, 1.0) * LONGEST_PAUSE_S)


def _attempt(address: PortAddress, secret: Secret, claim: Claim, deadline: float) -> socket.socket:
    left_s = max(deadline - time.monotonic(), 0.001)
    stream = socket.create_connection((address.host, address.port), left_s)
    try:
        _check_verdict(_ask(stream, secret, claim, deadline, address), claim, address)
        notice_cuts(stream, LINK_S)
    except BaseException:
        stream.close()
        raise
    return stream


def _ask(
    stream: socket.socket, secret: Secret, claim: Claim, deadline: float, address: PortAddress
) -> Verdict:
    """Send a claim with its proof, and return the port's verdict once it has proved the secret too."""
    greeting = bytes(read_exactly(stream, len(GREETING) + NONCE_BYTES, deadline))
    if not greeting.startswith(GREETING):
        raise ConnectionError(f"at the address of {address} another program answers")
    nonce, claimed = os.urandom(NONCE_BYTES), msgspec.msgpack.encode(claim)
    proof = secret.proof(FROM_PEER, greeting[len(GREETING) :] + nonce + claimed)
    stream.sendall(with_length(nonce + proof + claimed))
    length = body_length(read_exactly(stream, LENGTH.size, deadline), MAX_HELLO_BYTES)
    answer = bytes(read_exactly(stream, length, deadline))
    theirs, verdict = answer[:PROOF_BYTES], answer[PROOF_BYTES:]
    if not secret.proves(theirs, FROM_PORT, proof + verdict):
        raise ConfigurationError(
            f"{address} has another secret than this process.",
            setting=SECRET_FILE,
            cure=f"Give all nodes the same file as `{SECRET_FILE}`.",
            node=address.node,
        )
    return msgspec.msgpack.decode(verdict, type=Verdict)


def _check_verdict(verdict: Verdict, claim: Claim, address: PortAddress) -> None:
    if not verdict.setting:
        return
    facts = {**claim.identity, "engine": f"{claim.role} {claim.engine}"}
    got = facts.get(verdict.setting)
    raise ConfigurationError(
        f"{address} refuses this process: its `{verdict.setting}` is {got!r}, expected {verdict.expected!r}.",
        setting=verdict.setting,
        got=got,
        expected=verdict.expected,
        cure="Start all nodes of a run with the same versions and the same run.",
        node=address.node,
    )
