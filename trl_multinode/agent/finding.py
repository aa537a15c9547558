"""The notice of a run, in the store at the address that an agent was given."""

import socket
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import msgspec
from torch.distributed import TCPStore

from ..engine.agents import POOL_KEY, Notice
from ..run.reconnecting import connections_to
from ..wire.handshake import EVERY_HOST

CONNECT_S = 2.0
ATTEMPT_S = 5.0  # for a connection and a request; a program that is no store may never answer


def notice_at(address: tuple[str, int]) -> Notice | None:
    """Return the notice of the run at an address; `None` if there is no run, or another program answers.

    A connection is closed at once, because a starting run counts those of its launchers and ranks.
    """
    found: list[bytes] = []

    def read() -> None:
        limit = timedelta(seconds=CONNECT_S)
        with suppress(RuntimeError):  # nothing listens there, or another program, or the run ends
            store = TCPStore(*address, is_master=False, timeout=limit, wait_for_workers=False)
            if store.check([POOL_KEY]):
                found.append(store.get(POOL_KEY))

    thread = threading.Thread(target=read, name="find-run", daemon=True)
    thread.start()
    thread.join(ATTEMPT_S)
    if thread.is_alive():
        for end in connections_to(address[1]):
            end.shutdown(socket.SHUT_RDWR)
    with suppress(msgspec.MsgspecError, IndexError):
        notice = msgspec.json.decode(found[0], type=Notice)
        # a single node does not know by which of its addresses others reach it
        ports = [
            replace(port, host=address[0]) if port.host == EVERY_HOST else port
            for port in notice.ports
        ]
        return msgspec.structs.replace(notice, ports=ports)
    return None
