"""A run that was killed goes on as if it had not been: same rows, same losses, on real ZeRO-3 and two nodes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from waiting import HANG_S

from multinode_kit.engines import FAKE
from multinode_kit.nodes import Nodes

SCRIPT = Path(__file__).parent / "scripts" / "continued.py"
ENVIRONMENT = {"TRL_MULTINODE_ENGINE_MODULE": FAKE}
pytestmark = [pytest.mark.zero3, pytest.mark.two_node]

# Two ranks x 4 rows x 2 micro-steps = 4 prompts a round: an epoch has 2 rounds and 4 optimizer steps, a run 2 epochs.
RUN = {
    "prompts": 8, "num_train_epochs": 2, "per_device_train_batch_size": 4, "steps_per_generation": 2,
    "gradient_accumulation_steps": 1, "save_steps": 1, "save_total_limit": 20, "max_completion_length": 8,
}  # fmt: skip
INSIDE = 5  # optimizer steps of a checkpoint in the second epoch, inside a generation block
LAST = 8


def launch(nodes: Nodes, folder: Path, *jobs: dict) -> list[int]:
    nodes.launch(SCRIPT, str(folder), json.dumps([RUN | job for job in jobs]))
    return nodes.wait(timeout_s=HANG_S)


def results(folder: Path, name: str, num_ranks: int = 2) -> list[dict]:
    return [
        json.loads((folder / f"{name}_rank{rank}.json").read_text()) for rank in range(num_ranks)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("continued")


@pytest.fixture(scope="module")
def whole(folder):
    """Uninterrupted runs, and some that resume from one of their checkpoints; 1 node x 2 ranks."""
    with Nodes(1, 2, folder=folder / "whole", env=ENVIRONMENT, forked=True) as nodes:
        codes = launch(
            nodes,
            folder,
            {"name": "full1", "output": "full1", "max_staleness": 1},
            {"name": "full0", "output": "full0", "max_staleness": 0},
            {"name": "rehearsed", "output": "rehearsed", "max_staleness": 0, "rehearse_longest": True,
             "save_strategy": "no", "save_minutes": 1e-6},
            {"name": "resumed0", "output": "other0", "copy_of": f"full0/checkpoint-{INSIDE}", "max_staleness": 0},
            {"name": "boundary", "output": "other2", "copy_of": f"full0/checkpoint-{LAST // 2}", "max_staleness": 0},
            {"name": "workers", "output": "other3", "copy_of": f"full0/checkpoint-{INSIDE}", "max_staleness": 0,
             "dataloader_num_workers": 1},
            {"name": "without", "output": "other1", "copy_of": f"full1/checkpoint-{INSIDE}", "max_staleness": 1,
             "without_rollouts": [0, 1]},
        )  # fmt: skip
        assert codes == [0], nodes.rank_log(0)[-3000:]
        return {"logs": [nodes.rank_log(rank) for rank in range(2)]}


@pytest.fixture(scope="module")
def killed(folder, whole):
    """Killed while an older checkpoint is deleted, continued, killed inside a new one, continued; 2 nodes x 1 rank."""
    job = {"output": "killed", "max_staleness": 1}
    deleting = {"kill_deleting": INSIDE, "kill_at": INSIDE, "save_total_limit": 1}
    with Nodes(2, 1, folder=folder / "nodes", env=ENVIRONMENT, forked=True) as nodes:
        assert 0 not in launch(nodes, folder, job | deleting | {"name": "first"})
        left = [path.name for path in (folder / "killed").rglob("*checkpoint-*") if path.is_dir()]
        assert 0 not in launch(
            nodes, folder, job | {"name": "second", "resume": True, "kill_inside": LAST - 1}
        )
        assert launch(nodes, folder, job | {"name": "third", "resume": True}) == [0, 0], (
            nodes.rank_log(0)[-3000:]
        )
        return {"logs": [nodes.rank_log(rank) for rank in range(2)], "left": left}


def from_step(run: dict, step: int) -> tuple[list, dict]:
    """Rounds that began at `step` or later, and what was logged of the optimizer steps after it."""
    rounds = [one for one in run["rounds"] if one["step"] >= step]
    return rounds, {number: seen for number, seen in run["steps"].items() if int(number) > step}


def same(continued: list[dict], full: list[dict], first: int, last: int) -> None:
    """Rows, staleness, losses and gradients of the optimizer steps `first` + 1 to `last` are equal, bit by bit."""
    for mine, whole in zip(continued, full, strict=True):
        rounds, steps = from_step(whole, first)
        assert from_step(mine, first) == (
            [one for one in rounds if one["step"] < last],
            {number: seen for number, seen in steps.items() if int(number) <= last},
        )
        assert str(last) in mine["steps"] and min(one["step"] for one in mine["rounds"]) >= first


def test_the_uninterrupted_runs_are_what_the_others_are_compared_with(folder, whole):
    for staleness in (0, 1):
        for run in results(folder, f"full{staleness}"):
            assert [one["step"] for one in run["rounds"]] == [0, 2, 4, 6]
            # an epoch begins with the newest weights
            lag = [
                [0, 0],
                [staleness, 2 * staleness],
            ] * 2
            assert [one["lag"] for one in run["rounds"]] == lag
            assert (
                list(map(int, run["steps"])) == list(range(1, LAST + 1)) and run["left_over"] == []
            )
    epochs = [
        [row[0] for one in run["rounds"][:2] for row in one["rows"]]
        for run in results(folder, "full1")
    ]
    later = [
        [row[0] for one in run["rounds"][2:] for row in one["rows"]]
        for run in results(folder, "full1")
    ]
    # another order, the same prompts
    assert epochs != later and sorted(sum(epochs, [])) == sorted(sum(later, []))
    losses = [loss for loss, _ in results(folder, "full1")[0]["steps"].values()]
    assert len(set(losses)) == LAST  # equal numbers below mean something
    first = [results(folder, f"full{staleness}")[0]["rounds"][0] for staleness in (0, 1)]
    assert first[0] == first[1]


def test_a_rehearsal_changes_nothing_bit_by_bit(folder, whole):
    """Under ZeRO-3: rows, losses, DeepSpeed's counters, and the last checkpoint with optimizer and random states."""
    without, with_it = results(folder, "full0"), results(folder, "rehearsed")
    same(with_it, without, 0, LAST)
    for mine, other in zip(with_it, without, strict=True):
        assert mine["counters"] == other["counters"] and mine["counters"]["micro_steps"] == LAST
        assert mine["rehearsed"] == [[8, 15]] and other["rehearsed"] == []  # "7 + 8 =" and 8 tokens
    checkpoints = [folder / name / f"checkpoint-{LAST}" for name in ("full0", "rehearsed")]
    for name in (
        "model.safetensors",
        "rng_state_0.pth",
        "rng_state_1.pth",
        "rollouts_rank0.safetensors",
    ):
        assert equal(*(load(checkpoint / name) for checkpoint in checkpoints)), name
    states = [sorted(checkpoint.rglob("*_states.pt")) for checkpoint in checkpoints]
    assert [path.name for path in states[0]] == [path.name for path in states[1]] and len(
        states[0]
    ) == 4
    for pair in zip(*states, strict=True):
        assert equal(*map(load, pair)), pair[0].name
    assert "rehearsing the longest rows" in whole["logs"][0]


