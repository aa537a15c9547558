"""A forked launch is what an ordinary one is: processes, environment, output, exit codes, and nothing left.

Nightly, because `test_two_nodes.py` decides that a forked launch trains what an ordinary one does.
"""

import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import HANG_S

from multinode_kit.forking import template_pids
from multinode_kit.nodes import Nodes

SCRIPT = Path(__file__).parent / "scripts" / "process.py"
pytestmark = [pytest.mark.two_node, pytest.mark.nightly]
# Values that no two launches have in common
OF_A_LAUNCH = {
    "MASTER_PORT",
    "TMPDIR",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHELASTIC_RUN_ID",
}
# a shell adds PWD
OF_A_LAUNCH |= {
    "TRL_MULTINODE_TEST_MARKER",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "PWD",
}
SET_FOR_EACH_RANK = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_DEEPSPEED", "TMPDIR", "GLOO_SOCKET_IFNAME",
}  # fmt: skip


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    """Two nodes of one rank, ordinary and forked."""
    folders = [tmp_path_factory.mktemp("ordinary"), tmp_path_factory.mktemp("forked")]
    with (
        Nodes(2, 1, folder=folders[0]) as ordinary,
        Nodes(2, 1, folder=folders[1], forked=True) as forked,
    ):
        yield ordinary, forked


def launch(nodes: Nodes, case: str) -> None:
    nodes.launch(SCRIPT, str(nodes.folder), case)


def ended(nodes: Nodes) -> dict:
    """Exit codes of launchers and ranks, and the ranks' output without what differs from launch to launch."""
    codes = nodes.wait(timeout_s=HANG_S)
    ranks = [re.findall(r"exitcode +: (-?\d+)", nodes.launcher_log(node)) for node in range(2)]
    return {"codes": codes, "ranks": ranks, "logs": [nodes.rank_log(rank) for rank in range(2)]}


def test_a_rank_finds_the_same_state(ways):
    found = []
    for nodes in ways:
        launch(nodes, "report")
        end = ended(nodes)
        assert end["codes"] == [0, 0], end
        assert [nodes.pids(node) for node in range(2)] == [[], []]
        reports = [
            json.loads((nodes.folder / f"report{rank}.json").read_text()) for rank in range(2)
        ]
        assert [report.pop("parent") for report in reports] == [
            nodes.launcher_pid(node) for node in range(2)
        ]
        assert len({number for report in reports for number in report.pop("random")}) == 6
        for report in reports:
            assert report["environment"].keys() >= SET_FOR_EACH_RANK and report["world"] == [2, 2]
            report["environment"] = {
                k: v for k, v in report["environment"].items() if k not in OF_A_LAUNCH
            }
            report["main"][3][1] = "its folder"
        found.append((reports, end["logs"]))
    ordinary, forked = found
    for mine, its in zip(ordinary[0], forked[0], strict=True):  # the ranks' reports
        assert {name: (mine[name], its[name]) for name in mine if mine[name] != its[name]} == {}
    for mine, its in zip(ordinary[1], forked[1], strict=True):
        assert (
            own_lines(mine)
            == own_lines(its)
            == ["to stdout", "to stderr", "from a thread", "at exit", "destroyed"]
        )


def own_lines(log: str) -> list[str]:
    """Without the warnings of the imports, which a fork does not repeat."""
    return [
        line
        for line in log.splitlines()
        if line.startswith(("to std", "from a", "at exit", "destroyed"))
    ]


# name: (case of the script, what is done when the ranks that do not fail have said so)
ENDS: dict[str, tuple[str, Callable[[Nodes], None]]] = {
    "an exception": ("raise", lambda nodes: None),
    "sys.exit with a reason": ("exit", lambda nodes: None),
    "SIGKILL of a rank": ("hang", lambda nodes: os.kill(nodes.rank_pid(1), signal.SIGKILL)),
    "SIGTERM to a launcher": ("hang", lambda nodes: os.kill(nodes.launcher_pid(1), signal.SIGTERM)),
    "SIGKILL of a launcher": ("hang", lambda nodes: os.kill(nodes.launcher_pid(1), signal.SIGKILL)),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_launch_ends_in_the_same_way(ways, name):
    case, end = ENDS[name]
    found = []
    for nodes in ways:
        launch(nodes, case)
        for rank in (0, 1) if case == "hang" else (0,):
            nodes.wait_for(rank, "hangs", timeout_s=HANG_S)
        end(nodes)
        found.append(of_node_1(nodes))
        for pid in nodes.pids(0) + nodes.pids(1):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        nodes.wait(timeout_s=HANG_S)
        assert not {*template_pids()} & {*nodes.pids(0), *nodes.pids(1)}
    assert found[0] == found[1]


def of_node_1(nodes: Nodes) -> dict:
    """How the launcher and the rank of node 1 ended; node 0 is not told, for torchrun does not do that."""
    launcher = nodes._launchers[1]
    nodes._until(lambda: launcher.poll() is not None, HANG_S, "the launcher of node 1 to end")
    rank = re.findall(r"exitcode +: (-?\d+)", nodes.launcher_log(1))
    return {
        "code": launcher.returncode,
        "rank": rank,
        "left": len(nodes.pids(1)),
        "log": nodes.rank_log(1),
    }


def test_other_values_of_variables_that_imports_have_read_are_refused(tmp_path):
    refused = pytest.raises(RuntimeError, match=r"\['HF_HOME'\].*Nodes\(forked=False\)")
    with (
        Nodes(1, 1, folder=tmp_path, env={"HF_HOME": str(tmp_path)}, forked=True) as nodes,
        refused,
    ):
        launch(nodes, "report")
