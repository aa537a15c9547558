"""`multinode_kit.nodes`: the machines that every test of a real launch stands on."""

import os
from pathlib import Path

import pytest
from waiting import HANG_S, until

from multinode_kit.namespaces import namespaces_available
from multinode_kit.nodes import Nodes

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


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


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


HOLDS_THE_LOCK = """
import ctypes, os

print("ready", flush=True)
if os.environ["RANK"] == "1":
    ctypes.PyDLL(None).sleep(600)  # it holds the interpreter lock
"""


@pytest.mark.two_node
def test_a_rank_that_hangs_in_native_code_prints_its_stacks(tmp_path, script):
    with Nodes(2, 1, folder=tmp_path, forked=True) as nodes:
        nodes.launch(script(HOLDS_THE_LOCK))
        nodes.wait_for(1, "ready", HANG_S)
        texts: list[str] = []

        def shows_the_stacks() -> bool:
            texts.append(nodes.what_ranks_do())
            return 'script.py", line 6 in <module>' in texts[-1]

        # the rank says that it is ready before it calls the native code, and writes its stacks when it gets to it
        until(shows_the_stacks)
        assert "rank 1 (node 1): sleeping" in texts[-1]
