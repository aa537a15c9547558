"""Failures before the trainer exists: the watch begins with the import."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from forks import forked
from store_host import RANKS, StoreHost, enter_early, launched_variables, topology_of
from waiting import HANG_S

from trl_multinode.node_settings import NodeSettings
from trl_multinode.run import store as run_store
from trl_multinode.run.endings import exit_codes
from trl_multinode.run.topology import Topology
from trl_multinode.run.watch import arrivals, early
from trl_multinode.run.watch.watchdog import Watchdog

FAILED = "[trl_multinode] the run failed: "


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """A rank that has failed waits for the others for a short time, and no starved rank loses the store."""
    monkeypatch.setattr(run_store, "GRACE_S", 3.0)
    monkeypatch.setattr(run_store, "STORE_TIMEOUT_S", 60.0)


class Script:
    """A script in the process of one rank, as a launcher starts it."""

    def __init__(self, text: str, folder: Path, store: StoreHost, rank: int):
        path, self._log = folder / f"script{rank}.py", folder / f"script{rank}.log"
        path.write_text("import os, sys, time\n" + textwrap.dedent(text))
        with open(self._log, "w") as file:
            environment = {**os.environ, **launched_variables(rank, store)}
            command = [sys.executable, "-u", str(path)]
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)

    def wait(self) -> int:
        return self.process.wait(HANG_S)

    @property
    def text(self) -> str:
        return self._log.read_text()


@pytest.fixture
def run_script(tmp_path, store):
    scripts = []

    def run(text: str, rank: int) -> Script:
        scripts.append(Script(text, tmp_path, store, rank))
        return scripts[-1]

    yield run
    for script in scripts:
        script.process.kill()
        script.process.wait()


LATE_HOOK = "sys.excepthook = lambda *error: print('mine')"
SCRIPT_ERRORS = {
    "a missing file": ("open('/no/data')", "FileNotFoundError: [Errno 2] No such file or directory: '/no/data'"),
    "sys.exit": ("sys.exit(3)", "SystemExit: the script of this rank ended with exit code 3"),
    "a hook of the script's own": (f"{LATE_HOOK}\nraise ValueError('no data')", "ValueError: no data"),
}


@pytest.mark.real
@pytest.mark.parametrize("error", SCRIPT_ERRORS)
def test_row_script_error_before_the_trainer_ends_all_nodes(tmp_path, store, run_script, error):
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
            rank=3,
        )
        assert [script.wait(), *(rank.wait() for rank in ranks[:3])] == [exit_codes.USER_CODE] * RANKS
        lines = {text.splitlines()[-1] for text in (script.text, *(rank.text for rank in ranks[:3]))}
        assert len(lines) == 1, lines
        assert lines.pop().startswith(f"{FAILED}node 1, rank 3, phase before the trainer: {cause}")


@pytest.mark.real
def test_row_a_script_that_ends_well_without_a_trainer_waits_for_nobody(tmp_path, store, run_script):
    def others(rank: int) -> None:
        if rank != 3:
            enter_early(rank, store)
            while not (tmp_path / "now").exists():
                time.sleep(0.1)
            time.sleep(1.5)
            early._early._at_exit()

    with forked(others, RANKS, tmp_path) as ranks:
        script = run_script("import trl_multinode", rank=3)
        assert script.wait() == 0 and FAILED not in script.text
        assert all(rank.process.is_alive() for rank in ranks[:3])
        (tmp_path / "now").touch()
        assert [rank.wait() for rank in ranks[:3]] == [0, 0, 0], ranks[2].text


def test_row_a_rank_killed_before_the_trainer_is_named(tmp_path, store, monkeypatch):
    monkeypatch.setattr(
        run_store, "GRACE_S", 2 * HANG_S
    )  # all ranks wait for a dead reader, unless its neighbour counts it

    def body(rank: int) -> None:
        enter_early(rank, store)
        early.early_watch()
        time.sleep(2.0)
        print("up", flush=True)
        time.sleep(HANG_S)

    with forked(body, RANKS, tmp_path) as ranks:
        for rank in ranks:
            rank.wait_for("up")
        ranks[3].process.kill()
        assert [rank.wait() for rank in ranks[:3]] == [exit_codes.PEER_LOST] * 3
        (line,) = {rank.text.splitlines()[-1] for rank in ranks[:3]}
        assert "node 1, rank 2, phase before the trainer: the process of rank 3 ended (pid" in line


def test_row_ranks_that_have_not_imported_it_are_named_and_end_the_run(tmp_path, store, monkeypatch):
    monkeypatch.setattr(arrivals, "MISSING_EVERY_S", 1.0)
    monkeypatch.setattr(arrivals, "START_TIMEOUT_S", 4.0)

    def body(rank: int) -> None:
        if rank != 3:
            enter_early(rank, store)
        time.sleep(HANG_S)

    with forked(body, RANKS, tmp_path) as ranks:
        assert [rank.wait() for rank in ranks[:3]] == [exit_codes.PEER_LOST] * 3
        (line,) = {rank.text.splitlines()[-1] for rank in ranks[:3]}
        assert "rank 3 (node 1) did not import trl_multinode within 4 s" in line
        named = [rank.text.count("s for rank 3 (node 1) to import trl_multinode") for rank in ranks]
        assert named[2] >= 1 and named[0] + named[1] >= 1 and 0 in named[:2], named  # one rank of each side


def test_the_limit_before_a_trainer_is_the_default_of_the_setting():
    assert NodeSettings().engine_start_timeout == arrivals.START_TIMEOUT_S


def test_a_rank_that_ends_well_without_the_trainer_of_the_others_ends_the_run(tmp_path, store):
    def body(rank: int) -> None:
        enter_early(rank, store)
        if rank != 1:
            Watchdog(Topology.from_environment())
            time.sleep(HANG_S)
        time.sleep(1.0)
        early._early._at_exit()

    with forked(body, RANKS, tmp_path) as ranks:
        assert [rank.wait() for rank in ranks] == [exit_codes.USER_CODE] * RANKS
        (line,) = {rank.text.splitlines()[-1] for rank in ranks}
        assert (
            "node 0, rank 1, phase before the trainer: the script of this rank has ended without the trainer" in line
        )


def test_trainers_attach_to_the_thread_of_the_import_and_a_failure_between_them_ends_all(tmp_path, store):
    def body(rank: int) -> None:
        enter_early(rank, store)
        before = signal.getsignal(signal.SIGTERM)
        assert early.early_watch() is not None and signal.getsignal(signal.SIGTERM) is before
        first, second = (Watchdog(Topology.from_environment()) for _ in range(2))
        assert first._watch is second._watch is early.early_watch()
        assert signal.getsignal(signal.SIGTERM) is not before
        for watch in (first, second):
            watch.close()
        assert signal.getsignal(signal.SIGTERM) is before and not first._watch.stopped.is_set()
        if rank == 2:
            early._early._on_uncaught(OSError("the third trainer"))
        time.sleep(HANG_S)

    with forked(body, RANKS, tmp_path) as ranks:
        assert [rank.wait() for rank in ranks] == [exit_codes.USER_CODE] * RANKS, ranks[0].text
        assert all("rank 2, phase script: OSError: the third trainer" in rank.text for rank in ranks)


@pytest.mark.real
def test_no_child_of_a_rank_is_watched(run_script):
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
        rank=0,
    )
    assert script.wait() == 0, script.text
    assert FAILED not in script.text


@pytest.mark.real
def test_a_wrapper_between_launcher_and_rank_is_no_rank_of_its_own(store):
    ask = "from trl_multinode.run.watch import early; import sys; sys.exit(0 if early._early else 5)"
    command = ["sh", "-c", f'{sys.executable} -c "{ask}"; exit $?']
    environment = {**os.environ, **launched_variables(0, store)}
    assert subprocess.run(command, env=environment, timeout=HANG_S).returncode == 0
    without = {**environment, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert subprocess.run(command, env=without, timeout=HANG_S).returncode == 5


@pytest.mark.parametrize("is_stopped", [True, False])
def test_row_frozen_early_ends_the_ranks_that_wait_for_it(tmp_path, store, monkeypatch, is_stopped):
    monkeypatch.setattr(arrivals, "LOOK_EVERY_S", 0.2)
    monkeypatch.setattr(arrivals, "ALIVE_EVERY_S", 0.5)
    monkeypatch.setattr(arrivals, "START_TIMEOUT_S", 5.0)

    def body(rank: int) -> None:
        enter_early(rank, store)
        if rank != 3:  # it loads its data
            watch = Watchdog(topology_of(rank, launched=True), lambda: "set-up")
            with watch.guard():
                time.sleep(12.0 if not is_stopped else HANG_S)
        print("imported", flush=True)
        time.sleep(HANG_S)

    with forked(body, RANKS, tmp_path) as ranks:
        ranks[3].wait_for("imported")
        if not is_stopped:  # working is no fault, however long it takes
            for rank in ranks:
                rank.wait_for("imported")
            return
        time.sleep(2.0)
        os.kill(ranks[3].process.pid, signal.SIGSTOP)
        for rank in ranks[:3]:
            assert rank.wait() == exit_codes.PEER_LOST, rank.text
            assert "rank 3 (node 1) has shown no sign of life" in rank.text and "has no trainer yet" in rank.text
