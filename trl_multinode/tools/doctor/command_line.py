"""Command line of the doctor: its own flags, those of the check, and those of `accelerate launch`."""

import argparse
from dataclasses import dataclass

from ..check.command_line import DEFAULT_TIMEOUT_S, OWN_FLAGS, CommandLine, parse, seconds
from ..check.flags import split_at_script

LEVELS = ("static", "node", "cluster")


@dataclass(frozen=True)
class DoctorLine:
    """Words of the doctor's command line."""

    level: str
    as_json: bool
    as_paste: bool
    timeout_s: float
    gpus_given: bool  # whether the caller set `--gpus_per_node`
    check: CommandLine


def own_parser() -> argparse.ArgumentParser:
    """Return the parser of the doctor's own flags."""
    parser = argparse.ArgumentParser("trl-multinode doctor", allow_abbrev=False)
    parser.usage = "%(prog)s FILE [--level static|node|cluster] [--json] [--paste] [flags of accelerate launch] "
    parser.usage += "[script and its arguments]"
    parser.description = (
        "Report what the launch would run (static), what this node has and what the launch needs of it (node), and "
        "all nodes side by side with the speed of each link between neighbours (cluster; run it on every node). "
        "Exit status: 0 without errors, 1 with errors, 2 for an invalid command line."
    )
    parser.epilog = "All other flags are those of `trl-multinode check` and of `accelerate launch`."
    parser.add_argument("file", help="config file of `accelerate launch`; give it before any flag")
    parser.add_argument("--level", choices=LEVELS, default="static", help="how far to look (default: static)")
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else, to stdout")
    parser.add_argument("--paste", action="store_true", help="print a block for an issue, without secrets and names")
    text = f"seconds to wait for the other nodes (default: {DEFAULT_TIMEOUT_S:.0f})"
    parser.add_argument("--timeout", type=seconds, default=DEFAULT_TIMEOUT_S, help=text)
    return parser


def parse_line(argv: list[str]) -> DoctorLine:
    """Split the command line into the doctor's own flags and those of the check.

    Raises:
        `SystemExit`: with status 2, for an invalid flag of the doctor.
    """
    parser = own_parser()
    if not argv or argv[0].startswith("-"):
        parser.parse_args(argv)
        parser.error("give the config file before any flag")
    flags, script = split_at_script(argv[1:], (*OWN_FLAGS, "level"))
    own, rest = parser.parse_known_args([argv[0], *flags])
    if own.json and own.paste:
        parser.error("--json and --paste are two forms of one report: give one of them")
    return DoctorLine(
        level=own.level,
        as_json=own.json,
        as_paste=own.paste,
        timeout_s=own.timeout,
        gpus_given=any(word.replace("-", "_").startswith("__gpus_per_node") for word in rest),
        check=parse([own.file, *rest, *script]),
    )
