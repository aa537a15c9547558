"""A real Ray cluster places agents, and they end with it; the run is one without ranks."""

import itertools
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import psutil
import pytest
from forks import Rank
from joining import NODES, Run, free_port, new_store, run_of
from ray_host import LOST_S, LOST_VARIABLE, RayHost
from waiting import until

from multinode_kit.engines import FAKE
from multinode_kit.faults import HOOK
from multinode_kit.forking import from_template
from multinode_kit.models import tiny_qwen2
from trl_multinode.agent import ray_engines as module
from trl_multinode.engine.agents import Measure
from trl_multinode.engine.group import EngineGroup
from trl_multinode.run.endings.exit_codes import CONFIGURATION, PEER_LOST
from trl_multinode.tools import main
from trl_multinode.weights.serving import WEIGHTS, WeightService
from trl_multinode.weights.source import ModuleSource
from trl_multinode.weights.sync import WeightSync
from trl_multinode.weights.transport import Transport
from trl_multinode.wire.messages import WeightVersion
from trl_multinode.wire.secret import SECRET, SECRET_FILE
from trl_multinode.wire.supervisor import is_running

pytestmark = pytest.mark.real
KEY = "secret of these tests"
TESTS = Path(__file__).parents[1]
BUCKET_BYTES = 1_000_000


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short temporary folder, in which all files of Ray and of the engines are."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as path:
        (Path(path) / "t").mkdir()
        yield Path(path)


@pytest.fixture(scope="module")
def cluster(folder) -> Iterator[RayHost]:
    """A cluster whose nodes have the secret in a file."""
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(KEY)
    variables = {
        SECRET_FILE: str(secret),
        HOOK: from_template(FAKE),
        "TMPDIR": str(folder / "t"),
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent))),
    }
    with mock.patch.dict(os.environ, variables):
        host = RayHost(folder)
    yield host
    host.close()


@pytest.fixture
def run(tmp_path, monkeypatch) -> Iterator[tuple[int, Run]]:
    """The port of the store, and a run whose weights agents can pull."""
    monkeypatch.setenv(SECRET, KEY)
    source = ModuleSource(tiny_qwen2(seed=7), tiny_qwen2().dtype)
    sync = WeightSync(source, EngineGroup(), BUCKET_BYTES, Transport(staged=True))
    sync.run(WeightVersion(1, 10))
    store = new_store(free_port())
    with run_of(store, tmp_path, services={WEIGHTS: WeightService(lambda: sync).serve}) as run:
        yield store.port, run
    sync.close()


class Driver(Rank):
    """`trl-multinode engines --ray` in a process of its own."""

    def __init__(self, cluster: RayHost, port: int, folder: Path, *words: str):
        folder.mkdir(exist_ok=True)
        self.logs = folder / "logs"
        self._words = ["engines", "--ray", "--join", f"127.0.0.1:{port}", "--logs", str(self.logs)]
        self._words += words
        self._variables = {
            "RAY_ADDRESS": cluster.address,
            "RAY_TMPDIR": str(cluster.folder),
            LOST_VARIABLE: str(LOST_S),
        }
        super().__init__(self._main, 0, folder)

    def _main(self, _: int) -> int:
        os.environ.update(self._variables)
        del os.environ[SECRET]
        with (
            mock.patch.object(module, "AGAIN_S", 0.1),
            mock.patch.object(module, "MEASURE_S", 0.1),
        ):
            raise SystemExit(main(self._words))


@contextmanager
def driver_on(cluster: RayHost, port: int, folder: Path, *words: str) -> Iterator[Driver]:
    one = Driver(cluster, port, folder, *words)
    try:
        yield one
    except BaseException:
        print(one.text, *[log.read_text() for log in one.logs.rglob("*.log")], sep="\n")
        raise
    finally:
        one.process.kill()
        one.process.join()


@contextmanager
def nodes_of(cluster: RayHost, *environments: dict[str, str]) -> Iterator[list[str]]:
    """Nodes of the cluster with room for one engine each; a test may remove some itself."""
    ids = [cluster.ask("add", environment) for environment in environments]
    try:
        yield ids
    finally:
        for node in ids:
            cluster.ask("remove", node)


