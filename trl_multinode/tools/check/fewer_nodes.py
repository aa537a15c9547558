"""A launch on fewer nodes than its config file has (`--min_nodes`), with as many rows in every optimizer step."""

import os
from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from .launch import Launch, Problem
from .rules_batch import batch_problems
from .rules_nodes import SCHEDULERS

STEPS = ("gradient_accumulation_steps", "steps_per_generation")


def fewer_problems(launch: Launch, min_nodes: int | None) -> Iterator[Problem]:
    """Yield the arguments with which fewer nodes cannot have as many rows in a step, or no whole groups."""
    batch, all_nodes = launch.script.batch, launch.num_nodes
    for nodes in range(min_nodes or all_nodes, all_nodes):
        where, needed = f"on {nodes} of {all_nodes} nodes", nodes // gcd(nodes, all_nodes)
        uneven = {name: steps for name, steps in _steps(launch) if steps % needed}
        for name, steps in uneven.items():
            yield Problem(
                f"{where} an optimizer step cannot have as many rows (got `{name}` {steps}, expected a multiple of "
                f"{needed})",
                f"change `{name}`, or pass a larger --min_nodes",
            )
        if batch is not None and launch.script.values and not uneven:
            scaled = {name: steps * all_nodes // nodes for name, steps in _steps(launch)}
            for problem in batch_problems(replace(batch, **scaled), nodes * launch.ranks_per_node):
                yield Problem(f"{where} {problem.what}", problem.cure)


def words_here(launch: Launch, min_nodes: int) -> tuple[list[str], list[str]]:
    """Return the flags of `accelerate launch`, and the arguments of the script, for the nodes that are here.

    Both are empty if the scheduler has set no number of nodes that is at least `min_nodes`, and less than the file's.
    """
    counts = [os.environ.get(name, "") for name, _ in SCHEDULERS.values()]
    nodes = next((int(count) for count in counts if count.isdigit()), 0)
    if not min_nodes <= nodes < launch.num_nodes:
        return [], []
    flags = ["--num_machines", str(nodes), "--num_processes", str(nodes * launch.ranks_per_node)]
    arguments = []
    for name, steps in _steps(launch):
        arguments += [f"--{name}", str(steps * launch.num_nodes // nodes)]
    return flags, arguments


def _steps(launch: Launch) -> Iterator[tuple[str, int]]:
    """Yield the micro-steps of a script that parses its arguments; another one sees to its rows itself."""
    for name in STEPS if launch.script.values else ():
        if steps := getattr(launch.script.batch, name):
            yield name, steps
