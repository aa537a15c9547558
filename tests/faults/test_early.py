"""Failures before the trainer exists, versions of nodes, one run per `output_dir`, exit codes and ending files."""

import ctypes
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from forks import forked
from store_host import RANKS, StoreHost, topology_of
from torch.distributed import HashStore

from trl_multinode import errors
from trl_multinode.node_settings import NodeSettings
from trl_multinode.run import addresses, node_versions, owner, versions
from trl_multinode.run import store as run_store
from trl_multinode.run.begin import begin_run, check_writable
from trl_multinode.run.endings import exit_codes
from trl_multinode.run.endings.ending import Ending
from trl_multinode.run.endings.fatal import Fatal
from trl_multinode.run.topology import Topology
from trl_multinode.run.watch import arrivals, early
from trl_multinode.run.watch.watchdog import Watchdog
from trl_multinode.saving.newest import newest_whole
from trl_multinode.testing.namespaces import namespaces_available

FAILED = "[trl_multinode] the run failed: "
LIMIT_S = 30.0


@pytest.fixture
def store():
    host = StoreHost()
    yield host
    host.end()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(run_store, "GRACE_S", 3.0)
    monkeypatch.setattr(run_store, "STORE_TIMEOUT_S", 5.0)


def variables(rank: int, store: StoreHost) -> dict[str, str]:
    """What torchrun sets for a rank of 2 nodes of 2 ranks."""
    return {
        "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": str(rank // 2), "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


class Script:
    """A script in the process of one rank, as a launcher starts it."""

    def __init__(self, text: str, folder: Path, store: StoreHost, rank: int):
        path, self._log = folder / f"script{rank}.py", folder / f"script{rank}.log"
        path.write_text("import os, sys, time\n" + textwrap.dedent(text))
        with open(self._log, "w") as file:
            environment = {**os.environ, **variables(rank, store)}
            command = [sys.executable, "-u", str(path)]
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)

    def wait(self) -> int:
        return self.process.wait(3 * LIMIT_S)

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


# ---- from the import on ---------------------------------------------------------------------------------------------

LATE_HOOK = "sys.excepthook = lambda *error: print('mine')"
SCRIPT_ERRORS = {
    "a missing file": ("open('/no/data')", "FileNotFoundError: [Errno 2] No such file or directory: '/no/data'"),
    "sys.exit": ("sys.exit(3)", "SystemExit: the script of this rank ended with exit code 3"),
    "a hook of the script's own": (f"{LATE_HOOK}\nraise ValueError('no data')", "ValueError: no data"),
}


@pytest.mark.parametrize("error", SCRIPT_ERRORS)
def test_row_script_error_before_the_trainer_ends_all_nodes(tmp_path, store, run_script, error):
    """The import loads nothing and does not wait. The thread has to load torch, which may take a while here."""
    code, cause = SCRIPT_ERRORS[error]

    def others(rank: int) -> None:
        if rank != 3:
            enter_early(rank, store)
            time.sleep(4 * LIMIT_S)

    with forked(others, RANKS, tmp_path) as ranks:
        script = run_script(
            f"""
start = time.process_time()
import trl_multinode
print("imported in", round(time.process_time() - start, 2), "s of a core")
assert time.process_time() - start < 1.0 and "torch" not in sys.modules
print("the error at", time.time())
{code}
""",
            rank=3,
        )
        assert [script.wait(), *(rank.wait(LIMIT_S) for rank in ranks[:3])] == [exit_codes.USER_CODE] * RANKS
        at = float(script.text.partition("the error at")[2].split()[0])
        print(script.text.splitlines()[0], f"all ended {time.time() - at:.1f} s after the error")
        lines = {text.splitlines()[-1] for text in (script.text, *(rank.text for rank in ranks[:3]))}
        assert len(lines) == 1, lines
        assert lines.pop().startswith(f"{FAILED}node 1, rank 3, phase before the trainer: {cause}")


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
        assert [rank.wait(LIMIT_S) for rank in ranks[:3]] == [0, 0, 0], ranks[2].text


def enter_early(rank: int, store: StoreHost) -> None:
    """What the import does in a rank of a launch."""
    os.environ.update(variables(rank, store))
    early._early = None
    early.start()
    assert early._early is not None


def test_row_a_rank_killed_before_the_trainer_is_named(tmp_path, store):
    def body(rank: int) -> None:
        enter_early(rank, store)
        early.early_watch()
        time.sleep(2.0)
        print("up", flush=True)
        time.sleep(60)

    with forked(body, RANKS, tmp_path) as ranks:
        for rank in ranks:
            rank.wait_for("up")
        start = time.monotonic()
        ranks[3].process.kill()
        assert [rank.wait(LIMIT_S) for rank in ranks[:3]] == [exit_codes.PEER_LOST] * 3
        print(f"all ended after {time.monotonic() - start:.1f} s")
        assert time.monotonic() - start < 2.9, "the others wait for a reader that is dead"
        (line,) = {rank.text.splitlines()[-1] for rank in ranks[:3]}
        assert "node 1, rank 2, phase before the trainer: the process of rank 3 ended (pid" in line


def test_row_ranks_that_have_not_imported_it_are_named_and_end_the_run(tmp_path, store, monkeypatch):
    monkeypatch.setattr(arrivals, "MISSING_EVERY_S", 1.0)
    monkeypatch.setattr(arrivals, "START_TIMEOUT_S", 4.0)

    def body(rank: int) -> None:
        if rank != 3:
            enter_early(rank, store)
        time.sleep(60)

    with forked(body, RANKS, tmp_path) as ranks:
        assert [rank.wait(LIMIT_S) for rank in ranks[:3]] == [exit_codes.PEER_LOST] * 3
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
            time.sleep(60)
        time.sleep(1.0)
        early._early._at_exit()

    with forked(body, RANKS, tmp_path) as ranks:
        assert [rank.wait(LIMIT_S) for rank in ranks] == [exit_codes.USER_CODE] * RANKS
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
        time.sleep(60)

    with forked(body, RANKS, tmp_path) as ranks:
        assert [rank.wait(LIMIT_S) for rank in ranks] == [exit_codes.USER_CODE] * RANKS, ranks[0].text
        assert all("rank 2, phase script: OSError: the third trainer" in rank.text for rank in ranks)


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


def test_a_wrapper_between_launcher_and_rank_is_no_rank_of_its_own(store):
    ask = "from trl_multinode.run import early; import sys; sys.exit(0 if early._early else 5)"
    command = ["sh", "-c", f'{sys.executable} -c "{ask}"; exit $?']
    environment = {**os.environ, **variables(0, store)}
    assert subprocess.run(command, env=environment, timeout=LIMIT_S).returncode == 0
    without = {**environment, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert subprocess.run(command, env=without, timeout=LIMIT_S).returncode == 5


# ---- output_dir -----------------------------------------------------------------------------------------------------


def begin(rank: int, store: StoreHost, output_dir: Path) -> Watchdog:
    """What the host of a trainer does first."""
    enter_early(rank, store)
    watch = Watchdog(topology_of(rank, launched=True), lambda: "set-up")
    with watch.guard():
        begin_run(watch, output_dir / "_multinode", lambda: 7, 60.0)
    print("begun", flush=True)
    return watch


@pytest.mark.parametrize("how", ["missing", "read-only"])
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
        begin(rank, store, folder)
        time.sleep(60)

    start = time.monotonic()
    with forked(body, RANKS, tmp_path) as ranks:
        code = exit_codes.DISK if how == "read-only" else exit_codes.CONFIGURATION
        assert [rank.wait(LIMIT_S) for rank in ranks] == [code] * RANKS, ranks[2].text
        print(f"all ended after {time.monotonic() - start:.1f} s")
        (line,) = {rank.text.splitlines()[-1] for rank in ranks}
        assert "node 1, rank 2, phase set-up: " in line and "node 1 cannot write to `output_dir`" in line


def mount_read_only(folder: Path) -> None:
    """In this process only."""
    libc, new_mounts, private, read_only = ctypes.CDLL(None, use_errno=True), 0x20000, (1 << 18) | (1 << 14), 1
    assert libc.unshare(new_mounts) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, private, None) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"tmpfs", bytes(folder), b"tmpfs", read_only, None) == 0, os.strerror(ctypes.get_errno())