def test_checkpoints_by_time_are_saved_on_all_ranks_like_others(folder, whole):
    saved = [
        sorted(path.name for path in (folder / name).glob("checkpoint-*"))
        for name in ("full0", "rehearsed")
    ]
    assert saved[0] == saved[1] and len(saved[0]) == LAST


def load(path: Path):
    return (
        load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=False)
    )


def equal(one, other) -> bool:
    """Whether two saved states have the same contents; DeepSpeed's groups of processes are left out."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return one == other or type(one).__module__.startswith(("deepspeed", "transformers"))


def test_a_resume_inside_a_block_of_the_second_epoch_repeats_every_row_and_loss(folder, whole):
    same(results(folder, "resumed0"), results(folder, "full0"), INSIDE, LAST)


def test_a_resume_at_the_end_of_an_epoch_begins_the_next_one(folder, whole):
    """TRL 1.16 replays the order of the first epoch."""
    same(results(folder, "boundary"), results(folder, "full0"), LAST // 2, LAST)


def test_a_resume_with_workers_of_the_loader_repeats_every_row_and_loss(folder, whole):
    same(results(folder, "workers"), results(folder, "full0"), INSIDE, LAST)


def test_without_the_rollouts_file_they_are_generated_afresh_and_that_is_logged(folder, whole):
    for rank, run in enumerate(results(folder, "without")):
        assert (
            f"Rank {rank}: " in whole["logs"][rank]
            and "has no rollouts, or those of another layout" in whole["logs"][rank]
        )
        assert [(one["step"], one["lag"]) for one in run["rounds"]] == [
            (INSIDE, [0, 0]),
            (INSIDE + 1, [1, 1]),
        ]
        prompts = [
            [row[0] for row in one["rows"]] for one in results(folder, "full1")[rank]["rounds"][2:]
        ]
        assert [[row[0] for row in one["rows"]] for one in run["rounds"]] == prompts
        assert str(LAST) in run["steps"]


@pytest.mark.fault("39")
def test_a_killed_run_goes_on_with_the_round_that_was_ahead(folder, killed):
    """On two nodes; the uninterrupted run had one, which may not matter either."""
    same(results(folder, "first"), results(folder, "full1"), 0, INSIDE)
    same(results(folder, "second"), results(folder, "full1"), INSIDE, LAST - 1)
    assert results(folder, "second")[0]["rounds"][0]["lag"] == [1, 2]


def test_a_run_killed_while_it_deleted_the_old_checkpoint_has_the_new_one(folder, killed):
    """With `save_total_limit=1`; the folder of the old one lacks files, and has another name."""
    deleting, whole = sorted(killed["left"], reverse=True)
    assert whole == f"checkpoint-{INSIDE}" and deleting.startswith(
        f"deleting-checkpoint-{INSIDE - 1}-"
    )
    assert results(folder, "second")[0]["rounds"][0]["step"] > INSIDE
    assert not list((folder / "killed").rglob("deleting-*"))


@pytest.mark.fault("34")
def test_a_checkpoint_that_was_being_written_is_skipped_and_named(folder, killed):
    assert (folder / "killed" / f"checkpoint-{LAST - 1}").is_dir()
    for log in killed["logs"]:
        assert re.search(rf"checkpoint-{LAST - 1} .*unfinished", log)
    same(results(folder, "third"), results(folder, "full1"), LAST - 2, LAST)


@pytest.mark.feature("Resume", "nodes that share `output_dir`")
def test_nodes_that_share_the_output_directory_go_on(folder, killed):
    assert (folder / "killed" / f"checkpoint-{LAST}").is_dir()
    # markers of finished checkpoints
    assert list((folder / "killed" / "_multinode" / "saving").iterdir()) == []


# ---- other layouts --------------------------------------------------------------------------------------------------

# `saving/` decides who resumes from what, and what is refused
APART = {
    "output": "apart/node{node}",
    "save_on_each_node": True,
    "max_staleness": 0,
    "save_total_limit": 1,
}


@pytest.fixture(scope="module")
def apart(folder, whole):
    """Two nodes that do not share `output_dir`: killed after a checkpoint, then continued."""
    with Nodes(2, 1, folder=folder / "apart_nodes", env=ENVIRONMENT, forked=True) as nodes:
        assert 0 not in launch(nodes, folder, APART | {"name": "apart1", "kill_at": INSIDE})
        assert launch(nodes, folder, APART | {"name": "apart2", "resume": True}) == [0, 0], (
            nodes.rank_log(0)[-3000:]
        )


@pytest.mark.nightly
@pytest.mark.feature("Resume", "nodes that do not share `output_dir`")
@pytest.mark.fault("39")
def test_nodes_that_do_not_share_it_go_on_too(folder, apart):
    for node in range(2):
        states = (folder / "apart" / f"node{node}" / f"checkpoint-{LAST}").rglob(
            "*_optim_states.pt"
        )
        assert [path.name for path in states] == [f"zero_pp_rank_{node}_mp_rank_00_optim_states.pt"]
        assert [path.name for path in (folder / "apart" / f"node{node}").glob("check*")] == [
            f"checkpoint-{LAST}"
        ]
    same(results(folder, "apart2"), results(folder, "full0"), INSIDE, LAST)


@pytest.mark.nightly
@pytest.mark.feature(
    "Resume", "another number of nodes that do not share `output_dir`, ZeRO", refused=True
)
def test_files_of_a_lost_node_are_named(folder, apart, record_property):
    with Nodes(1, 1, folder=folder / "one_node", env=ENVIRONMENT, forked=True) as nodes:
        assert launch(nodes, folder, APART | {"name": "alone", "resume": True}) != [0]
        told = re.search(
            "ConfigurationError: (.* was written by 2 ranks .*optim_states.pt.*)", nodes.rank_log(0)
        )
        assert told, nodes.rank_log(0)[-3000:]
        record_property("message", re.sub(r"/\S*/checkpoint-", "checkpoint-", told[1]))


@pytest.mark.nightly
@pytest.mark.feature("Resume", "nodes with different numbers of ranks")
def test_a_run_on_uneven_nodes_resumes_on_the_same_ones(folder):
    """Three ranks, the rows of which are balanced between all of them."""
    run = {"prompts": 12, "max_staleness": 1, "micro_batch_tokens": 64, "balance_across": "world"}
    copy = {"output": "uneven2", "copy_of": f"uneven/checkpoint-{INSIDE}"}
    with Nodes(2, [2, 1], folder=folder / "uneven_nodes", env=ENVIRONMENT, forked=True) as nodes:
        codes = launch(nodes, folder, *[run | job for job in (
            {"name": "uneven", "output": "uneven"}, copy | {"name": "uneven2"},
        )])  # fmt: skip
        assert codes == [0, 0], nodes.rank_log(0)[-3000:]
    full, resumed = results(folder, "uneven", 3), results(folder, "uneven2", 3)
    assert sum(len(rank["rounds"][0]["rows"]) for rank in full) == 24
    same(resumed, full, INSIDE, LAST)
