"""A run goes on with another number of ranks: same rows, losses within rounding, on real ZeRO-3 and two nodes."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file
from waiting import HANG_S, until

from multinode_kit.engines import FAKE
from multinode_kit.launch_files import DDP, FSDP2, ZERO3
from multinode_kit.nodes import Nodes

SCRIPT = Path(__file__).parent / "scripts" / "continued.py"
ENVIRONMENT = {"TRL_MULTINODE_ENGINE_MODULE": FAKE}
pytestmark = [pytest.mark.zero3, pytest.mark.two_node]

# 48 rows an optimizer step, which is a round: 12 prompts; an epoch has 2 steps, a run 3 epochs
RUN = {
    "prompts": 24, "num_train_epochs": 3, "per_device_train_batch_size": 4, "save_steps": 1,
    "max_completion_length": 8, "weight_decay": 0.1, "learning_rate": 1e-3,
}  # fmt: skip
ROWS, STEP, LAST = 48, 3, 6
# Of losses and norms at the first, second and later steps after the change. The second one shows that the moments came
# along. Then Adam makes a step of rounding where a gradient is zero (keys' biases).
TOLERANCES = 1e-6, 1e-4, 2e-3


def launch(nodes: Nodes, folder: Path, ranks: int, *jobs: dict) -> list[int]:
    """Each with as many micro-steps as make the global batch the same."""
    micro_steps = ROWS // (ranks * RUN["per_device_train_batch_size"])
    run = RUN | {"gradient_accumulation_steps": micro_steps}
    nodes.launch(SCRIPT, str(folder), json.dumps([run | job for job in jobs]))
    return nodes.wait(timeout_s=HANG_S)


def seen(folder: Path, name: str, first: int = 0) -> tuple[dict, dict]:
    """Rows of each round by the step at which it began, and losses and norms of each optimizer step after `first`."""
    rows: dict[int, list] = {}
    results = sorted(folder.glob(f"{name}_rank*.json"))
    runs = [json.loads(path.read_text()) for path in results]
    for run in runs:
        for one in run["rounds"]:
            rows.setdefault(one["step"], []).extend(one["rows"])
    steps = {int(step): values for step, values in runs[0]["steps"].items() if int(step) > first}
    return {step: found for step, found in rows.items() if step >= first}, steps


def same(
    folder: Path, name: str, whole: str, first: int = STEP, last: int = LAST, after: int = 0
) -> None:
    """The rows are the same ones in the same order, losses and norms differ by rounding since `after` steps."""
    rows, steps = seen(folder, name, first)
    expected_rows, expected_steps = seen(folder, whole, first)
    assert rows == expected_rows
    assert steps.keys() == expected_steps.keys() and max(steps) == last
    for number, (step, values) in enumerate(sorted(steps.items()), after):
        tolerance = TOLERANCES[min(number, len(TOLERANCES) - 1)]
        assert values == pytest.approx(expected_steps[step], abs=tolerance), step


def weights(folder: Path, output: str) -> dict:
    return load_file(folder / output / f"checkpoint-{LAST}" / "model.safetensors")


def copy(name: str, of: str, step: int = STEP, **fields) -> dict:
    return {"name": name, "output": name, "copy_of": f"{of}/checkpoint-{step}"} | fields


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("other_ranks")


FROZEN = {"frozen": ["model.layers.0.", "lm_head"]}


@pytest.mark.feature("Resume", "another number of nodes, ZeRO")
@pytest.mark.fault("40")
def test_a_run_of_two_nodes_goes_on_with_one(tmp_path):
    """The script of the resumed run draws other weights, so frozen ones are the checkpoint's, too."""
    short = FROZEN | {"max_staleness": 1, "num_train_epochs": 2}
    with Nodes(2, 1, folder=tmp_path / "whole", env=ENVIRONMENT, forked=True) as nodes:
        job = {"name": "full", "output": "full", "seed_of_model": 1} | short
        assert launch(nodes, tmp_path, 2, job) == [0, 0], nodes.rank_log(0)[-3000:]
    with Nodes(1, 1, folder=tmp_path / "other", env=ENVIRONMENT, forked=True) as nodes:
        best = {"best": "full/checkpoint-1"} | short
        jobs = copy("other", "full", 2, **short), copy("best", "full", 3, **best)
        assert launch(nodes, tmp_path, 1, *jobs) == [0], nodes.rank_log(0)[-3000:]
    same(tmp_path, "other", "full", 2, 4)
    # one step an optimizer step, as in the run of two ranks
    counts = [
        json.loads((tmp_path / f"{name}_rank0.json").read_text())["adam_steps"]
        for name in ("full", "other")
    ]
    assert counts == [[4], [4]]
    # written by two ranks, and loaded at the end
    differences = json.loads((tmp_path / "best_best_rank0.json").read_text())["differences"]
    assert differences and max(differences.values()) < 1e-6
    assert list(tmp_path.rglob("universal-*")) == []