def test_a_full_disk_at_the_start_ends_no_run_that_may_save_nothing(tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(Path, "touch", full)
    check_writable(tmp_path / "_multinode", 0)
    assert "node 0 cannot write" in caplog.text and "No space left on device" in caplog.text


# ---- two runs, one output_dir ---------------------------------------------------------------------------------------


def own(folder: Path, seconds: float = 60.0) -> owner.OutputOwner:
    claimed = owner.claim(folder, lambda cause, code: print(code, cause, flush=True))
    print("claimed", flush=True)
    time.sleep(seconds)
    return claimed


def test_row_two_runs_one_output_dir_the_second_is_refused_and_a_dead_one_taken_over_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "DYING_S", 0.5)
    with forked(lambda rank: own(tmp_path), 1, tmp_path) as (first,):
        first.wait_for("claimed")
        start = time.monotonic()
        host = os.uname().nodename
        with pytest.raises(errors.ConfigurationError, match=rf"host {host}, pid {first.process.pid}\..*output_dir"):
            owner.claim(tmp_path, print)
        print(f"refused after {time.monotonic() - start:.1f} s")
        first.process.kill()  # its file stays
        first.process.join()
        assert json.loads((tmp_path / "owner.json").read_text())["pid"] == first.process.pid
        start = time.monotonic()
        claimed = owner.claim(tmp_path, print)
        assert time.monotonic() - start < 2.0
        claimed.release()


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
    (folder / "owner.json").write_text(json.dumps(content))
    return content


