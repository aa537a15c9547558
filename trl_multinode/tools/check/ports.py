"""Owner of a port of this host."""

from contextlib import suppress

import psutil

LONGEST_COMMAND = 120  # characters


def owner_of(port: int) -> str:
    """Return the process that listens on a port, as far as this user may see it; an empty string if none does."""
    try:
        found = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return ""
    pids = {one.pid for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port}
    if not pids:
        return ""
    return " and ".join(process_name(pid) for pid in sorted(pids, key=lambda pid: pid or 0))


def process_name(pid: int | None) -> str:
    """Return a process with the beginning of its command, as far as this user may see it."""
    if pid is None:
        return "a process of another user"
    with suppress(psutil.Error):
        words = " ".join(psutil.Process(pid).cmdline())
        return f"pid {pid} (`{words[:LONGEST_COMMAND]}`)"
    return f"pid {pid}"
