"""`--min_nodes`: a launch begins on the nodes that the scheduler gives, with as many rows in an optimizer step."""

import check_kit
import pytest
from check_kit import ROOT, launched

from trl_multinode.tools.check.fewer_nodes import fewer_problems, words_here
from trl_multinode.tools.check.report import main

quiet_machine, write = check_kit.quiet_machine, check_kit.write
SCRIPT = [
    str(ROOT / "examples" / "grpo.py"),
    "--dataset_name",
    "d.json",
    "--reward_funcs",
    "think_format_reward",
]


def four_nodes(write, steps: int, *more: str) -> list[str]:
    file = write(num_machines=4, num_processes=28)
    return [file, *SCRIPT, "--gradient_accumulation_steps", str(steps), *more]


@pytest.mark.parametrize(
    ("steps", "more", "min_nodes", "found"),
    [
        (12, [], 1, []),
        (
            4,
            ["--steps_per_generation", "8"],
            2,
            [(3, "gradient_accumulation_steps"), (3, "steps_per_generation")],
        ),
        (2, [], 2, [(3, "gradient_accumulation_steps")]),
        (1, [], None, []),
        # a multiple of 4 x 7 ranks x 8 rows, but not of 3 x 7 x 8
        (
            12,
            ["--generation_batch_size", "448"],
            2,
            [(3, "generation_batch_size")],
        ),
    ],
)
def test_steps_that_cannot_have_as_many_rows_on_fewer_nodes_are_named_before_a_run(
    write, steps, more, min_nodes, found
):
    launch = launched(*four_nodes(write, steps, *more))
    problems = list(fewer_problems(launch, min_nodes))
    assert len(problems) == len(found)
    for problem, (nodes, name) in zip(problems, found, strict=True):
        assert f"on {nodes} of 4 nodes" in problem.what and name in problem.cure


@pytest.mark.parametrize(
    ("environ", "nodes"),
    [
        ({"SLURM_STEP_NUM_NODES": "3"}, 3),
        ({"PET_NNODES": "2"}, 2),
        (
            {"SLURM_STEP_NUM_NODES": "1"},
            None,
        ),  # fewer than allowed: the roll-call waits for the others
        ({"SLURM_STEP_NUM_NODES": "4"}, None),
        ({}, None),
    ],
)
def test_a_launch_takes_the_nodes_of_the_scheduler_and_keeps_its_rows(
    write, monkeypatch, environ, nodes
):
    launch = launched(*four_nodes(write, 6, "--steps_per_generation", "12"))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    flags, arguments = words_here(launch, 2)
    if nodes is None:
        assert flags == arguments == []
        return
    assert flags == ["--num_machines", str(nodes), "--num_processes", str(7 * nodes)]
    assert arguments == [
        "--gradient_accumulation_steps",
        str(24 // nodes),
        "--steps_per_generation",
        str(48 // nodes),
    ]
    monkeypatch.setenv("SLURM_NODEID", "1")
    fewer = launched(*[launch_file(write), *flags, *four_nodes(write, 6)[1:], *arguments])
    assert fewer.num_nodes == nodes
    assert fewer.script.batch.world(fewer.num_ranks) == launch.script.batch.world(launch.num_ranks)


def launch_file(write) -> str:
    return four_nodes(write, 6)[0]


def test_the_check_reports_them(write, capsys):
    file, *words = four_nodes(write, 2)
    assert main([file, "--min_nodes", "3", *words]) == 1
    assert "on 3 of 4 nodes" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([file, "--min_nodes", "3", "--ranks", "7,7,7,7", *words])
