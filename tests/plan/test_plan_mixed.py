"""Nodes that differ: engines that serve the rows of all nodes, whole nodes of engines, and what their weights take."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from plan_kit import CONFIGS, layouts, size, task

from trl_multinode.tools import main
from trl_multinode.tools.plan.layouts import (
    CLOSE,
    WAYS,
    Layout,
    fastest,
    mixed_layouts,
    split_layouts,
    weight_sync,
)
from trl_multinode.tools.plan.measured import MeasuredRun, StepTimes
from trl_multinode.tools.plan.sync_seconds import (
    NIC_SHARE,
    Rates,
    Sync,
    load_seconds,
    pause_seconds,
    projected,
    pull_seconds,
    stage_seconds,
)
from trl_multinode.tools.plan.task import Task
from trl_multinode.tools.plan.training import STATE_BYTES

GB = 1e9
PAGE = (Path(__file__).parents[2] / "docs" / "operate" / "beyond.md").read_text()
SPLITS = [(7, 1), (6, 2), (4, 4)]


def measured(generate: float, train: float, flags: str) -> Task:
    """Return a task with seconds of 4+4, no sync, and a network that takes no time."""
    run = MeasuredRun(
        times=StepTimes(generate, train),
        sync_s=0.0,
        training=4,
        reserved=4,
        nodes=1,
        steps=9,
        ahead=False,
        in_flight=False,
        tail_known=True,
        mean_length=None,
    )
    plan = task("0.5B", flags)
    return replace(plan, run=run, cluster=replace(plan.cluster, link=1e30))


@pytest.mark.parametrize(
    ("generate", "train", "way", "engine_nodes"),
    [
        # both sides take as long: R / (M - R) = g / t
        (1.0, 1.0, "beside", 4),
        (1.0, 3.0, "beside", 2),
        (3.0, 1.0, "beside", 6),
        (7.0, 1.0, "in_flight", 7),
        # g / R + t / (M - R) is least where R / (M - R) is the root of g / t
        (1.0, 9.0, "after", 2),
        (9.0, 1.0, "after", 6),
        (1.0, 49.0, "after", 1),
    ],
)
def test_without_a_network_whole_nodes_divide_as_generation_and_training_do(
    generate, train, way, engine_nodes
):
    plan = measured(generate, train, "--nodes 8x8 --completion 4096 --rows 256")
    best = fastest(mixed_layouts(plan, []), way)
    assert best.ranks == (0,) * engine_nodes + (8,) * (8 - engine_nodes)
    parts = generate * 4 / engine_nodes, train * 4 / (8 - engine_nodes)
    assert getattr(best.seconds, way) == pytest.approx(sum(parts) if way == "after" else max(parts))


def test_an_engine_of_one_node_generates_the_rows_of_all_nodes_and_more_ranks_share_the_training():
    plan = task("8B")
    (uneven,), (even,) = split_layouts(plan, (7, 8, 8, 8)), split_layouts(plan, (7, 7, 7, 7))
    assert (uneven.name, even.name) == ("3x8+0/1x7+1", "7+1")
    assert (uneven.engine.engines, uneven.rows.number) == (1, 4 * 256)
    assert uneven.engine.tokens == pytest.approx(even.engine.tokens, rel=0.02)
    # the cache is full most of the time, so four times the rows take four times as long, but for the tail
    ratio = (uneven.seconds.generate - uneven.seconds.tail) / (
        even.seconds.generate - even.seconds.tail
    )
    assert 3.5 < ratio < 4.5
    assert uneven.memory.states == pytest.approx(STATE_BYTES * size("8B").parameters / 31)
    assert uneven.seconds.train == pytest.approx(even.seconds.train * 28 / 31)


def test_engines_of_all_nodes_have_one_degree_of_tensor_parallelism():
    plan = task("8B")
    found = split_layouts(plan, (0, 6, 6, 6))
    assert [one.engine.tensor_parallel for one in found] == [1, 2]
    assert [one.engine.engines for one in found] == [8 + 3 * 2, (8 + 3 * 2) // 2]


def test_the_host_memory_of_the_node_with_most_ranks_counts():
    plan = task("8B", "--nodes 4x8 --completion 4096 --rows 256 --offload all")
    (uneven,), (even,) = split_layouts(plan, (7, 8, 8, 8)), split_layouts(plan, (7, 7, 7, 7))
    assert uneven.memory.host == pytest.approx(even.memory.host * 4 * 8 / 31)


def test_the_nodes_needed_count_those_that_only_generate():
    layout = split_layouts(task("70B"), (0, 0, 8, 8))[-1]
    assert layout.micro_rows == 0 and layout.engine.tensor_parallel == 8
    enough, fewer = (
        split_layouts(task("70B"), (0, 0) + (8,) * (layout.nodes_needed - less))[-1]
        for less in (2, 3)
    )
    assert fewer.micro_rows == 0 < enough.micro_rows


def test_a_pull_takes_the_models_bytes_over_a_link_and_more_if_fewer_nodes_send_them():
    rates = Rates(nic=50 * GB)
    assert pull_seconds(Sync(80 * GB, nodes=4), rates) == 0.0
    for agents in (1, 2, 4):
        assert pull_seconds(Sync(80 * GB, nodes=4, agents=agents), rates) == pytest.approx(
            80 / 50 / NIC_SHARE
        )
    # each of two nodes sends half of the model to six
    assert pull_seconds(Sync(80 * GB, nodes=2, agents=6), rates) == pytest.approx(
        6 / 2 * 80 / 50 / NIC_SHARE
    )


@pytest.mark.parametrize(("ranks", "share"), [((7, 8, 8, 8), 30 / 31), ((0, 8, 8, 8), 2 / 3)])
def test_nodes_with_different_numbers_of_ranks_receive_what_all_other_ranks_have(ranks, share):
    plan = task("8B")
    split = weight_sync(plan, split_layouts(plan, ranks)[-1])
    across = stage_seconds(split, Rates(nic=50 * GB, hop_s=0.0))["across"]
    assert across == pytest.approx(share * split.num_bytes / (50 * GB * NIC_SHARE))


def test_ranks_never_wait_for_a_pull_and_engines_only_without_rows_in_flight():
    alone, joined = Sync(80 * GB, nodes=4), Sync(80 * GB, nodes=4, agents=2)
    assert pause_seconds(alone) == pause_seconds(joined)
    parts = pause_seconds(joined), pull_seconds(joined), load_seconds(joined)
    assert projected(joined) == pytest.approx(sum(parts))
    assert projected(joined) > projected(alone)
    plan = task("8B")
    layout = split_layouts(plan, (0, 8, 8, 8))[-1]
    split, rates = weight_sync(plan, layout), Rates(nic=plan.cluster.link)
    pause, pull, load = (each(split, rates) for each in (pause_seconds, pull_seconds, load_seconds))
    assert pull > 2 * size("8B").parameters / plan.cluster.link
    found = layout.seconds
    assert found.sync == pytest.approx(pause + pull + load)
    assert found.beside == pytest.approx(pause + pull + load + found.generate)
    assert found.in_flight < found.beside - pull


def test_a_step_is_never_shorter_than_a_pull():
    plan = measured(1.0, 1.0, "--nodes 4x8 --completion 4096 --rows 256")
    plan = replace(plan, cluster=replace(plan.cluster, link=1e6))
    found = split_layouts(plan, (0, 8, 8, 8))[-1].seconds
    pull = 2 * size("0.5B").parameters / (1e6 * NIC_SHARE)
    assert found.pause == 0.0 and found.sync == found.in_flight == pytest.approx(pull)
    assert found.beside == pytest.approx(pull + found.generate)
    assert found.after == pytest.approx(pull + found.generate + found.train)


def test_235b_fits_with_nodes_that_only_generate_and_with_no_split_of_80_gb():
    plan = task("235B", "--nodes 16x8 --completion 4096 --rows 256")
    assert not any(layout.fits for layout in layouts(plan).values())
    found = [layout for layout in mixed_layouts(plan, SPLITS) if layout.fits]
    assert found and all(
        0 in layout.ranks and layout.engine.tensor_parallel == 8 for layout in found
    )


def test_equal_nodes_win_over_others_that_are_about_as_fast():
    plan = task("8B")
    (uneven, *_), (even, *_) = split_layouts(plan, (4, 8, 8, 8)), split_layouts(plan, (4,) * 4)
    for factor, winner in ((0.999 / CLOSE, uneven), (1.001 / CLOSE, even)):
        seconds = replace(uneven.seconds, after=factor * even.seconds.after)
        best = fastest([replace(uneven, seconds=seconds), even], "after")
        assert best.ranks == winner.ranks


def test_one_node_has_no_other_nodes():
    assert mixed_layouts(task("8B", "--nodes 1x8 --completion 4096 --rows 256"), SPLITS) == []


def test_without_seconds_the_plan_has_a_layout_of_each_kind_that_fits():
    flags = "--nodes 4x8 --completion 4096 --rows 256 --gpu X1-96"
    uneven, engines = mixed_layouts(task("8B", flags), SPLITS)
    assert uneven.fits and engines.fits and 0 not in uneven.ranks and 0 in engines.ranks


def test_the_commands_start_the_engines_and_the_ranks_of_the_other_nodes(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    flags = ["--nodes", "8x8", "--completion", "4096", "--rows", "256"]
    assert main(["plan", str(CONFIGS / "70B.json"), *flags]) == 0
    text = capsys.readouterr().out
    config, engines, launch = (
        shlex.split(line)[1:] for line in text.splitlines() if line.startswith("  trl-multinode")
    )
    assert config == ["config", "6x8"] and main(config) == 0
    assert engines == ["engines", "--join", "HOST0:29500", "--tp", "8"]
    assert launch[:5] == ["launch", "6node.yaml", "--num_processes", "48", "train.py"]
    given = dict(zip(launch[5::2], launch[6::2], strict=True))
    # the agents have it, the nodes that train have no engine
    assert "--vllm_tensor_parallel_size" not in given
    assert given["--min_engines"] == "2"
    rows = 48 * int(given["--per_device_train_batch_size"])
    rows *= int(given["--gradient_accumulation_steps"])
    assert f"{rows} instead of 2048 rows" in text and rows % 8 == 0


# ---- the page


def cells(name: str, nodes: int) -> list[str]:
    """Return the lines of the page's table for a model."""
    plan = task(name, f"--nodes {nodes}x8 --completion 4096 --rows 256")
    *even, colocated = _kinds([*layouts(plan).values()])
    every = [even[0], *_kinds(mixed_layouts(plan, SPLITS))[1:3], colocated]
    lines = []
    for way, staleness in zip(WAYS, ("0", "1", "3"), strict=True):
        found = [fastest(kind, way) for kind in every]
        texts = [
            f"{one.name}: {getattr(one.seconds, way):.1f}"
            if one
            else "-"
            if any(other.fits for other in kind)
            else "does not fit"
            for one, kind in zip(found, every, strict=True)
        ]
        lines.append(f"| {name}, {nodes} nodes | {staleness} | {' | '.join(texts)} |")
    return lines


def _kinds(found: list[Layout]) -> tuple[list[Layout], ...]:
    even = [one for one in found if one.is_even and one.reserved]
    engine_nodes = [one for one in found if 0 in one.ranks]
    colocated = [one for one in found if not one.reserved]
    uneven = [one for one in found if one not in even + engine_nodes + colocated]
    return even, uneven, engine_nodes, colocated


@pytest.mark.parametrize(("name", "nodes"), [("8B", 4), ("32B", 4), ("70B", 8), ("235B", 16)])
def test_the_table_of_the_page_is_the_plans(name, nodes):
    plan = task(name, f"--nodes {nodes}x8 --completion 4096 --rows 256")
    split = weight_sync(plan, split_layouts(plan, (0,) + (8,) * (nodes - 1))[-1])
    if nodes > 4:
        pull = pull_seconds(split, Rates(nic=plan.cluster.link))
        assert f"{pull:.1f} s for {name}" in PAGE
    assert [line for line in PAGE.splitlines() if line.startswith(f"| {name},")] == cells(
        name, nodes
    )