def test_row_two_runs_on_two_hosts_a_live_one_refuses_and_a_dead_one_is_taken_over(tmp_path, monkeypatch, capsys):
    """Between hosts no lock is seen: the file decides, and it must be the host's clock that does not."""
    monkeypatch.setattr(owner, "TAKEN_OVER_AFTER_S", 2.0)
    of_another_host(tmp_path)
    start = time.monotonic()
    claimed = owner.claim(tmp_path, print)
    assert time.monotonic() - start >= 2.0
    assert "belonged to a run on node-a (pid 4242)" in capsys.readouterr().out
    claimed.release()

    def other(rank: int) -> None:
        content = of_another_host(tmp_path)
        print("there", flush=True)
        while True:
            time.sleep(0.5)
            content["count"] += 1
            owner.write_whole(tmp_path / "owner.json", json.dumps(content))

    with forked(other, 1, tmp_path) as (theirs,):
        theirs.wait_for("there")
        with pytest.raises(errors.ConfigurationError, match=r"host node-a, pid 4242\."):
            owner.claim(tmp_path, print)


def test_a_run_that_was_suspended_until_another_took_its_folder_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "REWRITE_EVERY_S", 0.2)
    lost: list[str] = []
    claimed = owner.claim(tmp_path, lambda cause, code: lost.append(f"{code} {cause}"))
    time.sleep(0.5)
    assert json.loads((tmp_path / "owner.json").read_text())["count"] > 1
    of_another_host(tmp_path)
    deadline = time.monotonic() + LIMIT_S
    while not lost and time.monotonic() < deadline:
        time.sleep(0.05)
    assert lost[0].startswith("3 ConfigurationError: ") and "host node-a, pid 4242" in lost[0]
    claimed.release()
    assert json.loads((tmp_path / "owner.json").read_text())["token"] == "theirs"


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
        assert "in use by another run" in other.result
    claimed.release()


# ---- versions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("package", "other", "ends"), [("vllm", "0.30.0", True), ("transformers", "4.0", False)])
def test_row_28_versions_that_differ_between_nodes(tmp_path, store, monkeypatch, package, other, ends):
    monkeypatch.setattr(node_versions, "LOOK_EVERY_S", 0.2)

    def body(rank: int) -> None:
        logging.getLogger("trl_multinode").addHandler(logging.StreamHandler())  # not pytest's
        if rank // 2 == 1:
            found = node_versions.local_versions()
            monkeypatch.setattr(node_versions, "local_versions", lambda: {**found, package: other})
        watch = begin(rank, store, tmp_path)
        time.sleep(60 if ends else 3)
        watch.close()

    start = time.monotonic()
    with forked(body, RANKS, tmp_path) as ranks:
        code = exit_codes.CONFIGURATION if ends else 0
        assert [rank.wait(LIMIT_S) for rank in ranks] == [code] * RANKS, ranks[0].text
        print(f"all ended after {time.monotonic() - start:.1f} s")
        told = [rank.text for rank in ranks if f"{package}: " in rank.text]
        assert len(told) == (RANKS if ends else 1)
        assert all(f"{other} on node 1" in text and "on node 0" in text for text in told)
        if ends:
            assert FAILED + "node 0, rank 0, phase set-up: ConfigurationError: the nodes have different" in told[3]


