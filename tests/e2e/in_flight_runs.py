"""Runs with rounds in flight for the tests of `test_in_flight*.py`: settings, launches, and parts of their results."""

import json
from collections import Counter
from pathlib import Path

from waiting import HANG_S

from multinode_kit.faults import Faults
from multinode_kit.nodes import Nodes

SCRIPT = Path(__file__).parent / "scripts" / "in_flight.py"
GROUP, WORLD = 4, 4
SLOW = Faults().slow_tokens(0.06)  # generation takes longer than most steps
# On a busy machine a step may take longer than a row, so some rows wait until the next step has begun
HELD = SLOW.hold_rows(seconds=20)

# Four ranks x 8 rows = 8 prompts a round, two groups a rank
RUN = {
    "prompts": 40, "per_device_train_batch_size": 8, "steps_per_generation": 1, "gradient_accumulation_steps": 1,
    "max_completion_length": 256, "max_staleness": 2,
}  # fmt: skip


def start(nodes: Nodes, *jobs: dict) -> None:
    """Launch the jobs, whose results come into the folder of the nodes."""
    nodes.launch(SCRIPT, str(nodes.folder), json.dumps([RUN | job for job in jobs]))


def end(nodes: Nodes) -> None:
    """Wait until a launch has ended without an error."""
    codes = nodes.wait(timeout_s=HANG_S)
    assert codes == [0, 0], nodes.rank_log(0)[-3000:]


def results(folder: Path, name: str, world: int = WORLD) -> list[dict]:
    return [json.loads((folder / f"{name}_rank{rank}.json").read_text()) for rank in range(world)]


def trained(runs: list[dict]) -> Counter:
    """Prompt -> rows that were trained, of all ranks."""
    return Counter(prompt for run in runs for one in run["rounds"] for prompt in one["prompts"])


def versions(runs: list[dict]) -> list[list[list[int]]]:
    return [row for run in runs for one in run["rounds"] for row in one["versions"]]


def losses(run: dict) -> list[float]:
    return [entry["loss"] for entry in run["log"] if "loss" in entry]


def losses_of(runs: list[dict]) -> list[str]:
    """Prompt of each row of every loss, of all ranks."""
    return [prompt for run in runs for rows in run["trained"].values() for prompt in rows]


def check_whole(runs: list[dict], prompts: int) -> None:
    """Every id was trained once, rows with several versions exist, and nothing is left under way."""
    every = Counter({f"{i} + {i + 1} =": GROUP for i in range(prompts)})
    assert trained(runs) == every and Counter(losses_of(runs)) == every
    assert any(len(row) > 1 for row in versions(runs))
    assert [run["rows_left"] for run in runs] == [0] * len(runs)
