"""Command line of the check: its own flags beside those of `accelerate launch`."""

import argparse
from dataclasses import dataclass, fields, replace

from .flags import split_at_script
from .launch import Batch, Engines

DEFAULT_TIMEOUT_S = 600.0  # as long as torchrun waits for the nodes
OWN_FLAGS = ("gpus_per_node", "timeout", *(entry.name for entry in (*fields(Batch), *fields(Engines))))


@dataclass(frozen=True)
class CommandLine:
    """Words of the check's command line."""

    file: str
    flags: list[str]  # of `accelerate launch`, perhaps with a script and its arguments
    batch: Batch | None
    gpus_per_node: int
    engines: Engines
    timeout_s: float | None = None  # of the roll-call; `None` without `--wait`
    command: tuple[str, ...] = ()  # to run after the roll-call


def own_parser() -> argparse.ArgumentParser:
    """Return the parser of this module's own arguments."""
    parser = argparse.ArgumentParser("trl-multinode check", allow_abbrev=False)
    parser.usage = "%(prog)s FILE [flags of accelerate launch] [--gpus_per_node N] [script and its arguments]\n"
    parser.usage += "       %(prog)s FILE --wait [--timeout S] [flags of accelerate launch] [-- COMMAND]"
    parser.description = (
        "Report what `accelerate launch` would run on this node, and every problem with its cure. With --wait, on "
        "every node, meet the other nodes at --main_process_ip and --main_process_port; nodes that are missing, have "
        "the rank of another one or other versions are named. Then run COMMAND, which is the usual `accelerate launch "
        "...`, and end with the exit code of the run (docs/operate/errors.md)."
    )
    parser.epilog = "Any other flag is one of `accelerate launch`, as in --machine_rank 1 --main_process_ip HOST0."
    parser.add_argument("file", help="config file of `accelerate launch`; give it before any flag")
    parser.add_argument(
        "--gpus_per_node", "--gpus-per-node", type=_count, default=8, help="GPUs of a node (default: 8)"
    )
    parser.add_argument("--wait", action="store_true", help="meet the other nodes; anywhere before COMMAND")
    text = f"seconds to wait for them (default: {DEFAULT_TIMEOUT_S:.0f})"
    parser.add_argument("--timeout", type=seconds, default=DEFAULT_TIMEOUT_S, help=text)
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


def parse(argv: list[str]) -> CommandLine:
    """Split the command line into the file, words of `accelerate launch`, this module's own arguments, a command."""
    parser = own_parser()
    waits, command = False, []
    if "--wait" in argv[: argv.index("--") if "--" in argv else None]:
        waits, end = True, argv.index("--") if "--" in argv else len(argv)
        argv, command = [word for word in argv[:end] if word != "--wait"], argv[end + 1 :]
    if argv[:1] and not argv[0].startswith("-"):
        flags, words = split_at_script(argv[1:], OWN_FLAGS)
        options, flags = parser.parse_known_args([argv[0], *flags])
    else:  # --help, or flags before the file
        options, flags = parser.parse_known_args(argv)
        words = []
    given = {name: value for name, value in vars(options).items() if value is not None}
    batch = {entry.name: given[entry.name] for entry in fields(Batch) if entry.name in given}
    engines = {entry.name: given[entry.name] for entry in fields(Engines) if entry.name in given}
    return CommandLine(
        file=options.file,
        flags=[*flags, *words],
        batch=Batch(**batch) if batch else None,
        gpus_per_node=options.gpus_per_node,
        engines=Engines(**engines),
        timeout_s=options.timeout if waits else None,
        command=tuple(command),
    )


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a number from 1")
    return int(text)


def seconds(text: str) -> float:
    """Return a limit in seconds, for a parser."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected seconds, as in 600")
    return found


def _indices(text: str) -> list[int]:
    if not all(part.isdigit() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"got {text}, expected indices of GPUs, as in 6,7")
    return [int(part) for part in text.split(",")]