def test_versions_of_many_nodes_are_one_short_line():
    nodes = [{"trl": "1.16.0", "torch": "2.13.0+cpu"} for _ in range(64)]
    nodes[7] = {"trl": "1.15.2", "torch": "2.13.0+cu130"}
    trl, torch = versions.differences(nodes)
    assert str(trl) == "trl: 1.16.0 on nodes 0, 1, 2, 3, 4, 5, 6, 8 and 55 more, 1.15.2 on node 7"
    assert (trl.is_error, torch.is_error) == (True, False)
    assert versions.differences(nodes[:7]) == []


# ---- exit codes and ending files ------------------------------------------------------------------------------------


def raised_in(*modules: str, error: BaseException | None = None, functions: tuple[str, ...] = ()) -> BaseException:
    """An error with a traceback through functions of these modules; `mine` is a file of the user's."""
    call = "raise error"
    scope: dict = {"error": error or ValueError("bad")}
    for module, name in reversed(list(zip(modules, functions or modules, strict=True))):
        name = name.replace(".", "_")
        path = "/home/me/train.py" if module in ("mine", "__main__") else f"{sys.prefix}/lib/site-packages/x.py"
        path = path if module in ("mine", "__main__") else str(Path(os.__file__).parent / "site-packages/x.py")
        scope = {"__name__": module, **{k: v for k, v in scope.items() if not k.startswith("__")}}
        exec(compile(f"def {name}():\n    {call}", path, "exec"), scope)  # noqa: S102
        call = f"{name}()"
    try:
        scope[name]()
    except BaseException as raised:
        raised.__traceback__ = raised.__traceback__.tb_next  # without this file
        return raised
    raise AssertionError


TRL, LIB = "trl.trainer.grpo_trainer", "transformers.trainer"
CODES = [
    (raised_in("__main__", LIB, TRL, "mine"), True, 6),  # a reward function
    (raised_in("__main__", LIB, TRL, "mine", "numpy.linalg"), True, 6),  # and what it calls
    (raised_in("__main__", LIB, TRL, "mine", "transformers.pipelines"), True, 6),
    (raised_in("__main__", TRL, "judges.math", functions=("main", "_calculate_rewards", "score")), True, 6),
    (raised_in("__main__", TRL, "trl.rewards.math", functions=("main", "_calculate_rewards", "score")), True, 6),
    (raised_in("__main__", LIB, TRL, "torch.nn"), True, 1),
    (raised_in("__main__", "trl_multinode.trainer", LIB, "deepspeed.runtime", "torch.cuda"), True, 1),
    (raised_in("__main__"), True, 6),  # the script, beside the trainer
    (raised_in("__main__", LIB), False, 6),
    (raised_in("__main__", LIB, "torch.serialization", error=OSError(errno.ENOSPC, "full")), True, 7),
    (raised_in("__main__", "trl_multinode.run", error=OSError(errno.EROFS, "read-only")), False, 7),
    (raised_in("__main__", LIB, "mine", error=OSError(errno.ENOSPC, "full")), True, 6),
    (raised_in("__main__", LIB, "torch.distributed", error=RuntimeError("[gloo] Connection closed")), True, 4),
    (errors.ConfigurationError("x"), False, 3),
    (errors.PeerFailureError("x"), True, 4),
    (errors.EngineStalledError("x"), True, 5),
    (errors.HubPushError("x"), True, 8),
    (errors.WeightsNotFiniteError("x"), True, 1),
    (SystemExit(3), True, 6),
    (KeyboardInterrupt(), True, 1),
]


@pytest.mark.parametrize(("error", "has_trainer", "code"), CODES)
def test_row_exit_codes_of_errors(error, has_trainer, code):
    assert exit_codes.code_of(error, has_trainer) == code


def test_a_line_names_the_node_of_an_address():
    client = HashStore()
    store, topology = run_store.RunStore(node(0), None, client), node(0)
    for number, found in enumerate((["10.0.0.1", "172.17.0.1"], ["10.0.0.2", "172.17.0.1"])):
        client.set(f"address/{number}", json.dumps(found))
    lines = {
        "[gloo/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4242": "closed by peer node 1 [10.0.0.2]:4242",
        "socketProgress: Connection closed by remote peer 10.0.0.2<4242>": "remote peer node 1 10.0.0.2<4242>",
        "connect to [172.17.0.1]:80": "connect to [172.17.0.1]:80",  # a bridge that every node has
        "vllm 0.26.0.1: 3 rows": "vllm 0.26.0.1: 3 rows",
    }
    for line, expected in lines.items():
        assert addresses.with_nodes(line, store, topology).endswith(expected)
    addresses.register(store, topology)
    assert "127.0.0.1" not in json.loads(client.get("address/0"))


