"""Faults that end nothing: a slow link, lost packets, clocks that differ, and an engine that is slow.

The runs of the first three are in one launch and have the same seeds. One before them has no fault, so the others must
have its rows and losses.
"""

import ast
import json
from pathlib import Path

import pytest
from waiting import HANG_S

from multinode_kit.faults import FAKE, HOOK, Faults
from multinode_kit.namespaces import namespaces_available
from multinode_kit.nodes import Nodes

# What differs is only slower: the metrics and limits that see it have tests on made-up states
pytestmark = [pytest.mark.zero3, pytest.mark.two_node, pytest.mark.nightly]
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "set_clock.py"
CONTINUED = Path(__file__).parents[1] / "e2e" / "scripts" / "continued.py"
STEPS = 3
RUN = {
    "prompts": 16, "max_steps": STEPS, "save_steps": STEPS, "per_device_train_batch_size": 4,
    "max_completion_length": 8,
}  # fmt: skip
NAMES = ("plain", "slow_link", "lost_packets")
SLOW_MBIT, LOSSY_MBIT, SHORT_QUEUE = 20, 100, 90_000
HOURS = 3600.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Results of all runs: rows and losses by rank, the logs, and the share of packets that node 1 lost."""
    if reason := namespaces_available():
        pytest.skip(f"links of their own: {reason}")
    folder = tmp_path_factory.mktemp("links")
    jobs = [RUN | {"name": name, "output": name} for name in NAMES]
    environment = {"TRL_MULTINODE_ENGINE_MODULE": FAKE}
    with Nodes(
        2, 1, folder=folder / "nodes", env=environment, forked=True, namespaces=True
    ) as nodes:
        nodes.launch(SCRIPT, str(folder), json.dumps(jobs))
        nodes.wait_for(0, "JOB slow_link", timeout_s=HANG_S)
        nodes.limit_links(SLOW_MBIT)
        (folder / "clock1").write_text(str(7 * HOURS))
        nodes.wait_for(0, "JOB lost_packets", timeout_s=HANG_S)
        nodes.limit_links(LOSSY_MBIT, queue_bytes=SHORT_QUEUE)
        (folder / "clock1").write_text(str(-5 * HOURS))
        assert nodes.wait(HANG_S) == [0, 0], nodes.tails()
        lost = nodes.lost_share(1)
        logs = [nodes.rank_log(rank) for rank in (0, 1)]
    return {"folder": folder, "lost": lost, "logs": logs}


def results(runs: dict, name: str) -> list[dict]:
    found = [
        json.loads((runs["folder"] / f"{name}_rank{rank}.json").read_text()) for rank in (0, 1)
    ]
    return [{part: one[part] for part in ("rounds", "steps")} for one in found]


def metric(runs: dict, name: str, key: str) -> float:
    """Mean of a metric over the steps after the first."""
    state = json.loads(
        (runs["folder"] / name / f"checkpoint-{STEPS}" / "trainer_state.json").read_text()
    )
    values = [entry[key] for entry in state["log_history"] if key in entry][1:]
    return sum(values) / len(values)


def test_row_31_a_slow_link_ends_nothing_and_the_metrics_of_the_sync_show_it(runs):
    slow, plain = ({key: metric(runs, name, f"sync/{key}") for key in ("gather_s", "gb_per_s", "load_s")}
                   for name in ("slow_link", "plain"))  # fmt: skip
    print(f"sync on the slow link: {slow}, without it: {plain}")
    assert slow["gather_s"] > 3 * plain["gather_s"] and slow["gb_per_s"] < plain["gb_per_s"] / 2
    # engines are not the cause
    assert slow["gather_s"] - plain["gather_s"] > slow["load_s"] - plain["load_s"]
    assert results(runs, "slow_link") == results(runs, "plain")


def test_row_32_lost_packets_end_nothing_and_change_nothing(runs):
    print(f"{100 * runs['lost']:.1f} % of the packets of node 1 were lost")
    assert runs["lost"] > 0.01
    assert results(runs, "lost_packets") == results(runs, "plain")


def test_row_clock_skew_of_hours_and_clocks_that_are_set_end_nothing(runs):
    """Node 1 is 7 hours ahead in the second run and 5 behind in the third."""
    assert results(runs, "slow_link")[0]["steps"].keys() == {
        str(step) for step in range(1, STEPS + 1)
    }
    assert not any("the run failed" in log for log in runs["logs"])


STALL_S, TOKEN_S = 6.0, 1.0


def test_row_5_a_round_longer_than_the_stall_limit_ends_nothing_and_the_metrics_name_the_node(
    tmp_path, fault_seconds
):
    job = {
        "name": "slow", "output": "slow", "prompts": 8, "max_steps": 1, "save_steps": 1,
        "per_device_train_batch_size": 4, "max_completion_length": 8, "engine_stall_timeout": STALL_S,
    }  # fmt: skip
    slow = Faults().slow_tokens(TOKEN_S).environment(FAKE)
    with Nodes(2, 1, folder=tmp_path / "nodes", forked=True) as nodes:
        nodes.launch(
            CONTINUED,
            str(tmp_path),
            json.dumps([job]),
            env_of=lambda node: slow if node else {HOOK: FAKE},
        )
        assert nodes.wait(HANG_S) == [0, 0], nodes.tails()
    state = json.loads((tmp_path / "slow" / "checkpoint-1" / "trainer_state.json").read_text())
    logs = [entry for entry in state["log_history"] if "perf/generate_s" in entry]
    assert len(logs) == 1
    for entry in logs:
        assert entry["perf/generate_s/slowest_node"] == 1 and entry["perf/generate_s/max"] > STALL_S
    fault_seconds(max(entry["perf/generate_s/max"] for entry in logs))


# Files that may read the wall clock: for timelines, a time of day for people, a name that no earlier run used
WALL_CLOCK = {  # for logs, file names, and the age of files
    "run/phases.py", "run/endings/ending.py", "engine/process.py", "saving/rotation.py",
    "host/presence.py", "wire/leftovers.py", "engine_process/states.py", "reporting/record.py",
    "run/phase_file.py", "tools/timeline/table.py",
}  # fmt: skip


def test_row_clock_skew_cannot_reach_a_limit_because_no_limit_reads_the_wall_clock():
    package = ROOT / "trl_multinode"
    readers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in NAMES_OF_WALL_CLOCKS
    }
    assert readers <= WALL_CLOCK


NAMES_OF_WALL_CLOCKS = {
    "time.time", "time.time_ns", "time.strftime", "time.localtime", "time.gmtime", "datetime.now", "datetime.utcnow",
    "datetime.datetime.now", "datetime.today", "time.ctime",
}  # fmt: skip
