"""The address of this computer that leads to another one."""

import socket
from contextlib import suppress


def route_to(address: str) -> str | None:
    """Return this computer's address on the interface that leads to another one, `None` without a way.

    Nothing is sent. The way to a loopback address is the loopback interface.
    """
    with suppress(OSError):
        for family, kind, _, _, target in socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe, suppress(OSError):
                probe.connect(target)
                return probe.getsockname()[0]
    return None
