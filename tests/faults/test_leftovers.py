"""Row 38: what a killed node leaves is removed by the next start, and nothing that a living run needs."""

import mmap
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from forks import forked
from waiting import HANG_S, until

from multinode_kit.engines import ENGINE_ARGS, FAKE
from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from trl_multinode.engine.fleet import EngineFleet
from trl_multinode.engine.process import EngineProcess, wait_until_ready
from trl_multinode.engine.run_folder import RunFolder
from trl_multinode.engine.settings import save_without_weights
from trl_multinode.run.topology import EngineDevices
from trl_multinode.tools import main
from trl_multinode.wire import leftovers as module
from trl_multinode.wire import supervisor
from trl_multinode.wire.leftovers import leftovers, remove_leftovers
from trl_multinode.wire.messages import EngineSpec

SHARED_MEMORY = Path("/dev/shm")
mapped: list[mmap.mmap] = []


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A temporary folder of its own; /tmp, where other runs of this machine have theirs, is not looked at."""
    parent = Path(
        subprocess.run(
            ["mktemp", "-d", "-p", "/tmp", "tl.XXXXXX"], capture_output=True, text=True
        ).stdout.strip()
    )
    monkeypatch.setenv("TMPDIR", str(parent))
    monkeypatch.setattr(module.tempfile, "tempdir", str(parent))
    monkeypatch.setattr(module, "candidates", lambda: sorted(parent.glob("trl_multinode_*")))
    yield parent
    subprocess.run(["rm", "-rf", str(parent)], check=True)


def segment(name: str) -> Path:
    """Return a file that this process has mapped, so that tests of another worker do not see it as left behind."""
    path = SHARED_MEMORY / f"{name}{os.getpid()}"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        mapped.append(mmap.mmap(file.fileno(), 0))
    return path


@contextmanager
def owner(tmp_path, segments=(), engine: bool = False):
    """A forked process with a run folder, and the process group of its engine if it has one."""

    def body(_: int) -> None:
        folder = RunFolder(1)
        (folder.path / "engine7.shm").write_text("\n".join(map(str, segments)))
        if engine:
            save_without_weights(tiny_qwen2(300), tiny_tokenizer(), folder.path / "model")
            args = ENGINE_ARGS | {"model": str(folder.path / "model")}
            process = EngineProcess(
                EngineSpec(0, str(folder.path), os.getpid(), args, node=1),
                tmp_path / "engine.log",
                {},
                FAKE,
            )
            wait_until_ready([process], HANG_S, print)
            print(f"ENGINE {process.pid}", flush=True)
        print("READY", flush=True)
        time.sleep(HANG_S)

    with forked(body, 1, tmp_path) as (rank,):
        rank.wait_for("READY")
        yield rank


def kill(rank) -> None:
    os.kill(rank.process.pid, signal.SIGKILL)
    rank.process.join()


def lines() -> list[str]:
    said: list[str] = []
    remove_leftovers(said.append)
    return said


@pytest.mark.real
def test_row_38_the_next_start_removes_what_a_killed_node_left(places, tmp_path):
    segments = [segment("psm_test"), segment("vllm_dist_ab-tp:0-[0-1]-cpushm_")]
    other = segment("other")
    said: list[str] = []
    try:
        with owner(tmp_path, segments + [other], engine=True) as rank:
            assert lines() == [] and len(list(places.iterdir())) == 1  # its owner lives
            engine = int(rank.text.split("ENGINE ")[1].split()[0])
            os.kill(engine, signal.SIGSTOP)  # as if it had not noticed yet
            kill(rank)
            # it will remove them itself
            assert lines() == [] and all(path.exists() for path in segments)
            os.kill(engine, signal.SIGKILL)
            assert all(path.exists() for path in segments) and len(list(places.iterdir())) == 1
            until(lambda: said.extend(lines()) or said, "the end of the engine")
        assert [line.split(" MB")[0].rsplit(",", 1)[0] for line in said] == [
            "removed what killed runs left here: 1 folder(s), 2 segment(s) of shared memory"
        ]
        assert list(places.iterdir()) == [] and not any(path.exists() for path in segments)
        assert other.exists()  # a record cannot name what is not a run's
    finally:
        for path in (*segments, other):
            path.unlink(missing_ok=True)


ONE = EngineDevices(((),), shared_with_training=False)


def test_row_38_a_start_of_engines_begins_with_the_removal(places, tmp_path):
    with owner(tmp_path) as rank:
        kill(rank)
    said: list[str] = []
    settings = SimpleNamespace(devices=SimpleNamespace(per_engine=((),)))
    fleet = EngineFleet(SimpleNamespace(node=0), None, None, None, tmp_path, said.append, None)
    with pytest.raises(ZeroDivisionError):  # there is no model
        fleet.start(settings, lambda folder: 1 / 0)
    assert len(said) == 1 and list(places.iterdir()) == [fleet.folder]
    fleet._kill()
    assert list(places.iterdir()) == []


@pytest.mark.real
def test_row_38_an_engine_removes_the_folder_of_its_killed_owner(places, tmp_path):
    with owner(tmp_path, engine=True) as rank:
        kill(rank)
        until(lambda: not list(places.iterdir()), "the engine to remove the folder")


def test_row_38_clean_shows_removes_and_counts(places, tmp_path, capsys):
    memory = segment("psm_test")
    try:
        with owner(tmp_path, [memory]) as rank:
            kill(rank)
        folder, living = next(places.iterdir()), RunFolder(0)
        for dry in (["--dry-run"], []):
            assert main(["clean", *dry]) == 0
            size = 4096 + len(str(memory)) + len(module.machine())
            done = "would be removed" if dry else "removed"
            assert capsys.readouterr().out.splitlines() == [
                f"{living.path}  {len(module.machine())} bytes  kept: its run lives",
                f"{folder}  {size} bytes  {done}",
                f"  {memory}",
                f"{done}: 1 folder(s), 1 segment(s) of shared memory, {size} bytes",
            ]
            assert memory.exists() == folder.exists() == bool(dry)
        living.remove()
        assert list(places.iterdir()) == []
    finally:
        memory.unlink(missing_ok=True)


@pytest.mark.parametrize("case", ["other user", "no lock", "other machine", "open to others"])
def test_row_38_a_folder_that_may_be_anothers_stays(case, places, tmp_path, monkeypatch):
    with owner(tmp_path) as rank:
        kill(rank)
    (folder,) = places.iterdir()
    lock = folder / "owner.lock"
    if case == "other user":
        os.chown(folder, 65534, 65534)
    elif case == "no lock":
        lock.unlink()
    elif case == "other machine":
        lock.write_text("another boot")
    else:
        folder.chmod(0o777)
    assert lines() == [] and folder.exists()
    (found,) = leftovers(remove=True)
    reasons = {
        "other user": "another user",
        "no lock": "no lock",
        "other machine": "another machine",
    }
    assert reasons.get(case, "other users may write") in found.kept


def test_row_38_a_folder_is_young_until_its_lock_is_there(places):
    folder = places / "trl_multinode_n0_x"
    folder.mkdir(mode=0o700)
    assert lines() == [] and folder.exists()
    os.utime(folder, (0, 0))
    assert len(lines()) == 1 and not folder.exists()


@pytest.mark.nightly
def test_row_38_a_child_of_the_owner_does_not_hold_its_lock(places, tmp_path):
    """A loader's worker may outlive its rank."""

    def body(_: int) -> None:
        RunFolder(0)
        if os.fork() == 0:
            time.sleep(HANG_S)
            os._exit(0)
        print("READY", flush=True)
        time.sleep(HANG_S)

    with forked(body, 1, tmp_path) as (rank,):
        rank.wait_for("READY")
        (child,) = [
            int(pid)
            for pid in Path(f"/proc/{rank.process.pid}/task/{rank.process.pid}/children")
            .read_text()
            .split()
        ]
        kill(rank)
        assert (
            Path(f"/proc/{child}").exists() and len(lines()) == 1 and list(places.iterdir()) == []
        )
        os.kill(child, signal.SIGKILL)


