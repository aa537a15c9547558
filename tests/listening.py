"""TCP listeners of a process, read in the network namespace of that process."""

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

LISTENING = "0A"
SIZES = {"tcp": 4, "tcp6": 16}


def listeners(pid: int) -> list[str]:
    """The addresses on which `pid` listens; `0.0.0.0` and `::` are all addresses of the host."""
    inodes = set()
    with suppress(OSError):  # it has ended, or closes files just now
        for handle in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                inodes.add(os.readlink(handle.path))
    found = []
    for kind, size in SIZES.items():
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and f"socket:[{fields[9]}]" in inodes:
                    found.append(address(bytes.fromhex(fields[1].partition(":")[0]), size))
    return found


def address(raw: bytes, size: int) -> str:
    """The kernel prints words of 4 bytes in the order of the machine."""
    words = struct.unpack(f"={size // 4}I", raw)
    return socket.inet_ntop(
        socket.AF_INET6 if size == 16 else socket.AF_INET, struct.pack(f">{size // 4}I", *words)
    )
