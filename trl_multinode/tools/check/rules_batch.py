"""Rules for the script's batch arguments: the arithmetic of `GRPOConfig`, before any model is loaded."""

from collections.abc import Iterator
from math import gcd, lcm

from .launch import Batch, Launch, Problem


def world_problems(launch: Launch) -> Iterator[Problem]:
    """Yield violations by the script's own batch, if it is known."""
    if launch.script.batch is not None:
        yield from batch_problems(launch.script.batch, launch.num_ranks)


def batch_problems(batch: Batch, num_ranks: int) -> Iterator[Problem]:
    """Yield violations of `GRPOConfig`'s arithmetic: all ranks of all nodes together must generate whole groups."""
    group, rows, world = (
        batch.num_generations,
        batch.per_device_train_batch_size,
        batch.world(num_ranks),
    )
    if small := list(_too_small(batch)):
        yield from small
        return
    if batch.generation_batch_size and batch.steps_per_generation:
        yield Problem(
            f"TRL takes only one of `generation_batch_size` (got {world}) and `steps_per_generation`"
            f" (got {batch.steps_per_generation})",
            "leave one of them out",
        )
    if batch.generation_batch_size and (world % group or world % (rows * num_ranks)):
        what = f"`generation_batch_size` is not divisible (got {world}, expected a multiple of {rows} rows x"
        what += f" {num_ranks} ranks and of {group} generations)"
        fits = _multiples(lcm(rows * num_ranks, group), near=world)
        yield Problem(what, f"with {num_ranks} ranks, set `generation_batch_size` to {fits}")
    elif world % group:
        yield Problem(
            f"the world batch is not divisible by `num_generations` (got {world} completions = {rows} rows x"
            f" {num_ranks} ranks x {batch.steps} steps, expected a multiple of {group})",
            f"with {num_ranks} ranks, set {_values_that_work(batch, num_ranks)}",
        )


def _too_small(batch: Batch) -> Iterator[Problem]:
    for name, value in vars(batch).items():
        # a group of one has no advantage
        least = 2 if name == "num_generations" else 1
        if value is not None and value < least:
            yield Problem(f"`{name}` must be at least {least}, got {value}", "pass a larger number")


def _values_that_work(batch: Batch, num_ranks: int) -> str:
    """List the valid values nearest to the current ones, for a change of one argument."""
    group, rows, world = (
        batch.num_generations,
        batch.per_device_train_batch_size,
        batch.world(num_ranks),
    )
    steps_name = (
        "steps_per_generation" if batch.steps_per_generation else "gradient_accumulation_steps"
    )
    divisors = [size for size in range(2, world + 1) if world % size == 0]
    nearest = sorted(sorted(divisors, key=lambda size: abs(size - group))[:4])
    return (
        f"`per_device_train_batch_size` to {_multiples(group // gcd(group, num_ranks * batch.steps), near=rows)}, "
        f"or `{steps_name}` to {_multiples(group // gcd(group, num_ranks * rows), near=batch.steps)}, "
        f"or `num_generations` to {_either(nearest)}"
    )


def _multiples(step: int, near: int) -> str:
    first = max(1, near // step)
    return _either([step * (first + i) for i in range(3)])


def _either(values: list[int]) -> str:
    return " or ".join(filter(None, [", ".join(map(str, values[:-1])), *map(str, values[-1:])]))
