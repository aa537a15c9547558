"""Rows of an engine on another node: a rank's connection to it, and the service of its node's port.

Only requests for rows pass. They are decoded at the port and encoded anew, so that no byte of another node reaches an
engine that is no such request; weight updates and the end of an engine stay on its unix socket.
"""

import asyncio
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from ..errors import EngineDiedError
from ..wire.connection import Connection, frame, receive_body
from ..wire.handshake import Pool, PortAddress, dial
from ..wire.messages import RowRequest
from ..wire.port import Service
from ..wire.sockets import PIECE_BYTES

SERVICE_OF = "rows {}"  # name of the service for the rows of an engine

_decoder = msgspec.msgpack.Decoder(RowRequest)


def connect_rows(
    address: PortAddress,
    engine: int,
    node: int,
    pool: Pool,
    log_path: Path,
    timeout_s: float = 30.0,
) -> Connection:
    """Connect a rank to an engine of another node.

    Args:
        address (`PortAddress`):
            Port of the engine's node.
        engine (`int`):
            Index of the engine on its node.
        node (`int`):
            Node of the calling rank.
        pool (`Pool`):
            Secret and facts of the run.
        log_path (`Path`):
            Log of the engine, for error messages.
        timeout_s (`float`, *optional*, defaults to 30.0):
            Deadline for connecting, in seconds.

    Raises:
        `ConfigurationError`: if the secrets differ, or if the port refuses the run, a version or the engine.
        `EngineDiedError`: if the port does not answer.
    """
    name = f"engine {engine} of node {address.node}, from node {node}"
    try:
        stream = dial(address, pool, SERVICE_OF.format(engine), timeout_s)
    except (OSError, EOFError) as error:
        raise EngineDiedError(
            f"{name}: cannot connect to {address} ({error}). Log: {log_path}"
        ) from error
    return Connection(stream, name, log_path)


def row_services(sockets: Sequence[Path]) -> dict[str, Service]:
    """Return the services of a port for the rows of this node's engines, by their unix sockets."""
    return {
        SERVICE_OF.format(index): partial(pass_rows, path) for index, path in enumerate(sockets)
    }


async def pass_rows(path: Path, rank: socket.socket) -> None:
    """Pass a rank's requests to an engine, and its replies back as they are, until either end closes.

    One frame or piece is under way in each direction: an end that does not read stops the other one.

    Raises:
        `ExceptionGroup`: always; of an `EOFError` or `OSError` if an end has left, otherwise of the error of a request
            that may not pass.
    """
    loop = asyncio.get_running_loop()

    async def pass_requests() -> None:
        while True:
            request = _decoder.decode(await receive_body(rank))
            await loop.sock_sendall(engine, frame(request))

    async def pass_replies() -> None:
        while piece := await loop.sock_recv(engine, PIECE_BYTES):
            await loop.sock_sendall(rank, piece)
        raise EOFError

    with socket.socket(socket.AF_UNIX) as engine:
        engine.setblocking(False)
        await loop.sock_connect(engine, str(path))
        # the first one that ends raises, and ends the other one
        async with asyncio.TaskGroup() as both:
            both.create_task(pass_requests())
            both.create_task(pass_replies())
