"""The limit of open files, connections to the store, and what a rank shows of itself in /proc."""

import errno
import gc
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta

import pytest
from beating import Link
from forks import FORK, forked
from store_host import topology_of
from torch.distributed import DistNetworkError, TCPStore
from waiting import HANG_S, until

from trl_multinode.run import store as run_store
from trl_multinode.run.heartbeats.frames import bytes_written, innermost_frames, work_of
from trl_multinode.run.heartbeats.node_slots import NAME, NodeSlots
from trl_multinode.run.limits import file_limit_cure, raise_file_limit
from trl_multinode.run.node_memory import open_shared
from trl_multinode.run.reconnecting import StoreConnection, prefixed
from trl_multinode.run.store import connect_store
from trl_multinode.run.topology import Topology

FEW_FILES, CLIENTS = 48, 50
LOST = f"{os.strerror(errno.EPIPE)}|{os.strerror(errno.ECONNRESET)}|recv"  # as torch gives it


@pytest.mark.parametrize("raised", [True, False])
def test_a_launcher_with_a_low_limit_of_files_serves_all_ranks_once_a_rank_has_raised_it(
    tmp_path, monkeypatch, raised
):
    monkeypatch.setattr(run_store, "STORE_TIMEOUT_S", 60.0 if raised else 2.0)

    def connect_all(port: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))  # its own; the launcher's is low
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if raised:
            raise_file_limit(launched=True)
        clients = [connect_store(topology_of(1), 0) for _ in range(CLIENTS)]
        clients[-1].set("all", "connected")
        print("all connected", flush=True)

    def launcher(_: int) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        inherited = max(map(int, os.listdir("/proc/self/fd")))  # from this test's process
        # numbers that are free below would come on top
        while os.open(os.devnull, os.O_RDONLY) < inherited:
            pass
        resource.setrlimit(resource.RLIMIT_NOFILE, (inherited + FEW_FILES, hard))
        store = TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            timeout=timedelta(seconds=HANG_S),
            wait_for_workers=False,
        )
        rank = FORK.Process(target=connect_all, args=(store.port,))
        rank.start()
        rank.join()

    with forked(launcher, 1, tmp_path) as (one,):
        assert one.wait() == 0
        assert ("all connected" in one.text) == raised, one.text
        if not raised:
            assert (
                "PeerFailureError: node 0, rank 1 cannot connect to the run's store at 127.0.0.1:"
                in one.text
            )
            assert file_limit_cure(4) in one.text


@pytest.mark.nightly
def test_the_cure_grows_with_the_run():
    assert "`ulimit -n 4096`" in file_limit_cure(4)
    assert "no file descriptors left for 2044 ranks" in file_limit_cure(
        2044
    ) and "-n 6196" in file_limit_cure(2044)


@pytest.mark.nightly
@pytest.mark.real
def test_a_shell_between_launcher_and_rank_does_not_hide_the_launcher():
    code = "import os; from trl_multinode.run import limits; print(limits.launchers()[-1])"
    shell = ["sh", "-c", f"{sys.executable} -c '{code}'; true"]
    assert (
        int(subprocess.run(shell, capture_output=True, text=True, check=True).stdout) == os.getpid()
    )


# ---- connections that are reset


@pytest.fixture
def link(store, monkeypatch):
    link = Link(store.port)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(link.port))
    yield link
    link.close()


def test_a_call_is_repeated_after_a_reset_also_below_a_prefix(link, capsys):
    client = connect_store(topology_of(2), 0)
    below = prefixed("7", client)
    below.set("key", "before")
    assert link.reset()
    assert below.get("key") == b"before" and client.get("7/key") == b"before"
    assert link.reset()
    assert client.add("count", 1) == 1 and below.multi_get(["key"]) == [b"before"]
    out = capsys.readouterr().out
    assert (
        out.count("node 1, rank 2: a connection to the run's store was reset; opened again after")
        == 2
    )


