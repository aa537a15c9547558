"""Command line of check, doctor and launch: their own flags beside those of `accelerate launch`."""

import argparse
from dataclasses import fields, replace
from typing import Any

from ..text import Parser, indices, numbers, positive
from .flags import split_at_script
from .launch import Batch, Engines

DEFAULT_TIMEOUT_S = 600.0  # as long as torchrun waits for the nodes
SCRIPT_FLAGS = (*fields(Batch), *fields(Engines))
OWN_FLAGS = (
    "gpus_per_node",
    "ranks",
    "min_nodes",
    "timeout",
    "level",
    *(entry.name for entry in SCRIPT_FLAGS),
)
DESCRIPTIONS = {
    "check": "Report what `accelerate launch` would run on this node, and every problem with its cure. Exit status: "
    "0 without problems, 1 with problems, 2 for an invalid command line.",
    "launch": "Run the same line on every node. It takes --machine_rank and --main_process_ip from the scheduler's "
    "variables unless they are given, checks the launch, and meets the other nodes at the address and port of the "
    "launch; nodes that are missing, have the rank of another one or other versions are named. Then it runs "
    "`accelerate launch`, and ends with the exit code of the run (docs/operate/errors.md).",
    "doctor": "Report what the launch would run (static), what this node has and what the launch needs of it (node), "
    "and all nodes side by side with the speed of each link between neighbours (cluster; run it on every "
    "node). Exit status: 0 without errors, 1 with errors, 2 for an invalid command line.",
}
USAGES = {
    "check": "[flags of accelerate launch] [--gpus_per_node N] [--ranks N0,N1,...] [--min_nodes N] "
    "[script and its arguments]",
    "launch": "[--timeout S] [--ranks N0,N1,...] [--min_nodes N] [flags of accelerate launch] SCRIPT [its arguments]",
    "doctor": "[--level static|node|cluster] [--json] [--paste] [flags of accelerate launch] "
    "[script and its arguments]",
}


def own_parser(command: str = "check") -> argparse.ArgumentParser:
    """Return the parser of the flags that are not those of `accelerate launch`."""
    parser = Parser(f"trl-multinode {command}")
    parser.usage = f"%(prog)s FILE {USAGES[command]}"
    parser.description = DESCRIPTIONS[command]
    parser.epilog = "Any other flag is one of `accelerate launch`, as in --machine_rank 1 --main_process_ip HOST0."
    parser.add_argument("file", help="config file of `accelerate launch`; give it before any flag")
    gpus = "GPUs of a node (default: 8; those that this node has, for launch)"
    parser.add_argument("--gpus_per_node", type=positive, help=gpus)
    ranks = "ranks of each node, node 0 first, as in 7,8,8,8; the same on every node (default: num_processes / nodes)"
    parser.add_argument("--ranks", type=numbers, default=(), help=ranks)
    fewest = "fewest nodes with which the launch may begin, if the scheduler gives no more (default: all)"
    parser.add_argument("--min_nodes", type=positive, help=fewest)
    if command == "doctor":
        levels = ("static", "node", "cluster")
        parser.add_argument(
            "--level", choices=levels, default="static", help="how far to look (default: static)"
        )
        parser.add_argument(
            "--json",
            action="store_true",
            help="print one JSON document, and nothing else, to stdout",
        )
        parser.add_argument(
            "--paste",
            action="store_true",
            help="print a block for an issue, without secrets and names",
        )
    if command != "check":
        text = f"seconds to wait for the other nodes (default: {DEFAULT_TIMEOUT_S:.0f})"
        parser.add_argument("--timeout", type=_seconds, default=DEFAULT_TIMEOUT_S, help=text)
    # a launch has a script, which has these arguments itself
    for entry in SCRIPT_FLAGS if command != "launch" else ():
        kind = indices if entry.name == "vllm_devices" else positive
        text = f"of the script, if none is named (default: {entry.default})"
        parser.add_argument(f"--{entry.name}", type=kind, help=text)
    return parser


def batch_of(batch: Batch | None, words: list[str]) -> Batch | None:
    """Read the batch arguments of a script that has no parser which the check can read."""
    options, _ = own_parser().parse_known_args(["FILE", *words])
    given = given_fields(Batch, options)
    return replace(batch or Batch(), **given) if given else batch


def parse(argv: list[str], command: str = "check") -> argparse.Namespace:
    """Split the command line into own flags, words of `accelerate launch` (`flags`), and script with arguments.

    Raises:
        `SystemExit`: with status 2, for an invalid flag of our own.
    """
    parser = own_parser(command)
    argv = without_launcher(argv)
    if not argv or argv[0].startswith("-"):
        parser.parse_args(argv)  # --help
        parser.error("give the config file before any flag")
    flags, script = split_at_script(argv[1:], OWN_FLAGS)
    options, rest = parser.parse_known_args([argv[0], *flags])
    if command == "doctor" and options.json and options.paste:
        parser.error("--json and --paste are two forms of one report: give one of them")
    if options.min_nodes and options.ranks:
        parser.error("--ranks names all nodes, so --min_nodes cannot leave one out")
    if command == "launch" and not script:
        parser.error("give the training script after the flags")
    options.flags, options.script = rest, script
    batch = given_fields(Batch, options)
    options.batch = Batch(**batch) if batch else None
    options.engines = Engines(**given_fields(Engines, options))
    return options


def without_launcher(words: list[str]) -> list[str]:
    """Return the words of `accelerate launch --config_file FILE ...` as this command takes them: FILE first."""
    if words[:2] != ["accelerate", "launch"]:
        return words
    file = Parser(add_help=False)
    file.add_argument("--config_file")
    flags, script = split_at_script(words[2:], OWN_FLAGS)
    found, rest = file.parse_known_args(flags)
    return [found.config_file, *rest, *script] if found.config_file else []


def given_fields(kind: type, options: Any) -> dict[str, Any]:
    """Return the fields of a data class that options, or a config, have."""
    values = {entry.name: getattr(options, entry.name, None) for entry in fields(kind)}
    return {name: value for name, value in values.items() if value is not None}


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected seconds, as in 600")
    return found