def agents_in(logs: Path) -> dict[str, psutil.Process]:
    """Return the agents that run, by the names of their engines."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(logs) in " ".join(words) and "--parent" in words and is_running(process.pid):
            found[Path(words[words.index("--logs") + 1]).name] = process
    return found


def tree_of(process: psutil.Process) -> list[int]:
    return [process.pid, *(child.pid for child in process.children(recursive=True))]


def have_ended(pids: list[int]) -> bool:
    return not any(map(is_running, pids))


def test_a_node_without_the_secret_is_named_and_the_command_ends(cluster, run, tmp_path):
    port, _ = run
    with (
        nodes_of(cluster, {SECRET_FILE: ""}),
        driver_on(cluster, port, tmp_path / "driver") as driver,
    ):
        assert driver.wait() == CONFIGURATION
        assert SECRET in driver.text and os.uname().nodename in driver.text


def test_engines_are_kept_when_actors_and_nodes_end(cluster, run, tmp_path, folder):
    port, run = run
    with (
        nodes_of(cluster, {}, {}) as nodes,
        driver_on(cluster, port, tmp_path / "driver", "--engines", "2") as driver,
    ):
        until(lambda: sorted(run.serving) == [NODES, NODES + 1], lambda: driver.text)
        before = agents_in(driver.logs)
        assert sorted(before) == ["engine-1", "engine-2"]
        assert not any(KEY in " ".join(process.cmdline()) for process in before.values())
        # killed by Ray
        pids = tree_of(before["engine-1"])
        cluster.ask("kill", "trl-multinode-engine-1")
        until(lambda: have_ended(pids), "the end of the killed engine")
        until(lambda: run.left and len(run.serving) == 2, lambda: driver.text)
        assert sorted(agents_in(driver.logs)) == ["engine-2", "engine-3"]
        # a node is lost, and another one is added
        all_pids = {name: tree_of(agent) for name, agent in agents_in(driver.logs).items()}
        cluster.ask("lose", nodes.pop())
        until(lambda: len(agents_in(driver.logs)) == 1, "the end of the node's engine")
        (left,) = agents_in(driver.logs)
        (pids,) = (pids for name, pids in all_pids.items() if name != left)
        until(lambda: have_ended(pids), "the end of the node's engine")
        until(lambda: "engine 4" in driver.text, lambda: driver.text)
        nodes.append(cluster.ask("add", {}))
        until(lambda: len(run.serving) == 2, lambda: driver.text)
        # in order
        pids = [pid for agent in agents_in(driver.logs).values() for pid in tree_of(agent)]
        os.kill(driver.process.pid, signal.SIGTERM)
        assert driver.wait() == 0
        assert have_ended(pids) and not run.serving and not list((folder / "t").iterdir())
    assert not [path for path in folder.rglob("*.log") if KEY in path.read_text(errors="replace")]


@pytest.mark.nightly
def test_engines_follow_the_measure_and_leave_a_node_that_ray_drains(cluster, run, tmp_path):
    port, run = run
    steps = itertools.count()
    words = ["--autoscale", "1:2"]
    with (
        nodes_of(cluster, {}, {}) as nodes,
        driver_on(cluster, port, tmp_path / "driver", *words) as driver,
    ):
        until(lambda: len(run.serving) == 1, lambda: driver.text)

        def has_grown() -> bool:
            run.announce(Measure(next(steps), len(run.serving), filled=0.9, waiting=0.5))
            return len(run.serving) == 2

        until(has_grown, lambda: driver.text)
        assert any("ranks wait" in line for line in run.lines)
        pids = {name: tree_of(agent) for name, agent in agents_in(driver.logs).items()}
        assert cluster.ask("drain", nodes[0])
        until(lambda: len(agents_in(driver.logs)) == 1, lambda: driver.text)
        (stays,) = agents_in(driver.logs)
        (left,) = pids.keys() - {stays}
        until(lambda: have_ended(pids[left]), lambda: driver.text)
        assert any("drains" in line for line in run.lines)
        nodes.append(cluster.ask("add", {}))
        until(lambda: len(run.serving) == 2, lambda: driver.text)
        assert sorted(agents_in(driver.logs)) == [stays, "engine-3"]


@pytest.mark.nightly
def test_all_ends_with_a_lost_head(cluster, run, tmp_path, folder):
    port, run = run
    cluster.ask("add", {})
    with driver_on(cluster, port, tmp_path / "driver", "--grace", "5") as driver:
        until(lambda: run.serving, lambda: driver.text)
        (agent,) = agents_in(driver.logs).values()
        pids = tree_of(agent)
        cluster.ask("lose_head")
        assert driver.wait() == PEER_LOST
        assert cluster.address in driver.text
        until(lambda: have_ended(pids), "the end of the engines")
        assert not run.serving and not list((folder / "t").iterdir())
