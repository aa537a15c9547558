"""`trl-multinode timeline RUN_DIR`: read a run's files, print a table of its nodes, write trace and page."""

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..text import Parser
from .page import write_page
from .perfetto import trace
from .reading import TAILS, Run, TimelineError, read_run
from .table import print_table

PROG = "trl-multinode timeline"
DESCRIPTION = """\
Show what every rank and every engine of a run did when, from the files that the run wrote into its output_dir.
It starts nothing and needs no GPU, and a run that still goes on may be read too."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(PROG, description=DESCRIPTION)
    parser.add_argument("run_dir", type=Path, nargs="+", metavar="RUN_DIR",
                        help="output_dir of the run; if the nodes do not share it, that of each node")  # fmt: skip
    parser.add_argument("--steps", metavar="a:b", help="optimizer steps a to b, as the log counts them; also a, a:, "
                        ":b, and -3: for the last three (default: all)")  # fmt: skip
    parser.add_argument("--nodes", metavar="a,b-c", help="only these nodes (default: all)")
    parser.add_argument("--attempt", type=int, metavar="N", help="number of the start of a run that was launched "
                        "again with the same output_dir (default: the last one)")  # fmt: skip
    parser.add_argument(
        "--html", action="store_true", help="write a page of the run too, which needs no network"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the files (default: "
                        "RUN_DIR/_multinode/timeline)")  # fmt: skip
    return parser


def with_negative_steps(arguments: list[str]) -> list[str]:
    """Join `--steps -3:` to one word, because argparse takes the second one for a flag."""
    found: list[str] = []
    for word in arguments:
        if found and found[-1] == "--steps" and re.match(r"-\d", word):
            found[-1] = f"--steps={word}"
        else:
            found.append(word)
    return found


def chosen_steps(text: str | None, steps: Sequence[int]) -> range:
    """Return the steps that `--steps` names.

    Raises:
        `TimelineError`: if the text is no range, or if the run has none of these steps.
    """
    if not steps:
        raise TimelineError("the run has ended before its first step, so there is nothing to show")
    first, last = steps[0], steps[-1]
    match = re.fullmatch(r"(-?\d+)|(-?\d+)?:(-?\d+)?", ":" if text is None else text)
    if match is None:
        raise TimelineError(
            f"--steps is not a range (got {text!r}, expected for example 10:12, 10, 10: or -3:)"
        )

    def number(group: str | None, default: int) -> int:
        found = int(group or default)
        return last + 1 + found if found < 0 else found

    begin = number(match[1] or match[2], first)
    end = number(match[1] or match[3], last)
    if not any(begin <= step <= end for step in steps):
        raise TimelineError(
            f"the run has no such steps (got --steps {text}, expected numbers from {first} to {last})"
        )
    return range(max(begin, first), min(end, last) + 1)


def of_nodes(run: Run, text: str | None) -> Run:
    """Return the lanes of the nodes that `--nodes` names.

    Raises:
        `TimelineError`: if the text is no list, or if the run has none of these nodes.
    """
    if text is None:
        return run
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise TimelineError(f"--nodes is not a list (got {text!r}, expected for example 0,4-7)")
        chosen |= {*range(int(match[1]), int(match[2] or match[1]) + 1)}
    lanes = [lane for lane in run.lanes if lane.node in chosen]
    if not lanes:
        raise TimelineError(
            f"the run has no such nodes (got --nodes {text}, expected some of {run.nodes})"
        )
    return replace(run, lanes=lanes)


def main(argv: list[str]) -> int:
    """Print the table and write the files.

    Returns:
        `int`: 0, or 1 if the folder has no run, or no such part of it.
    """
    options = _parser().parse_args(with_negative_steps(argv))
    try:
        for line in write(*chosen_part(options), options):
            print(line)
    except (TimelineError, OSError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    return 0


def chosen_part(options: argparse.Namespace) -> tuple[Run, range]:
    """Read the run of the chosen nodes, of some steps only the ends of its files; return the steps too.

    Raises:
        `TimelineError`: see [`read_run`], [`of_nodes`] and [`chosen_steps`].
    """

    def read(tail: int = sys.maxsize) -> tuple[Run, range]:
        run = of_nodes(read_run(options.run_dir, options.attempt, tail), options.nodes)
        return run, chosen_steps(options.steps, run.steps())

    # the page also has the losses of the whole run
    for tail in () if options.html or options.steps is None else TAILS:
        with suppress(TimelineError):  # what an end lacks may stand before it
            run, steps = read(tail)
            if run.has(steps):
                return run, steps
    return read()


def write(run: Run, steps: range, options: argparse.Namespace) -> list[str]:
    """Print the table and write the files; return the lines that name them."""
    part = run.cut(steps)
    shown = run if options.steps is None else part
    print_table(part)
    folder = options.out or options.run_dir[0] / "_multinode" / "timeline"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "timeline.json"
    with path.open("w") as file:
        file.writelines(trace(shown))
    size = f"{path.stat().st_size / 1e6:.1f} MB"
    lines = [*run.notes, f"wrote {path} ({size}): open it in https://ui.perfetto.dev"]
    if options.html:
        lines += write_page(run, steps, folder / "run.html")
    return lines
