"""Command line of the check: its own flags beside those of `accelerate launch`."""

import argparse
from dataclasses import fields, replace

from .flags import split_at_script
from .launch import Batch, Engines

OWN_FLAGS = ("gpus_per_node", *(entry.name for entry in (*fields(Batch), *fields(Engines))))


def own_parser() -> argparse.ArgumentParser:
    """Return the parser of this module's own arguments."""
    parser = argparse.ArgumentParser("python -m trl_multinode.check", allow_abbrev=False)
    parser.usage = "%(prog)s FILE [flags of accelerate launch] [--gpus_per_node N] [script and its arguments]"
    parser.description = "Report what `accelerate launch` would run on this node, and every problem with its cure."
    parser.epilog = "Any other flag is one of `accelerate launch`, as in --machine_rank 1 --main_process_ip HOST0."
    parser.add_argument("file", help="config file of `accelerate launch`; give it before any flag")
    parser.add_argument(
        "--gpus_per_node", "--gpus-per-node", type=_count, default=8, help="GPUs of a node (default: 8)"
    )
    for entry in (*fields(Batch), *fields(Engines)):
        flag, kind = f"--{entry.name}", _indices if entry.name == "vllm_devices" else _count
        text = f"of the script, if none is named (default: {entry.default})"
        parser.add_argument(flag, flag.replace("_", "-"), type=kind, help=text)
    return parser


def batch_of(batch: Batch | None, words: list[str]) -> Batch | None:
    """Read the batch arguments of a script that has no parser which the check can read."""
    options, _ = own_parser().parse_known_args(["FILE", *words])
    given = {entry.name: getattr(options, entry.name) for entry in fields(Batch)}
    given = {name: value for name, value in given.items() if value is not None}
    return replace(batch or Batch(), **given) if given else batch


def parse(argv: list[str]) -> tuple[str, list[str], Batch | None, int, Engines]:
    """Split the command line into the file, words of `accelerate launch`, and this module's own arguments."""
    parser = own_parser()
    if argv[:1] and not argv[0].startswith("-"):
        flags, words = split_at_script(argv[1:], OWN_FLAGS)
        options, flags = parser.parse_known_args([argv[0], *flags])
    else:  # --help, or flags before the file
        options, flags = parser.parse_known_args(argv)
        words = []
    given = {name: value for name, value in vars(options).items() if value is not None}
    batch = {entry.name: given[entry.name] for entry in fields(Batch) if entry.name in given}
    engines = {entry.name: given[entry.name] for entry in fields(Engines) if entry.name in given}
    return options.file, [*flags, *words], Batch(**batch) if batch else None, options.gpus_per_node, Engines(**engines)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a number from 1")
    return int(text)


def _indices(text: str) -> list[int]:
    if not all(part.isdigit() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"got {text}, expected indices of GPUs, as in 6,7")
    return [int(part) for part in text.split(",")]
