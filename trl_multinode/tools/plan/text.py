"""Text of a plan: its tables; the template has the answers and the assumptions."""

import math
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill as wrap

from ...run import memory
from .. import config
from ..check.launch import Batch
from ..layout import Layout as ConfigLayout
from ..text import fill
from . import hardware, layouts, rounds, training
from .engine_memory import engine_memory
from .layouts import CLOSE, OPEN_ROUNDS, WAYS, Layout, Task, fastest, weight_sync
from .sync_seconds import Rates, pull_seconds

WIDTH = 110  # of a line
STALENESS = dict(zip(WAYS, (0, 1, OPEN_ROUNDS), strict=True))
SETTINGS = {way: f"with `max_staleness={rounds}`" for way, rounds in STALENESS.items()}


@dataclass(frozen=True)
class Asked:
    """Words of the command line that the commands at the end of a plan repeat.

    Args:
        script (`str`):
            Shell words: the script, its arguments, and those that were given as numbers.
        rows (`bool`):
            Whether the rows of a round were given as a number.
        file (`str`, *optional*):
            Config file of accelerate.
        layout ([`~trl_multinode.tools.layout.Layout`], *optional*):
            Layout of that file.
        group (`int`, *optional*, defaults to `8`):
            Completions of a prompt.
    """

    script: str
    rows: bool
    file: str | None = None
    layout: ConfigLayout | None = None
    group: int = Batch.num_generations


def text_of(task: Task, splits: list[Layout], colocated: list[Layout], asked: Asked) -> str:
    """Return the whole plan as text."""
    fitting = [each for each in splits if each.fits]
    best = best_of(fitting)
    filled = fill(
        "plan.txt",
        task=task,
        splits=splits,
        colocated=colocated,
        every=[*splits, *colocated],
        shown=shown(task, [*splits, *colocated]),
        fitting=fitting,
        colocated_fits=[each for each in colocated if each.fits],
        best=best,
        way=choice(best),
        awake=awake_rows(task, colocated),
        ways=SETTINGS,
        staleness=STALENESS,
        asked=asked,
        config_name=config.name_of,
        config_layout=config_layout,
        micro_steps=micro_steps,
        pull=lambda one: pull_seconds(weight_sync(task, one), Rates(nic=task.cluster.link)),
        exists=lambda name: Path(name).exists(),
        best_of=best_of,
        aligned=aligned,
        gib=lambda num_bytes: f"{num_bytes / hardware.GIB:.1f}",
        rates=vars(rounds) | vars(layouts) | vars(training) | vars(hardware) | vars(memory),
    )
    tables, answers, commands, assumed = str(filled).split("\n====\n")
    lines = [
        wrap(" ".join(each.split()), WIDTH, subsequent_indent="  ")
        for each in answers.split("\n- ")[1:]
    ]
    lines += ["", commands.strip(), "", "Assumed:"] if commands.strip() else ["", "Assumed:"]
    for each in assumed.split("\n- ")[1:]:
        lines.append(
            wrap(" ".join(each.split()), WIDTH, initial_indent="  - ", subsequent_indent="    ")
        )
    return "\n".join([tables, *lines])


def config_layout(layout: Layout) -> ConfigLayout:
    """Return the layout of the config file for the nodes that train; such a file leaves a GPU for vLLM."""
    gpus = round(layout.training + layout.reserved)
    return ConfigLayout(layout.training_nodes, min(layout.fewest, gpus - 1), gpus)


def micro_steps(task: Task, best: Layout, group: int, in_flight: bool) -> tuple[int, int]:
    """Return rows and number of a rank's micro-batches, with about the planned rows and with whole groups.

    In flight a group stays on its rank, otherwise the ranks of all nodes may share it.
    """
    ranks = 1 if in_flight else sum(best.ranks)
    planned = task.rows.number / best.training
    most = task.micro_rows or best.micro_rows
    least = math.ceil(planned / most)
    found = []
    # `group` numbers in a row: one of them is a multiple of it, with which any number of rows is
    for steps in range(least, least + group):
        multiple = group // math.gcd(group, ranks * steps)
        rows = multiple * min(max(1, round(planned / steps / multiple)), most // multiple)
        if rows:
            found.append((abs(rows * steps - planned), steps, rows))
    _, steps, rows = min(found)
    return rows, steps


def shown(task: Task, every: list[Layout]) -> list[Layout]:
    """Return the layouts with seconds. A measured time does not depend on the degree of tensor parallelism."""
    timed = [each for each in every if each.seconds is not None]
    if task.run is None:
        return timed
    most = {each.name: each for each in sorted(timed, key=lambda each: each.full_rows)}
    return [each for each in timed if most[each.name] is each]


def aligned(text: str) -> str:
    """Align the columns of a table, whose cells a `|` divides: the first to the left, the others to the right."""
    rows = [line.split("|") for line in text.splitlines() if line]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def best_of(layouts: list[Layout]) -> dict[str, Layout]:
    """Return the fastest layout in each way that has seconds."""
    return {way: layout for way in WAYS if (layout := fastest(layouts, way)) is not None}


def choice(best: dict[str, Layout]) -> str | None:
    """Return the least stale one of the ways that are about as fast as the fastest."""
    seconds = {way: float(getattr(layout.seconds, way)) for way, layout in best.items()}
    return next(
        (way for way, took in seconds.items() if took <= CLOSE * min(seconds.values())), None
    )


def awake_rows(task: Task, colocated: list[Layout]) -> int:
    """Return the longest rows at once in the caches of engines that do not sleep, with micro-batches of one row."""
    gpus = task.cluster.gpus
    memory = training.training_memory(task, (gpus,) * task.cluster.nodes, task.micro_rows or 1)
    taken = memory.total + training.FREE_SHARE * task.cluster.gpu.total
    degrees = [each.engine.tensor_parallel for each in colocated if each.fits]
    engines = [engine_memory(task, gpus, degree, taken) for degree in degrees]
    return max((engine.rows(task.row_tokens) for engine in engines), default=0)