@pytest.mark.nightly
def test_a_temporary_folder_that_is_too_long_for_vllms_sockets_gives_way_to_tmp(
    places, monkeypatch
):
    long = places / ("x" * 50)
    long.mkdir()
    monkeypatch.setattr(module.tempfile, "tempdir", str(long))
    folder = RunFolder(0)
    try:
        assert (
            folder.path.parent == Path("/tmp")
            and len(str(folder.path)) + 37 <= 107
            and list(long.iterdir()) == []
        )
    finally:
        folder.remove()
    assert not folder.path.exists()


@pytest.mark.nightly
def test_row_38_shared_memory_is_on_record_while_an_engine_starts(tmp_path, monkeypatch):
    """Owner and engine may be killed then; the process that has mapped it is a child, as vLLM's core is."""
    monkeypatch.setattr(supervisor, "RECORD_S", 0.05)
    memory, record = segment("psm_test"), tmp_path / "engine0.shm"
    script = f"import mmap; f = open('{memory}', 'r+b'); m = mmap.mmap(f.fileno(), 0); print(flush=True); input()"
    try:
        with subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child, supervisor.record_while_starting(record):  # fmt: skip
            child.stdout.readline()
            until(lambda: record.exists() and record.read_text(), "a record")
            assert record.read_text().splitlines() == [str(memory)]
            child.kill()
    finally:
        memory.unlink()


@pytest.mark.nightly
def test_two_engines_of_a_killed_owner_may_remove_its_folder_at_the_same_time(places):
    """The slower one sees records and segments that are gone when it reads them; it must end all the same."""
    folder = RunFolder(0).path
    (folder / "engine0.shm").symlink_to(folder / "gone.shm")
    (folder / "engine1.shm").write_text(f"{SHARED_MEMORY}/trl_multinode_gone\n")
    module.remove_folder(folder)
    assert not folder.exists()