@pytest.fixture(scope="module")
def whole(folder):
    """Runs without a change; 2 nodes x 2 ranks."""
    with Nodes(2, 2, folder=folder / "whole", env=ENVIRONMENT, forked=True) as nodes:
        codes = launch(
            nodes,
            folder,
            4,
            {"name": "full0", "output": "full0", "max_staleness": 0},
            {"name": "full1", "output": "full1", "max_staleness": 1},
            {"name": "full2", "output": "full2", "max_staleness": 2},
            {"name": "lora", "output": "lora", "max_staleness": 0, "lora": True},
            {"name": "frozen", "output": "frozen", "max_staleness": 0, "seed_of_model": 1,
             **FROZEN},
        )  # fmt: skip
        assert codes == [0, 0], nodes.rank_log(0)[-3000:]


@pytest.fixture(scope="module")
def three(folder, whole):
    """They go on with 3 nodes x 1 rank."""
    with Nodes(3, 1, folder=folder / "three", env=ENVIRONMENT, forked=True) as nodes:
        codes = launch(
            nodes,
            folder,
            3,
            copy("three0", "full0", max_staleness=0),
            copy("three1", "full1", max_staleness=1),
            copy("three2", "full2", max_staleness=2),
            copy("frozen3", "frozen", max_staleness=0, seed_of_model=2,
                 **FROZEN),
        )  # fmt: skip
        assert codes == [0] * 3, nodes.rank_log(0)[-3000:]
        return nodes.rank_log(0)


@pytest.mark.nightly
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_of_four_ranks_goes_on_with_three(folder, three, staleness):
    same(folder, f"three{staleness}", f"full{staleness}")


@pytest.mark.nightly
def test_every_prompt_in_flight_is_trained_once_across_the_change(folder, three):
    before, _ = seen(folder, "full2")
    after, _ = seen(folder, "three2", STEP)
    trained = [rows for step, rows in before.items() if step < STEP] + list(after.values())
    counts = Counter(row[0] for rows in trained for row in rows)
    assert set(counts.values()) == {4 * RUN["num_train_epochs"]} and len(counts) == RUN["prompts"]


@pytest.mark.nightly
def test_frozen_parameters_are_those_of_the_checkpoint(folder, three):
    """The script of the resumed run draws others."""
    mine, expected = weights(folder, "frozen3"), weights(folder, "frozen")
    assert mine.keys() == expected.keys()
    for name, tensor in mine.items():
        assert (tensor - expected[name]).abs().max() < 5e-3, name
    for name in ("lm_head.weight", "model.layers.0.mlp.up_proj.weight"):
        assert mine[name].equal(expected[name]), name


