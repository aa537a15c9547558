"""Row 15 on launches: a pre-empted run saves the step under way, leaves with 143, and goes on bitwise."""

import json
import re
from pathlib import Path

import pytest
from waiting import HANG_S

from multinode_kit.engines import FAKE
from multinode_kit.nodes import Nodes

SCRIPT = Path(__file__).parent.parent / "e2e" / "scripts" / "continued.py"
ENVIRONMENT = {"TRL_MULTINODE_ENGINE_MODULE": FAKE, "TRL_MULTINODE_PREEMPT_SIGNAL": "USR1"}
pytestmark = [pytest.mark.zero3, pytest.mark.two_node]

RANKS, LAST = 4, 6
# 4 ranks x 4 rows x 2 micro-steps = 8 prompts a round. A round serves two optimizer steps, and the next one is
# generated meanwhile, so a checkpoint holds its rows
RUN = {
    "prompts": 16, "num_train_epochs": 2, "per_device_train_batch_size": 4, "steps_per_generation": 2,
    "gradient_accumulation_steps": 1, "max_steps": LAST, "max_completion_length": 8, "max_staleness": 1,
}  # fmt: skip
BROKEN = {"output": "broken", "save_strategy": "no"}  # nothing else saves a checkpoint
LATE = {
    "output": "late",
    "name": "late",
    "save_strategy": "steps",
    "save_steps": 1,
    "preemption_grace": 3.0,
}


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """An unbroken run, then one that is pre-empted twice and continued, then one whose step takes too long."""
    folder, logs, codes, endings = tmp_path_factory.mktemp("preempted"), [], [], []
    jobs = [
        [{"name": "whole", "output": "whole"},
         {"name": "first", "signals": [[3, 2, "SIGHUP", "launcher"], [2, 2, "SIGHUP", "itself"]], "slow": 1.0}],
        [{"name": "second", "resume": True, "signals": [[1, 4, "SIGUSR1", "itself"]], "slow": 1.0}],
        [{"name": "third", "resume": True}, LATE | {"signals": [[3, 2, "SIGTERM", "itself"]], "slow": 60.0}],
    ]  # fmt: skip
    with Nodes(2, 2, folder=folder / "nodes", env=ENVIRONMENT, forked=True) as nodes:
        for several in jobs:
            nodes.launch(SCRIPT, str(folder), json.dumps([RUN | BROKEN | job for job in several]))
            nodes.wait(timeout_s=HANG_S)
            logs.append([nodes.rank_log(rank) for rank in range(RANKS)])
            launcher_logs = [nodes.launcher_log(node) for node in range(2)]
            codes.append([set(re.findall(r"exitcode +: (-?\d+)", log)) for log in launcher_logs])
            assert nodes.pids(0) + nodes.pids(1) == []
            files = [
                folder / "broken" / "_multinode" / f"ending-node{node}.json" for node in range(2)
            ]
            endings.append([json.loads(file.read_text()) for file in files if file.exists()])
    return {"folder": folder, "logs": logs, "codes": codes, "endings": endings}


def results(launches: dict, name: str) -> list[dict]:
    return [
        json.loads((launches["folder"] / f"{name}_rank{rank}.json").read_text())
        for rank in range(RANKS)
    ]


def test_row_15_every_rank_leaves_with_143_after_a_checkpoint(launches):
    of_signalled_launcher: set[str] = set()  # torchrun lists no codes then
    codes = [[{"143"}, of_signalled_launcher], [{"143"}, {"143"}], [{"143"}, {"143"}]]
    assert launches["codes"] == codes, launches["logs"][0][0][-3000:]
    for number, step in ((0, 3), (1, 5)):
        saved = f"pre-empted: {launches['folder']}/broken/checkpoint-{step} is saved"
        assert saved in launches["logs"][number][0], launches["logs"][number][0][-3000:]
        assert not any("the run failed" in log for log in launches["logs"][number])


def test_row_15_the_ending_file_has_the_code_and_the_checkpoint(launches):
    for number, step in ((0, 3), (1, 5)):
        for ending in launches["endings"][number]:
            assert (ending["code"], ending["step"]) == (143, step), ending
            assert ending["checkpoint"] == f"{launches['folder']}/broken/checkpoint-{step}"
    # that launch had resumed
    assert [ending["continues"] for ending in launches["endings"][1]] == [
        True,
        True,
    ]


def test_row_15_the_signal_and_the_time_that_is_left_are_named(launches):
    first, second = ("".join(logs) for logs in launches["logs"][:2])
    assert (
        len(
            re.findall(
                r"node 1, rank \d: received SIGHUP. A checkpoint follows at the end of step 3",
                first,
            )
        )
        == 1
    )
    assert "all ranks leave with code 143; 25 s are left for that" in first
    assert "node 0, rank 1: received SIGUSR1. A checkpoint follows at the end of step 5" in second
    assert "after a SIGTERM or SIGHUP 25 s are left" in first and "after a SIGUSR1 600 s" in first


def test_row_15_the_run_goes_on_bitwise(launches):
    """Rows, losses and norms of the gradient of all steps, in two runs that were pre-empted and one that ended."""
    runs = [results(launches, name) for name in ("whole", "first", "second", "third")]
    for whole, *parts in zip(*runs, strict=True):
        assert [list(map(int, part["steps"])) for part in parts] == [
            [1, 2, 3],
            [1, 2, 3, 4, 5],
            [1, 2, 3, 4, 5, 6],
        ]
        assert (
            parts[-1]["steps"] == whole["steps"]
            and len(set(map(tuple, whole["steps"].values()))) == LAST
        )
        assert [one for part in parts for one in part["rounds"]] == whole["rounds"]


def test_row_15_a_step_that_takes_too_long_ends_at_the_deadline(launches):
    last = {log.splitlines()[-1] for log in launches["logs"][2]}
    line = last.pop()
    assert not last, last
    assert (
        "node 1, rank 3, phase reward: pre-empted by SIGTERM: the end of step 3 did not come within"
        in line
    )
    assert (
        f"`preemption_grace` (3 s). The last whole checkpoint is {launches['folder']}/late/checkpoint-2"
        in line
    )
