"""`make demo MODE=fake` and `MODE=pool-fake`: the demo's scripts, its process control and its report, without vLLM.

`MODE=pool` runs with vLLM whose processes are forks of its engine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import HANG_S, until

from multinode_kit.faults import HOOK, TREE

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "run.py"
pytestmark = [pytest.mark.zero3, pytest.mark.two_node, pytest.mark.nightly]


def demo(
    folder: Path, *arguments: str, mode: str = "fake", **variables: str
) -> subprocess.CompletedProcess:
    command = [sys.executable, str(DEMO), "--mode", mode, "--output_dir", str(folder), *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=environment)


@pytest.fixture(scope="module")
def fake(tmp_path_factory) -> tuple[Path, str]:
    """Folder and output of a run whose engines never change."""
    folder = tmp_path_factory.mktemp("demo") / "fake"
    run = demo(folder)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder, run.stdout


def test_the_fake_demo_learns_with_a_weight_update_every_step(fake):
    folder, printed = fake
    assert "[demo] learned: reward 0." in printed
    summary = json.loads((folder / "summary.json").read_text())
    layout = [summary[name] for name in ("nodes", "ranks", "engines", "steps", "weight_versions")]
    assert layout == [2, 4, 2, 30, 30]
    assert all(
        summary["phase_s"][phase] > 0 for phase in ("sync", "generate", "reward", "train", "wait")
    )
    assert summary["reasons"].keys() == {
        "valid_tokens_per_device_hour",
        "rollout_bytes_between_nodes",
    }
    made = json.loads((folder / "run.json").read_text())
    assert (
        made["engine"] == "fake"
        and made["sharded_parameters"][0] == made["sharded_parameters"][1] > 0
    )
    assert (folder / "reward.png").stat().st_size > 10_000


def learned(folder: Path) -> list[tuple]:
    """Return reward and loss of each step, and the rewards of the evaluations."""
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    names = ("step", "reward", "loss", "grad_norm", "eval_reward")
    return [tuple(entry.get(name) for name in names) for entry in history]


def check_pool(run: subprocess.CompletedProcess) -> None:
    assert run.returncode == 0, run.stdout + run.stderr
    assert "every prompt was trained once in each epoch" in run.stdout
    for number in (2, 3):
        assert f"the agent with number {number} serves" in run.stdout
    assert "the agent with number 2 has left" in run.stdout


def test_a_pool_that_changes_learns_what_engines_of_the_nodes_learn(fake, tmp_path):
    check_pool(demo(tmp_path / "demo", mode="pool-fake"))
    assert learned(tmp_path / "demo") == learned(fake[0])


@pytest.mark.engine
def test_a_pool_of_vllm_changes_while_two_nodes_train(tmp_path):
    check_pool(demo(tmp_path / "demo", mode="pool", **{HOOK: TREE}))


def test_an_agent_that_ends_early_ends_the_demo(tmp_path):
    folder = tmp_path / "demo"
    command = [sys.executable, str(DEMO), "--mode", "pool-fake", "--output_dir", str(folder)]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        log = folder / "launch0" / "rank0.log"
        until(lambda: log.exists() and "serves with" in log.read_text(), "an agent")
        (agent,) = [one for one in psutil.Process(run.pid).children() if "engines" in one.cmdline()]
        agent.kill()
    except BaseException:
        run.terminate()
        raise
    finally:
        _, errors = run.communicate(timeout=HANG_S)
    assert run.returncode == 1 and "[demo] The first agent ended early, with code -9." in errors


def test_a_node_that_fails_is_named_with_the_reason_of_its_ranks(tmp_path):
    run = demo(tmp_path / "demo", "--seed", "-1")  # every rank refuses it
    assert run.returncode == 1
    assert (
        "[demo] Node 0 failed." in run.stderr and "`rollout_seed` must be at least 0" in run.stderr
    )
