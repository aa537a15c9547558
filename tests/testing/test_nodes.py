"""`trl_multinode.testing.nodes`: the machines that every test of a real launch stands on."""

import os
import signal
from pathlib import Path

import pytest
from waiting import HANG_S, until

from trl_multinode.testing.namespaces import namespaces_available
from trl_multinode.testing.nodes import Nodes

pytestmark = pytest.mark.nightly  # a kit that did less would fail the launches that stand on it
MEET = """
import os, sys, tempfile, torch
from accelerate import PartialState

state = PartialState(cpu=True)
total = torch.ones(int(sys.argv[2]))
torch.distributed.all_reduce(total)
open(os.path.join(tempfile.gettempdir(), f"rank{state.process_index}"), "w").close()
shared = f"/dev/shm/{sys.argv[1]}-rank{state.process_index}"
open(shared, "w").close()
torch.distributed.barrier()
print("world", state.num_processes, "sum", int(total[0]), "zero3", os.environ["ACCELERATE_USE_DEEPSPEED"])
print("temporary", *sorted(f for f in os.listdir(tempfile.gettempdir()) if f.startswith("rank")))
print("memory", *sorted(f[-5:] for f in os.listdir("/dev/shm") if f.startswith(sys.argv[1])))
torch.distributed.barrier()
os.remove(shared)
os._exit(0)
"""

# Rank 3 ends at once and leaves an orphan with another title; torchrun ends its node, node 0 hangs
HANG = """
import os, subprocess, sys, time
rank = os.environ["RANK"]
if rank == "3":
    code = "import setproctitle, time; setproctitle.setproctitle('x'); print('there', flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    print("orphan", child.pid)
    sys.exit(7)
print("rank", rank, "hangs")
time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


@pytest.mark.two_node
def test_a_hung_run_hits_the_deadline_and_leaves_nothing_behind(tmp_path, script, capfd, monkeypatch):
    monkeypatch.setattr("trl_multinode.testing.nodes.PROGRESS_EVERY_S", 0.5)
    nodes = Nodes(folder=tmp_path)
    with nodes:
        nodes.launch(script(HANG))
        orphan = int(nodes.wait_for(3, "orphan", timeout_s=HANG_S).split()[1])
        nodes.wait_for(0, "hangs", timeout_s=HANG_S)
        assert nodes.rank_pid(0) in nodes.pids(0)
        assert nodes.launcher_pid(0) in nodes.pids(0)
        with pytest.raises(RuntimeError, match=r"node 0 still runs processes"):
            nodes.launch(script(HANG))
        with pytest.raises(TimeoutError) as late:
            nodes.wait(timeout_s=3)
        message = str(late.value)
        assert "still running on nodes [0" in message
        assert "rank 0 hangs" in message and f"orphan {orphan}" in message and "node1.log" in message
        assert "rank 0: rank 0 hangs" in capfd.readouterr().out
        codes = nodes.wait(timeout_s=HANG_S, grace_s=1.0, progress=lambda seconds: f"after {seconds:.0f} s")
        assert codes == [None, 1], "node 0 still runs when node 1 has failed"
        assert "after 1 s" in capfd.readouterr().out
        until(lambda: nodes.launcher_pid(1) not in nodes.pids(1), "the end of node 1's launcher")
        assert nodes.pids(1) == [orphan]  # its parents ended; it has another title and a session of its own
        os.kill(nodes.launcher_pid(0), signal.SIGKILL)
        assert nodes.wait(timeout_s=HANG_S) == [-signal.SIGKILL, 1]
        assert nodes.rank_pid(0) in nodes.pids(0)  # an orphan now too
    assert nodes.pids(0) == nodes.pids(1) == []
    assert nodes.rank_log(0) == "rank 0 hangs\n"  # logs stay
    nodes.close()


@pytest.mark.two_node
def test_nodes_in_namespaces_share_nothing_but_the_link(tmp_path, script):
    if reason := namespaces_available():
        pytest.skip(reason)
    with Nodes(folder=tmp_path, namespaces=True) as nodes:
        before = nodes.link_bytes(0), nodes.link_bytes(1)
        nodes.launch(script(MEET), "tmn-test", str(250_000))
        assert nodes.wait(timeout_s=HANG_S) == [0, 0], nodes.rank_log(0)
        for rank in range(4):
            neighbours = f"rank{rank // 2 * 2} rank{rank // 2 * 2 + 1}"
            log = nodes.rank_log(rank).splitlines()
            assert "world 4 sum 4 zero3 true" in log
            assert f"temporary {neighbours}" in log
            assert f"memory {neighbours}" in log
        assert nodes.link_bytes(0) - before[0] > 1_000_000  # the tensor has a million bytes
        assert sorted(file.name for file in nodes.tmpdir(1).glob("rank*")) == ["rank2", "rank3"]
        assert list(nodes.shared_memory(1).iterdir()) == []
        left = nodes.tmpdir(0), nodes.shared_memory(1)
        name = nodes.tmpdir(0).parent.parent.name
        assert any(entry.startswith(name) for entry in os.listdir("/run/netns"))
    assert not any(folder.exists() for folder in left)
    assert not any(entry.startswith(name) for entry in os.listdir("/run/netns"))
