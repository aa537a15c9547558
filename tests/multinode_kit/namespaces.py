"""Network namespaces as nodes, each with its own address, link, byte counters, `TMPDIR` and /dev/shm. Needs root."""

import ctypes
import functools
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
INTERFACE = "eth0"
IP_LIMIT_S = 20.0

# `ip netns exec` gives each command a mount namespace of its own, so these two mounts end with the node's processes.
# They hide the files that the host and the other nodes keep under the same two paths.
ENTER = 'mount --bind "$1" "$2" && mount --bind "$3" /dev/shm && shift 3 && exec "$@"'

# For a process that is already running, the same in two steps: libc joins the network and leaves the caller's mount
# namespace, then a shell in the new one does what `ip netns exec` and the command above do
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MOUNT = 'mount --make-rslave / && umount -l /sys && mount -t sysfs sysfs /sys && mount --bind "$1" "$2" && '
MOUNT += 'mount --bind "$3" /dev/shm'

# Without IPv6, new interfaces send nothing by themselves, so the byte counters hold the run's bytes only; lo keeps ::1
NO_IPV6 = "file=/proc/sys/net/ipv6/conf/default/disable_ipv6; [ ! -e $file ] || echo 1 > $file"


class Namespaces:
    """
    One network namespace per node, joined by a bridge in one more namespace (the hub).

    The host's own network stays unchanged, its firewall does not see the traffic, and deleting the namespaces also
    removes links and bridge. Needs root; call [`namespaces_available`] first.

    Args:
        name (`str`):
            Short name, unique on this machine; the namespaces are called `<name>-node<k>` and `<name>-hub`.
        num_nodes (`int`):
            Number of nodes, 254 at most.

    Raises:
        RuntimeError: a step of the set-up failed; the results of the steps before it are removed.
    """

    def __init__(self, name: str, num_nodes: int):
        self.name, self.num_nodes = name, num_nodes
        # holds the nodes' private folders, which a test can read
        self._storage = SHARED_MEMORY / name
        try:
            self._make_hub()
            for node in range(num_nodes):
                self._make_node(node)
        except BaseException:
            self.close()
            raise

    @property
    def hub(self) -> str:
        return f"{self.name}-hub"

    def namespace(self, node: int) -> str:
        return f"{self.name}-node{node}"

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def tmpdir(self, node: int) -> Path:
        """Return the node's private temporary folder, as seen from outside of the node."""
        return self._storage / f"node{node}" / "tmp"

    def shared_memory(self, node: int) -> Path:
        """Return the node's private /dev/shm, as seen from outside of the node."""
        return self._storage / f"node{node}" / "shm"

    def enter(self, node: int, tmpdir: Path) -> list[str]:
        """
        Return the words to put before a command to run it on `node`. The command keeps the pid of the started process.

        Args:
            node (`int`):
                Index of the node.
            tmpdir (`Path`):
                Existing folder. For the command, the node's private temporary folder is mounted over it.
        """
        mounts = self.mounts(node, tmpdir)
        return [
            "ip",
            "netns",
            "exec",
            self.namespace(node),
            "/bin/sh",
            "-c",
            ENTER,
            "enter-node",
            *mounts,
        ]

    def mounts(self, node: int, tmpdir: Path) -> list[str]:
        """Return the private temporary folder, the path where the node sees it, and the private /dev/shm."""
        return [str(self.tmpdir(node)), str(tmpdir), str(self.shared_memory(node))]

    def link_bytes(self, node: int) -> int:
        """Return the bytes received plus the bytes sent by the node since it was made, Ethernet headers included."""
        link = json.loads(
            _ip("-n", self.namespace(node), "-json", "-statistics", "link", "show", INTERFACE)
        )[0]
        return link["stats64"]["rx"]["bytes"] + link["stats64"]["tx"]["bytes"]

    def limit_links(self, mbit_per_s: int | None, queue_bytes: int = 64 << 20) -> None:
        """Limit every link to `mbit_per_s` in each direction from now on; `None` removes the limit.

        A queue of 64 MiB is long enough to drop nothing; a short one drops the packets that do not fit.
        """
        for node in range(self.num_nodes):
            self.limit_link(node, mbit_per_s, queue_bytes)

    def limit_link(self, node: int, mbit_per_s: int | None, queue_bytes: int = 64 << 20) -> None:
        """Limit the link of one node as [`limit_links`] does."""
        for namespace, device in self._ends(node):
            if mbit_per_s is None:
                subprocess.run(
                    ["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"],
                    capture_output=True,
                )
            else:
                bucket = _bucket(mbit_per_s, queue_bytes)
                _run(*f"tc -n {namespace} qdisc replace dev {device} root".split(), *bucket)

    def cut_link(self, node: int) -> None:
        """Let no byte pass between one node and the others any more; neither end gets a word of it."""
        _ip("-n", self.hub, "link", "set", f"node{node}", "nomaster")

    def lost_share(self, node: int) -> float:
        """Return the share of packets that the node's link has dropped in both directions under its present limit."""
        shown = [
            _run(*f"tc -n {end[0]} -s -json qdisc show dev {end[1]}".split())
            for end in self._ends(node)
        ]
        qdiscs = [qdisc for end in shown for qdisc in json.loads(end)]
        dropped = sum(qdisc["drops"] for qdisc in qdiscs)
        return dropped / max(dropped + sum(qdisc["packets"] for qdisc in qdiscs), 1)

    def _ends(self, node: int) -> tuple[tuple[str, str], tuple[str, str]]:
        """Return namespace and device of both ends of the node's link."""
        return (self.namespace(node), INTERFACE), (self.hub, f"node{node}")

    def holds(self, node: int, pid: int) -> bool:
        """Return whether a live process (not a zombie) runs on `node`, whatever its environment and parents are."""
        try:
            theirs, ours = (
                os.stat(f"/proc/{pid}/ns/net"),
                os.stat(f"/run/netns/{self.namespace(node)}"),
            )
        except OSError:  # the process has ended, or the namespace is gone
            return False
        return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)

    def close(self) -> None:
        """Remove namespaces, links and folders. End the nodes' processes first: each keeps its namespace alive."""
        existing = {entry["name"] for entry in json.loads(_ip("-json", "netns", "list") or "[]")}
        for namespace in [*(self.namespace(node) for node in range(self.num_nodes)), self.hub]:
            if namespace in existing:
                _ip("netns", "delete", namespace)
        shutil.rmtree(self._storage, ignore_errors=True)

    def _make_hub(self) -> None:
        _add(self.hub)
        _ip("-n", self.hub, "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
        _ip("-n", self.hub, "link", "set", "bridge", "up")

    def _make_node(self, node: int) -> None:
        self.tmpdir(node).mkdir(parents=True)
        self.shared_memory(node).mkdir()
        inside, port = self.namespace(node), f"node{node}"
        _add(inside)
        _ip("-n", inside, "link", "set", "lo", "up")
        _ip(
            "-n",
            inside,
            "link",
            "add",
            INTERFACE,
            "type",
            "veth",
            "peer",
            "name",
            port,
            "netns",
            self.hub,
        )
        _ip("-n", self.hub, "link", "set", port, "master", "bridge", "up")
        _ip("-n", inside, "link", "set", INTERFACE, "up")
        _ip("-n", inside, "address", "add", f"{self.address(node)}/24", "dev", INTERFACE)


def enter_node(namespace: str, mounts: Sequence[str]) -> None:
    """
    Move the calling process, which may have one thread only, to a node.

    Args:
        namespace (`str`):
            Name of the node's namespace.
        mounts (`Sequence[str]`):
            Result of [`Namespaces.mounts`].
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as network:
        if libc.setns(network.fileno(), CLONE_NEWNET) != 0 or libc.unshare(CLONE_NEWNS) != 0:
            raise OSError(
                ctypes.get_errno(), f"this process cannot enter the namespace {namespace}"
            )
    _run("/bin/sh", "-c", MOUNT, "enter-node", *mounts)


def enter_namespaces_of(pid: int) -> None:
    """Move the calling process, which may have one thread only, to the network and the mounts of process `pid`."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, flag in (("net", CLONE_NEWNET), ("mnt", CLONE_NEWNS)):
        with open(f"/proc/{pid}/ns/{kind}") as theirs:
            elsewhere = not os.path.samestat(
                os.fstat(theirs.fileno()), os.stat(f"/proc/self/ns/{kind}")
            )
            if elsewhere and libc.setns(theirs.fileno(), flag) != 0:
                raise OSError(
                    ctypes.get_errno(),
                    f"this process cannot enter the {kind} namespace of process {pid}",
                )


@functools.cache
def namespaces_available() -> str | None:
    """Return `None` if [`Namespaces`] works here, else the reason. The check makes one and removes it."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "`ip` is not installed (Debian package iproute2)"
    try:
        probe = Namespaces(f"tmn-{secrets.token_hex(3)}", num_nodes=1)
        try:
            _run(*probe.enter(0, probe.tmpdir(0)), "true")
        finally:
            probe.close()
    except (RuntimeError, OSError) as error:
        return f"root may not make network namespaces here: {error}"
    return None


def _bucket(mbit_per_s: int, queue_bytes: int) -> list[str]:
    """Return tc's arguments: a token bucket of 4 ms of traffic, and its queue."""
    return f"tbf rate {mbit_per_s}mbit burst {mbit_per_s * 500} limit {queue_bytes}".split()


def _add(namespace: str) -> None:
    _ip("netns", "add", namespace)
    _ip("netns", "exec", namespace, "/bin/sh", "-c", NO_IPV6)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IP_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"`{' '.join(command)}` did not end within {IP_LIMIT_S:.0f} s") from None
    if done.returncode != 0:
        raise RuntimeError(
            f"`{' '.join(command)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}"
        )
    return done.stdout