def node(number: int, local: int = 0) -> Topology:
    return Topology(2 * number + local, 4, local, 2, number, 2, launched=True)


def test_row_ending_files_of_local_main_processes(tmp_path, monkeypatch):
    folder, copy = tmp_path / "_multinode", tmp_path / "copy.json"
    monkeypatch.setenv("TRL_MULTINODE_ENDING_FILE", str(copy))
    whole = tmp_path / "checkpoint-4"
    for name in ("checkpoint-4", "checkpoint-20", "checkpoint-best"):
        (tmp_path / name).mkdir()
    (whole / "trainer_state.json").write_text("{}")
    for topology in (node(1, 1), node(1)):
        ending = Ending(topology)
        folder.mkdir(exist_ok=True)
        ending.begin(folder)
        ending.phase, ending.step, ending.resumes = lambda: "train", lambda: 5, True
        ending.checkpoint = lambda: newest_whole(tmp_path)
        ending.write(Fatal("node 0, rank 0: gone", 4))
        assert [path.name for path in folder.iterdir()] == ["ending-node1.json"] * topology.is_local_main
    found = json.loads((folder / "ending-node1.json").read_text())
    assert found == json.loads(copy.read_text())
    assert time.strptime(found.pop("time"), "%Y-%m-%dT%H:%M:%SZ")
    assert found == {
        "code": 4, "cause": "node 0, rank 0: gone", "phase": "train", "step": 5, "checkpoint": str(whole),
        "continues": True, "node": 1,
    }  # fmt: skip
    ending.write_good()
    found = json.loads(copy.read_text())
    assert (found["code"], found["cause"], found["continues"]) == (0, "", False)
    Ending(node(1)).begin(folder)
    assert not list(folder.iterdir())  # it would be taken for the end of the new run


def test_an_ending_that_cannot_be_written_disturbs_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_MULTINODE_ENDING_FILE", str(tmp_path / "no" / "folder" / "file"))
    (tmp_path / "no").touch()
    ending = Ending(node(0))
    ending.begin(tmp_path)
    ending.step = ending.checkpoint = lambda: 1 / 0
    ending.write(Fatal("gone", 4))
    assert json.loads((tmp_path / "ending-node0.json").read_text())["checkpoint"] is None


def test_row_every_ending_of_a_run_is_written_good_ones_included(tmp_path, store):
    def body(rank: int) -> None:
        watch = begin(rank, store, tmp_path / "good")
        watch.close()
        early._early._at_exit()

    with forked(body, RANKS, tmp_path) as ranks:
        assert [rank.wait(LIMIT_S) for rank in ranks] == [0] * RANKS, ranks[0].text
    assert not (tmp_path / "good/_multinode/owner.json").exists()
    endings = [json.loads((tmp_path / f"good/_multinode/ending-node{k}.json").read_text()) for k in range(2)]
    assert [ending["code"] for ending in endings] == [0, 0]


def test_a_run_of_one_process_writes_its_ending_too(tmp_path):
    watch = Watchdog(Topology(0, 1, 0, 1, 0, 1, launched=False))
    begin_run(watch, tmp_path / "_multinode", lambda: 3, 60.0)
    try:
        raise errors.EngineStalledError("no tokens")
    except errors.EngineStalledError:
        watch.close()  # as the trainer does after a failure
    found = json.loads((tmp_path / "_multinode/ending-node0.json").read_text())
    assert (found["code"], found["step"]) == (5, 3) and "EngineStalledError: no tokens" in found["cause"]
    assert not (tmp_path / "_multinode/owner.json").exists()


def test_a_closed_process_may_end(tmp_path, store):
    """A rank that has closed its trainer and ends with `os._exit(0)` is no failure of those that still finish."""

    def body(rank: int) -> None:
        watch = begin(rank, store, tmp_path / "run")
        time.sleep(1.0)  # the pids are known
        watch.close()
        if rank == 1:
            os._exit(0)
        time.sleep(3.0)
        early._early._at_exit()

    with forked(body, RANKS, tmp_path) as ranks:
        assert [rank.wait(LIMIT_S) for rank in ranks] == [0] * RANKS, ranks[0].text