@pytest.mark.nightly
def test_an_idle_connection_is_probed(link):
    client = connect_store(topology_of(2), 0)
    client.set("key", "")
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as end:
                if end.family != socket.AF_UNIX and end.getpeername()[1] == link.port:
                    found.append(end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
    assert found == [1]
    assert client.get("key") == b""  # the socket is still torch's


def test_a_store_that_is_gone_is_found_without_waiting_for_a_limit(store, link, monkeypatch):
    """torch's own client would try again for its whole limit, which would hang here."""
    monkeypatch.setattr(run_store, "STORE_TIMEOUT_S", 2 * HANG_S)
    monkeypatch.setattr(StoreConnection, "limit_s", 2 * HANG_S)
    client = connect_store(topology_of(2), 0)
    client.set("key", "")
    link.close()
    with pytest.raises(DistNetworkError, match=LOST):
        client.get("key")


def test_a_store_that_cannot_be_reached_is_given_up_after_the_limit(link, monkeypatch):
    monkeypatch.setattr(StoreConnection, "limit_s", 1.0)
    client = connect_store(topology_of(2), 0)

    attempts = []

    def unreachable(address, limit_s):
        attempts.append(address)
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    link.reset()
    with pytest.raises(DistNetworkError, match=LOST):
        client.get("key")
    assert attempts[1:] and set(attempts) == {("127.0.0.1", link.port)}


# ---- what a rank shows


def test_the_work_of_a_process_grows_only_while_it_works():
    busy = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    try:
        first = work_of(busy.pid)[0]
        until(lambda: work_of(busy.pid)[0] > first + 5)
        os.kill(busy.pid, signal.SIGSTOP)
        until(lambda: work_of(busy.pid)[1] == "T")
        stopped = work_of(busy.pid)
        assert work_of(busy.pid) == stopped
    finally:
        busy.kill()
        busy.wait()
    assert work_of(busy.pid) is None


@pytest.mark.nightly
def test_the_frames_are_the_innermost_ones_of_the_main_thread():
    def inner() -> str:
        return innermost_frames()

    frames = inner().split(" < ")
    assert len(frames) == 3
    # here the main thread reads them itself
    assert frames[1].endswith(" in innermost_frames")
    assert frames[2].startswith("tests/test_limits.py:") and frames[2].endswith(" in inner")


def test_a_main_thread_without_frames_as_at_the_end_of_the_interpreter_has_none(monkeypatch):
    monkeypatch.setattr(sys, "_current_frames", lambda: {})
    assert innermost_frames() == ""


@pytest.mark.parametrize("collects", [True, False])
def test_no_collection_begins_while_frames_are_read(monkeypatch, collects):
    """Until Python 3.11.9 its finalizers could let a thread start, and both waited for ever."""
    seen = []

    def current_frames() -> dict:
        seen.append(gc.isenabled())
        return {}

    monkeypatch.setattr(sys, "_current_frames", current_frames)
    if not collects:
        gc.disable()
    try:
        innermost_frames()
        assert (seen, gc.isenabled()) == ([False], collects)
    finally:
        gc.enable()


def test_bytes_that_a_save_writes_are_counted_before_the_disk_has_them(tmp_path):
    before = bytes_written()
    (tmp_path / "model").write_bytes(bytes(3 * 2**20))
    assert bytes_written() - before >= 3 * 2**20


def test_ranks_of_a_node_read_each_others_slots(tmp_path, store):
    def body(rank: int) -> list:
        topology = Topology(rank, 2, rank, 2, 0, 1, launched=False)
        client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        slots = NodeSlots(topology)
        until(lambda: slots.open(client))
        slots.write({"rank": rank, "frames": "x" * (5000 * rank), "left": ""})
        slots.touch(5.0 + rank)
        until(lambda: [slot["at"] for slot in slots.read().values()] == [5.0, 6.0])
        found = [slots.read()[0]["rank"], len(slots.read()[1]["frames"])]
        client.set(f"done/{rank}", "")
        client.wait([f"done/{1 - rank}"])
        return found

    with forked(body, 2, tmp_path) as ranks:
        assert [rank.result for rank in ranks] == [[0, 200]] * 2  # the frames are cut to fit


@pytest.mark.parametrize(
    "what", ["a file", "other memory", "too short", "a path", "no number", "nothing"]
)
def test_nothing_but_the_memory_of_a_rank_is_opened_for_a_name_in_the_store(tmp_path, what):
    """Whoever reaches the port of the store can write there: a file of the user would be overwritten."""
    file = tmp_path / "precious"
    file.write_bytes(bytes(8192))
    handle = {
        "a file": lambda: os.open(file, os.O_RDWR),
        "other memory": lambda: os.memfd_create("other"),
        "too short": lambda: os.memfd_create(NAME),
    }.get(what, lambda: os.open("/dev/null", os.O_RDWR))()
    place = {"a path": str(file), "no number": "../precious 1", "nothing": ""}.get(
        what, f"{os.getpid()} {handle}"
    )
    with pytest.raises(OSError, match="store|not the memory|bytes"):
        open_shared(place, NAME, 8192)
    os.close(handle)
    assert file.read_bytes() == bytes(8192)
