"""Checks when a run begins: one run per `output_dir`, which every node can write; versions that agree."""

import ctypes
import errno
import json
import os
import time
from pathlib import Path

import pytest
from forks import forked
from refusals import refused
from store_host import RANKS, begin_early
from waiting import HANG_S, until

from multinode_kit.namespaces import namespaces_available
from trl_multinode import errors
from trl_multinode.run import owner, versions
from trl_multinode.run import store as run_store
from trl_multinode.run.begin import check_writable
from trl_multinode.run.endings import exit_codes
from trl_multinode.tools.differences import differences


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    """A rank that has failed waits 3 s for the others."""
    monkeypatch.setattr(run_store, "GRACE_S", 3.0)


@pytest.mark.parametrize("how", ["missing", pytest.param("read-only", marks=pytest.mark.real)])
def test_row_35_an_output_dir_that_one_node_cannot_write_ends_all(tmp_path, store, how):
    if how == "read-only" and (reason := namespaces_available()):
        pytest.skip(reason)
    (tmp_path / "mounted").mkdir()
    (tmp_path / "a file").touch()

    def body(rank: int) -> None:
        folder = tmp_path / "mounted" / "run"
        if rank // 2 == 1 and how == "read-only":
            mount_read_only(tmp_path / "mounted")
        if rank // 2 == 1 and how == "missing":
            folder = tmp_path / "a file" / "run"
        begin_early(rank, store, folder)
        time.sleep(HANG_S)

    with forked(body, RANKS, tmp_path) as ranks:
        code = exit_codes.DISK if how == "read-only" else exit_codes.CONFIGURATION
        assert [rank.wait() for rank in ranks] == [code] * RANKS, ranks[2].text
        (line,) = {rank.text.splitlines()[-1] for rank in ranks}
        assert "node 1, rank 2, phase set-up: " in line and "`output_dir`" in line


def mount_read_only(folder: Path) -> None:
    """In this process only."""
    libc, new_mounts, private, read_only = (
        ctypes.CDLL(None, use_errno=True),
        0x20000,
        (1 << 18) | (1 << 14),
        1,
    )
    assert libc.unshare(new_mounts) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, private, None) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"tmpfs", bytes(folder), b"tmpfs", read_only, None) == 0, os.strerror(
        ctypes.get_errno()
    )


@pytest.mark.nightly
def test_a_full_disk_at_the_start_ends_no_run_that_may_save_nothing(tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "touch", full)
    check_writable(tmp_path / "_multinode", 0)
    assert "node 0" in caplog.text and "No space left on device" in caplog.text


def own(folder: Path) -> None:
    owner.claim(folder, lambda cause, code: print(code, cause, flush=True))
    print("claimed", flush=True)
    time.sleep(HANG_S)


def test_row_two_runs_one_output_dir_the_second_is_refused_and_a_dead_one_taken_over_at_once(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(owner, "DYING_S", 0.5)
    with forked(lambda rank: own(tmp_path), 1, tmp_path) as (first,):
        first.wait_for("claimed")
        with refused("output_dir", "`output_dir`"):
            owner.claim(tmp_path, print)
        first.process.kill()  # its file stays
        first.process.join()
        assert json.loads((tmp_path / "owner.json").read_text())["pid"] == first.process.pid
        # A wait for another host would find that the file does not change, and take it over too, but it is reported
        capsys.readouterr()
        owner.claim(tmp_path, print).release()
        assert capsys.readouterr().out == ""


def test_the_trainers_of_a_process_are_one_owner_and_the_last_one_leaves_nothing(tmp_path):
    first, second = owner.claim(tmp_path, print), owner.claim(tmp_path / "." / "", print)
    assert first is second
    first.release()
    assert (tmp_path / "owner.json").exists()
    second.release()
    assert not (tmp_path / "owner.json").exists()
    third = owner.claim(tmp_path, print)
    assert third is not first
    third.release()


def of_another_host(folder: Path) -> dict:
    content = {"host": "node-a", "pid": 4242, "boot": "another", "token": "theirs", "count": 1}
    owner.write_whole(folder / "owner.json", content)
    return content


def test_row_two_runs_on_two_hosts_a_live_one_refuses_and_a_dead_one_is_taken_over(
    tmp_path, monkeypatch, capsys
):
    """Between hosts no lock is seen: the file decides, and it must be the host's clock that does not."""
    monkeypatch.setattr(owner, "TAKEN_OVER_AFTER_S", 2.0)
    of_another_host(tmp_path)
    start = time.monotonic()
    claimed = owner.claim(tmp_path, print)
    assert time.monotonic() - start >= 2.0
    assert "node-a (pid 4242)" in capsys.readouterr().out
    claimed.release()
    monkeypatch.setattr(owner, "TAKEN_OVER_AFTER_S", HANG_S)

    def other(rank: int) -> None:
        content = of_another_host(tmp_path)
        print("there", flush=True)
        while True:
            time.sleep(0.5)
            content["count"] += 1
            owner.write_whole(tmp_path / "owner.json", content)

    with forked(other, 1, tmp_path) as (theirs,):
        theirs.wait_for("there")
        with pytest.raises(errors.ConfigurationError, match=r"host node-a, pid 4242\."):
            owner.claim(tmp_path, print)


@pytest.mark.nightly
def test_a_run_that_was_suspended_until_another_took_its_folder_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "REWRITE_EVERY_S", 0.2)
    lost: list[str] = []
    claimed = owner.claim(tmp_path, lambda cause, code: lost.append(f"{code} {cause}"))
    until(
        lambda: json.loads((tmp_path / "owner.json").read_text())["count"] > 1,
        "the owner to write again",
    )

    def is_lost() -> bool:
        # again, because the first one may come between a read and a write of the other
        of_another_host(tmp_path)
        return bool(lost)

    until(is_lost)
    assert lost[0].startswith("3 ConfigurationError: ") and "host node-a, pid 4242" in lost[0]
    claimed.release()
    assert json.loads((tmp_path / "owner.json").read_text())["token"] == "theirs"


@pytest.mark.nightly
def test_a_run_whose_disk_is_full_still_owns_its_folder(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(owner, "write_whole", full)
    monkeypatch.setattr(owner, "DYING_S", 0.3)
    claimed = owner.claim(tmp_path, print)

    def second(rank: int) -> str:
        try:
            owner.OutputOwner(tmp_path, print).claim()
        except errors.ConfigurationError as error:
            return str(error)
        return "claimed"

    with forked(second, 1, tmp_path) as (other,):
        assert f"`output_dir` {tmp_path.parent}" in other.result
    claimed.release()


# ---- versions of libraries


def test_row_28_versions_of_many_nodes_are_one_short_line():
    here = versions.local_versions()
    assert {
        "torch",
        "trl",
        "vllm",
        "deepspeed",
        "accelerate",
        "peft",
        "transformers",
        "python",
        "cuda",
    } <= set(here)
    names = [str(node) for node in range(64)]
    assert differences([here, here, here], names[:3]) == []
    nodes = [{"trl": "1.16.0", "torch": "2.13.0+cpu"} for _ in range(64)]
    nodes[7] = {"trl": "1.15.2", "torch": "2.13.0+cu130"}
    trl, torch = differences(nodes, names)
    assert str(trl) == "trl: 1.16.0 on nodes 0, 1, 2, 3, 4, 5, 6, 8 and 55 more, 1.15.2 on node 7"
    assert (trl.is_error, torch.is_error) == (True, False)
    assert differences(nodes[:7], names[:7]) == []