@pytest.fixture(scope="module")
def half_converted(folder, whole):
    """A process that converted a checkpoint was killed; returns the names of what it left."""
    source, own = folder / "full0" / f"checkpoint-{STEP}", folder / "two0" / "_multinode"
    code = "import sys; from pathlib import Path; from trl_multinode.saving.conversion import Conversion; "
    code += "Conversion(Path(sys.argv[1]), 4, Path(sys.argv[2]), 0).make()"
    process = subprocess.Popen([sys.executable, "-c", code, source, folder / "two0"])
    until(lambda: any(path.is_file() for path in own.rglob("*")))
    assert process.poll() is None
    process.kill()
    process.wait()
    # DeepSpeed's processes end with it
    until(
        lambda: (
            not [
                path
                for path in Path("/proc").glob("[0-9]*")
                if str(own).encode() in command_of(path)
            ]
        )
    )
    return {path.name for path in own.iterdir()}


def command_of(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def two(folder, three, half_converted):
    """They go on with 1 node x 2 ranks, a run of three ranks too."""
    with Nodes(1, 2, folder=folder / "two", env=ENVIRONMENT, forked=True) as nodes:
        codes = launch(
            nodes,
            folder,
            2,
            copy("two0", "full0", max_staleness=0),
            copy("again1", "three1", STEP + 1, max_staleness=1),
            copy("lora2", "lora", max_staleness=0, lora=True),
            copy("half", "full0", max_staleness=0, gradient_accumulation_steps=3),
        )  # fmt: skip
        assert codes == [0], nodes.rank_log(0)[-3000:]


@pytest.mark.nightly
def test_runs_of_four_and_of_three_ranks_go_on_with_two(folder, two):
    same(folder, "two0", "full0")
    same(folder, "lora2", "lora")
    same(folder, "again1", "full1", STEP + 1, after=1)


@pytest.mark.nightly
@pytest.mark.fault("40")
def test_a_start_after_a_kill_inside_the_conversion_converts_anew(folder, two, half_converted):
    """`two0`, whose losses are right, found a part of a conversion."""
    assert half_converted and not any(name.startswith("universal-") for name in half_converted)
    left = {path.name for path in (folder / "two0" / "_multinode").iterdir()}
    assert not left & half_converted


@pytest.mark.nightly
def test_a_run_with_half_the_global_batch_trains_the_other_prompts(folder, two):
    """Each once, in the same order; steps are half as large from the same place on."""
    rows, steps = seen(folder, "half")
    expected, _ = seen(folder, "full0", STEP)
    assert sorted(rows) == list(range(2 * STEP, 2 * LAST))
    assert set(range(2 * STEP + 1, 2 * LAST + 1)) <= steps.keys()
    prompts = [row[0] for _, of_step in sorted(rows.items()) for row in of_step]
    assert prompts == [row[0] for _, of_step in sorted(expected.items()) for row in of_step]
    rates, whole_rates = (
        json.loads((folder / f"{name}_rank0.json").read_text())["rates"]
        for name in ("half", "full0")
    )
    # half as far with each step
    assert rates[-2 * (LAST - STEP) :: 2] == pytest.approx(whole_rates[STEP:])


LAUNCHES = {
    "zero1": {"deepspeed": ZERO3 | {"zero_optimization": {"stage": 1}}},
    "zero2": {"deepspeed": ZERO3 | {"zero_optimization": {"stage": 2}}},
    "ddp": {"accelerate": DDP},
    "fsdp2": {"accelerate": FSDP2},
}


@pytest.mark.nightly
@pytest.mark.parametrize("how", LAUNCHES)
def test_others_than_zero_3_go_on_with_another_number_of_ranks(tmp_path, how):
    frozen = {"frozen": ["lm_head"], "max_staleness": 1}
    each = {"env": ENVIRONMENT, "forked": True} | LAUNCHES[how]
    with Nodes(1, 2, folder=tmp_path / "whole", **each) as nodes:
        job = {"name": "full", "output": "full"} | frozen
        assert launch(nodes, tmp_path, 2, job) == [0], nodes.rank_log(0)[-3000:]
    with Nodes(2, [2, 1], folder=tmp_path / "other", **each) as nodes:
        job = copy("other", "full", **frozen)
        assert launch(nodes, tmp_path, 3, job) == [0, 0], nodes.rank_log(0)[-3000:]
    same(tmp_path, "other", "full")
