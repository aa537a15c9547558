"""Row 33: a full disk is named with its path and free bytes on all ranks, and ends no run that saves nothing."""

import errno
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from forks import forked
from safetensors.torch import save_file
from store_host import RANKS, StoreHost, enter
from waiting import HANG_S

from multinode_kit.engines import FAKE
from multinode_kit.nodes import Nodes
from trl_multinode.engine.run_folder import RunFolder
from trl_multinode.errors import DiskError
from trl_multinode.run import disk
from trl_multinode.run import store as run_store
from trl_multinode.run.disk import as_disk_error, written_folders
from trl_multinode.run.endings.exit_codes import DISK, code_of
from trl_multinode.saving.checkpoint_files import newest_whole

SCRIPT = Path(__file__).parent.parent / "e2e" / "scripts" / "continued.py"
BIG = torch.zeros(2**20)


@contextmanager
def small_disk(mib: int) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="s"))  # short, for the paths of sockets
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode != 0:
        folder.rmdir()
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        # An error that a test has caught may keep a file open
        subprocess.run(["umount", "--lazy", folder], check=True)
        folder.rmdir()


@pytest.fixture
def small():
    with small_disk(1) as folder:
        yield folder


def write_bytes(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))


WRITERS = {
    "torch": lambda path: torch.save(BIG, path),
    "safetensors": lambda path: save_file({"weight": BIG}, path),
    "Python": write_bytes,
}


@pytest.mark.real
@pytest.mark.parametrize("writer", WRITERS)
def test_row_33_a_full_disk_is_named_with_path_and_free_bytes(small, writer):
    with pytest.raises(Exception) as seen:  # noqa: PT011 - each library has its own
        WRITERS[writer](small / "weights")
    error = as_disk_error(seen.value, {"`output_dir`": small})
    assert isinstance(error, DiskError) and code_of(error) == DISK
    assert f"{small} (`output_dir`), " in str(error) and " bytes free (" in str(error)
    assert type(seen.value).__name__ in str(error)  # what the library said is still there


def test_row_33_the_path_of_the_error_itself_comes_first(tmp_path):
    error = as_disk_error(
        OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "a")), {"TMPDIR": Path("/tmp")}
    )
    assert f"(quota): {tmp_path}/a, " in str(error) and "TMPDIR" not in str(error)


def test_row_33_an_error_that_was_caused_by_a_full_disk_counts_too():
    error = RuntimeError("the checkpoint failed")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    error = as_disk_error(error, written_folders("out"))
    assert isinstance(error, DiskError) and code_of(error) == DISK


@pytest.mark.real
def test_row_33_a_full_temporary_folder_is_named(small, monkeypatch):
    """Where the engines' sockets and specs are written."""
    monkeypatch.setattr(tempfile, "tempdir", str(small))
    folder = RunFolder(0)
    with pytest.raises(OSError, match="No space left") as seen:
        write_bytes(folder.path / "engine0.json")
    assert f"{small} (TMPDIR), 0 bytes free" in str(
        as_disk_error(seen.value, written_folders("out"))
    )


@pytest.mark.parametrize(
    "error",
    [
        # for another reason
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
        OSError(errno.ENOENT, "No such file or directory"),
        ValueError("full"),
    ],
)
def test_row_33_other_errors_stay_as_they_are(error, monkeypatch):
    monkeypatch.setattr(disk, "NEARLY_FULL", 0)
    assert as_disk_error(error, written_folders("out")) is error


def test_row_33_all_ranks_name_the_disk_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(run_store, "GRACE_S", 1.5)
    store = StoreHost()

    def body(rank: int) -> None:
        watch = enter(rank, store)
        watch.explain = lambda error: as_disk_error(error, {"`output_dir`": tmp_path})
        with watch.guard():
            if rank == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            time.sleep(HANG_S)

    with forked(body, RANKS, tmp_path) as ranks:
        codes = {rank.wait() for rank in ranks}
        (line,) = {rank.text.splitlines()[-1] for rank in ranks}
    store.end()
    assert codes == {DISK}
    assert line.startswith(
        "[trl_multinode] the run failed: node 1, rank 2, phase reward: DiskError: "
    )
    assert f" {tmp_path} (`output_dir`)" in line


# ---- a run that saves nothing goes on -------------------------------------------------------------------------------

PRINTS = {
    "a rank": "from trl_multinode.run.reporter import report, show\nfor _ in range(3): report('a'); show('b')",
    "a progress bar": (
        "from trl_multinode.run.reporter import show\n"
        "def write(text): raise OSError(28, 'No space left on device')\n"
        "for _ in range(3): show('b', write)"
    ),
    "an engine": (
        "from trl_multinode.wire.tolerant_output import tolerate_full_disk\ntolerate_full_disk()\n"
        "for _ in range(3): print('a' * 10000, flush=True)"
    ),
}


@pytest.mark.real
@pytest.mark.parametrize("who", PRINTS)
def test_row_33_a_full_disk_under_the_log_ends_nothing(who):
    code = f"import os\n{PRINTS[who]}\nprint('goes on', file=os.fdopen(2, 'w'), flush=True)\nos._exit(0)"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=HANG_S,
        )
    assert done.returncode == 0 and "goes on" in done.stderr, done.stderr
    assert done.stderr.count("lines") == (who != "an engine"), done.stderr


@pytest.mark.zero3
@pytest.mark.two_node
@pytest.mark.nightly
def test_row_33_a_disk_that_fills_up_ends_a_save_and_nothing_else(tmp_path):
    """Two runs on one small disk, with their logs and timings: one without checkpoints, then one with them."""
    run = {
        "prompts": 8, "num_train_epochs": 2, "per_device_train_batch_size": 4, "steps_per_generation": 1,
        "gradient_accumulation_steps": 1, "max_steps": 4, "max_completion_length": 8, "max_staleness": 0, "fill": 2,
    }  # fmt: skip
    jobs = [{"name": "saves_nothing", "save_strategy": "no"}, {"name": "saves", "save_steps": 1}]
    environment = {"TRL_MULTINODE_ENGINE_MODULE": FAKE}
    with (
        small_disk(48) as small,
        Nodes(2, 1, folder=tmp_path, env=environment, forked=True) as nodes,
    ):
        (tmp_path / "out").symlink_to(small)
        nodes.launch(
            SCRIPT, str(tmp_path), json.dumps([run | {"output": "out/a"} | job for job in jobs])
        )
        assert 0 not in nodes.wait(timeout_s=HANG_S)
        logs = [nodes.rank_log(rank) for rank in range(2)]
        assert newest_whole(small / "a") == small / "a" / "checkpoint-2"
        codes = [re.findall(r"exitcode +: (-?\d+)", nodes.launcher_log(node)) for node in range(2)]
        assert codes == [["7"], ["7"]]
    done = json.loads((tmp_path / "saves_nothing_rank0.json").read_text())
    assert list(done["steps"]) == ["1", "2", "3", "4"]
    assert all("lines of phases are missing" in log for log in logs)
    (line,) = {log.splitlines()[-1] for log in logs}
    assert "phase checkpoint: DiskError: " in line
    assert "out/a (`output_dir`), " in line or "out/a/checkpoint-3" in line, line
