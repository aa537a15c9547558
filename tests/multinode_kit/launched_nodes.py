"""Views of launched nodes for tests: logs, processes, links and private folders."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil

from .forking import ForkedProcess
from .launch_files import MARKER_VARIABLE, STACKS, NodesSpec
from .namespaces import SHARED_MEMORY, Namespaces

TAIL_LINES = 15


class LaunchedNodes:
    """Logs, processes, links and folders of the last launch. [`Nodes`](nodes.py), which launches, inherits it.

    Args:
        spec (`NodesSpec`):
            Layout of the nodes.
        folder (`Path`):
            Folder of the logs, with a `launch<i>/` per launch.
        private (`Path`):
            Folder of the nodes' private folders.
        network (`Namespaces`, *optional*):
            Namespaces of the nodes; without them, the nodes share the computer's network and /dev/shm.
    """

    def __init__(self, spec: NodesSpec, folder: Path, private: Path, network: Namespaces | None):
        self.spec, self.folder = spec, folder
        self._private, self._network = private, network
        self._launchers: list[subprocess.Popen | ForkedProcess] = []
        self._num_launches = 0

    def rank_log(self, rank: int) -> str:
        """Return the output of `rank` in the last launch, stdout and stderr in order; empty before the rank starts."""
        self._where(rank)
        return _read(self._log_folder / f"rank{rank}.log")

    def launcher_log(self, node: int) -> str:
        """Return the output of the launcher of `node` itself in the last launch."""
        return _read(self._log_folder / f"node{node}.log")

    def launcher_pid(self, node: int) -> int:
        """Return the pid of the `accelerate launch` of `node`, also after it has ended."""
        return self._launchers[node].pid

    def tails(self) -> str:
        """Return the ends of all logs of the last launch, for an error message."""
        logs = sorted(self._log_folder.glob("*.log"))
        return "\n".join(f"--- end of {log}\n{_tail(_read(log))}" for log in logs)

    def what_ranks_do(self) -> str:
        """
        Return state and CPU time of the live ranks, and the ends of all logs, for an error message.

        Ranks that handle `STACKS` write the stacks of their threads into their logs first. `faulthandler` needs no
        interpreter lock for them, so they come from a rank, too, whose native code holds it.
        """
        lines = []
        for rank in range(self.spec.num_ranks):
            # it has ended, or ends meanwhile
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                process = psutil.Process(self.rank_pid(rank))
                seconds = process.cpu_times().user
                lines.append(f"{self._where(rank)}: {process.status()}, {seconds:.1f} s of CPU")
                if handles(process.pid, STACKS):
                    process.send_signal(STACKS)
        time.sleep(1.0)  # the test has failed already
        return "\n".join([*lines, self.tails()])

    def rank_pid(self, rank: int) -> int:
        """
        Return the pid of training process `rank`.

        Raises:
            ProcessLookupError: the process has not started, or has ended.
        """
        where, node = self._where(rank), self.spec.node_of(rank)
        pid = _read(self._log_folder / f"rank{rank}.pid").strip()
        if not pid or int(pid) not in self.pids(node):
            raise ProcessLookupError(
                f"{where} has no live process. Its log:\n{_tail(self.rank_log(rank))}"
            )
        return int(pid)

    def pids(self, node: int) -> list[int]:
        """Return the pids of all live processes of `node`, with orphans and without zombies."""
        own = {
            f"{MARKER_VARIABLE}={self._marker(node)}".encode(),
            f"TMPDIR={self.tmpdir(node)}".encode(),
        }
        network = self._network
        pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
        return sorted(
            p
            for p in pids
            if own & {*_environment(p)} or (network is not None and network.holds(node, p))
        )

    def link_bytes(self, node: int) -> int:
        """Return the bytes received plus sent by `node` so far, Ethernet headers included. Needs `namespaces=True`."""
        return self._links.link_bytes(node)

    def limit_links(self, mbit_per_s: int | None, **queue: int) -> None:
        """
        Limit every node's link in each direction from now on; `None` removes the limit. Needs `namespaces=True`.

        `queue_bytes` is the length of a link's queue; a short one drops packets.
        """
        self._links.limit_links(mbit_per_s, **queue)

    def limit_link(self, node: int, mbit_per_s: int) -> None:
        """Limit the link of one node, or of one of `more_hosts`, as `limit_links` does."""
        self._links.limit_link(node, mbit_per_s)

    def cut_link(self, node: int) -> None:
        """Let no byte pass between one node and the others any more. Needs `namespaces=True`."""
        self._links.cut_link(node)

    def lost_share(self, node: int) -> float:
        """Return the share of packets that the link of `node` lost under its limit. Needs `namespaces=True`."""
        return self._links.lost_share(node)

    def tmpdir(self, node: int) -> Path:
        """Return the `TMPDIR` of the ranks of `node`, as this process sees it; `close` removes it."""
        return self._network.tmpdir(node) if self._network else self._private / f"node{node}"

    def shared_memory(self, node: int) -> Path:
        """Return the /dev/shm of `node`, as this process sees it. Without namespaces it is the computer's own."""
        return self._network.shared_memory(node) if self._network else SHARED_MEMORY

    # ---- inside

    @property
    def _links(self) -> Namespaces:
        if self._network is None:
            raise RuntimeError(
                "nodes without namespaces share one loopback: Nodes(namespaces=True) has links"
            )
        return self._network

    @property
    def _log_folder(self) -> Path:
        return self.folder / f"launch{max(self._num_launches - 1, 0)}"

    def _marker(self, node: int) -> str:
        return f"{self._private.name}-node{node}"

    def _where(self, rank: int) -> str:
        if not 0 <= rank < self.spec.num_ranks:
            raise ValueError(
                f"there is no rank {rank}: these nodes have ranks 0 to {self.spec.num_ranks - 1}"
            )
        return f"rank {rank} (node {self.spec.node_of(rank)})"

    def _running_nodes(self) -> list[int]:
        return [node for node, launcher in enumerate(self._launchers) if launcher.poll() is None]

    def _all_pids(self) -> list[int]:
        return [pid for node in range(self.spec.num_nodes) for pid in self.pids(node)]

    def _kill_all(self) -> list[int]:
        """Send SIGKILL to all live processes and return their pids. Repeat it: a process may fork meanwhile."""
        pids = self._all_pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids


def handles(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal."""
    caught = re.search(r"^SigCgt:\s*(\w+)$", _read(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _environment(pid: int) -> list[bytes]:
    """Return the variables that a live process was started with; empty for a zombie or an unreadable process."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _read(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def _tail(text: str) -> str:
    lines = text.splitlines()
    # stacks are longer than the end that matters without them
    stacks = next((n for n, line in enumerate(lines) if "hread 0x" in line), len(lines))
    return "\n".join(lines[min(stacks, max(0, len(lines) - TAIL_LINES)) :])
