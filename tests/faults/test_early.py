"""Failures before the trainer exists: the watch begins with the import."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from forks import forked
from store_host import FAILED, RANKS, StoreHost, enter_early, launched_variables, topology_of
from waiting import HANG_S

from trl_multinode.run import store as run_store
from trl_multinode.run.endings import exit_codes
from trl_multinode.run.store import RunStore, connect_store

pytestmark = pytest.mark.real  # each starts an ordinary Python


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """A rank that has failed waits for the others for a short time, and no starved rank loses the store."""
    monkeypatch.setattr(run_store, "GRACE_S", 3.0)
    monkeypatch.setattr(run_store, "STORE_TIMEOUT_S", 60.0)


def run_script(text: str, folder: Path, store: StoreHost, rank: int) -> subprocess.CompletedProcess:
    """Run a script as one rank, as a launcher starts it."""
    path = folder / "script.py"
    path.write_text("import os, sys\n" + textwrap.dedent(text))
    environment = {**os.environ, **launched_variables(rank, store)}
    command = [sys.executable, "-u", str(path)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)


LATE_HOOK = "sys.excepthook = lambda *error: print('mine')"
SCRIPT_ERRORS = {
    "a missing file": (
        "open('/no/data')",
        "FileNotFoundError: [Errno 2] No such file or directory: '/no/data'",
    ),
    "sys.exit": ("sys.exit(3)", "SystemExit: the script of this rank ended with exit code 3"),
    "a hook of the script's own": (
        f"{LATE_HOOK}\nraise ValueError('no data')",
        "ValueError: no data",
    ),
}


@pytest.mark.parametrize("error", SCRIPT_ERRORS)
def test_row_script_error_before_the_trainer_ends_all_nodes(tmp_path, store, error):
    """The import loads nothing and does not wait. The thread has to load torch, which may take a while here."""
    code, cause = SCRIPT_ERRORS[error]

    def others(rank: int) -> None:
        if rank != 3:
            enter_early(rank, store)
            time.sleep(HANG_S)

    with forked(others, RANKS, tmp_path) as ranks:
        script = run_script(
            f"""
import trl_multinode
assert not {{"torch", "transformers", "trl", "numpy"}} & set(sys.modules)
{code}
""",
            tmp_path,
            store,
            rank=3,
        )
        assert [script.returncode, *(rank.wait() for rank in ranks[:3])] == [
            exit_codes.USER_CODE
        ] * RANKS
        lines = {
            text.splitlines()[-1] for text in (script.stderr, *(rank.text for rank in ranks[:3]))
        }
        assert len(lines) == 1, lines
        assert lines.pop().startswith(f"{FAILED}node 1, rank 3, phase before the trainer: {cause}")


def test_a_script_that_ends_well_waits_until_its_watch_has_imported_torch(
    tmp_path, store, monkeypatch
):
    """An interpreter that ends inside that import aborts: code 134 for 0, and no word to the other ranks."""
    script = run_script(
        """
        import time

        class Busy:  # a machine that needs 12 s for the import
            def find_spec(name, path, target=None):
                if name == "torch":
                    time.sleep(12.0)

        sys.meta_path.insert(0, Busy)
        import trl_multinode
        """,
        tmp_path,
        store,
        rank=0,
    )
    assert script.returncode == 0, script.stderr
    for name, value in launched_variables(1, store).items():
        monkeypatch.setenv(name, value)
    assert RunStore(topology_of(1), connect_store(topology_of(1), None)).have_left([0])


def test_no_child_of_a_rank_is_watched(tmp_path, store):
    script = run_script(
        """
        import multiprocessing, subprocess
        import trl_multinode
        from trl_multinode.run.watch import early

        ask = "import trl_multinode.run.watch.early as early, sys; sys.exit(5 if early._early else 0)"
        def fail(): raise OSError("a child's own")

        if __name__ == "__main__":
            assert early._early is not None
            assert subprocess.run([sys.executable, "-c", ask]).returncode == 0
            assert subprocess.run(["sh", "-c", f"{sys.executable} -c '{ask}'; exit $?"]).returncode == 0
            for way in ("fork", "spawn"):
                child = multiprocessing.get_context(way).Process(target=fail)
                child.start()
                child.join()
                assert child.exitcode == 1
            if (child := os.fork()) == 0:
                raise OSError("a child's own")
            assert os.waitpid(child, 0)[1] == 256
        """,
        tmp_path,
        store,
        rank=0,
    )
    assert script.returncode == 0, script.stderr
    assert FAILED not in script.stdout + script.stderr


def test_a_wrapper_between_launcher_and_rank_is_no_rank_of_its_own(store):
    ask = (
        "from trl_multinode.run.watch import early; import sys; sys.exit(0 if early._early else 5)"
    )
    command = ["sh", "-c", f'{sys.executable} -c "{ask}"; exit $?']
    environment = {**os.environ, **launched_variables(0, store)}
    assert subprocess.run(command, env=environment, timeout=HANG_S).returncode == 0
    without = {**environment, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert subprocess.run(command, env=without, timeout=HANG_S).returncode == 5
