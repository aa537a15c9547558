"""`make demo MODE=fake`: the demo's scripts, its process control and its report, in half a minute without vLLM."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "run.py"
pytestmark = [pytest.mark.zero3, pytest.mark.two_node, pytest.mark.nightly]


def demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(DEMO), "--mode", "fake", "--output_dir", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)


def test_the_fake_demo_learns_with_a_weight_update_every_step(tmp_path):
    run = demo(tmp_path / "demo")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "[demo] learned: reward 0." in run.stdout
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    layout = [summary[name] for name in ("nodes", "ranks", "engines", "steps", "weight_versions")]
    assert layout == [2, 4, 2, 30, 30]
    assert all(
        summary["phase_s"][phase] > 0 for phase in ("sync", "generate", "reward", "train", "wait")
    )
    assert summary["reasons"].keys() == {
        "valid_tokens_per_device_hour",
        "rollout_bytes_between_nodes",
    }
    made = json.loads((tmp_path / "demo" / "run.json").read_text())
    assert (
        made["engine"] == "fake"
        and made["sharded_parameters"][0] == made["sharded_parameters"][1] > 0
    )
    assert (tmp_path / "demo" / "reward.png").stat().st_size > 10_000


def test_a_node_that_fails_is_named_with_the_reason_of_its_ranks(tmp_path):
    run = demo(tmp_path / "demo", "--seed", "-1")  # every rank refuses it
    assert run.returncode == 1
    assert (
        "[demo] Node 0 failed." in run.stderr and "`rollout_seed` must be at least 0" in run.stderr
    )
