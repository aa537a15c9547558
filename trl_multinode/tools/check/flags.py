"""Split the words of a command line into flags of `accelerate launch` and a script, with accelerate's own parser."""

import argparse
from collections.abc import Iterable

from accelerate.commands import launch as accelerate_launch

from ...former_arguments import did_you_mean

NO_SCRIPT = "(nothing)"  # in the place of a script that is not named


def _launch_parser() -> argparse.ArgumentParser:
    parser = accelerate_launch.launch_command_parser()
    parser.register("type", int, _integer)
    parser.prog = "trl-multinode check"
    parser.usage = "%(prog)s FILE [flags of accelerate launch]"  # accelerate's own usage is a hundred lines long
    return parser


def _integer(text: str) -> int:
    """Convert the value of a flag that `accelerate launch` reads as a number."""
    try:
        return int(text)
    except ValueError:
        placeholder = "; K stands for the number of the node: 0 to N-1, another one on each node"
        hint = placeholder if text == "K" else ""
        raise argparse.ArgumentTypeError(f"got {text}, expected an integer{hint}") from None


def flag_names() -> set[str]:
    """Return the names of all flags of `accelerate launch`."""
    return set(vars(_launch_parser().parse_args([NO_SCRIPT])))


def split_at_script(words: list[str], own: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split the words of a command line before the script, of which `accelerate launch` takes the first position.

    Args:
        words (`list[str]`):
            Flags of `accelerate launch` and of the check, perhaps followed by a script and its arguments.
        own (`Iterable[str]`):
            Names of the check's own flags; each takes a value.

    Returns:
        `tuple[list[str], list[str]]`: the flags; the script and its arguments, or an empty list.

    Raises:
        `SystemExit`: with status 2, if the last flag lacks its value.
    """
    both = _launch_parser()
    for name in set(own) - flag_names():
        both.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name)
    args, _ = both.parse_known_args([*words, NO_SCRIPT, NO_SCRIPT])
    script = [args.training_script, *args.training_script_args][:-2]
    if not args.training_script_args:
        both.error(
            f"argument {words[-1]}: expected one argument, got none: a variable may be empty"
        )
    return words[: len(words) - len(script)], script


def parse_flags(path: str, flags: list[str], script: list[str]) -> argparse.Namespace:
    """Parse flags with the parser of `accelerate launch`.

    Raises:
        `SystemExit`: with status 2, for a flag that `accelerate launch` does not have, or for two config files.
    """
    parser = _launch_parser()
    args, unknown = parser.parse_known_args(
        ["--config_file", path, *flags, *(script or [NO_SCRIPT])]
    )
    if unknown and str(args.main_process_ip).endswith(".py"):
        parser.error(
            f"--main_process_ip got {args.main_process_ip}, expected an address: a variable may be empty"
        )
    if unknown:
        hint = did_you_mean(unknown[0], [f"--{name}" for name in vars(args)])
        parser.error(f"`accelerate launch` has no flag {unknown[0]}{hint}")
    if args.config_file != path:
        parser.error(
            f"two config files (got {path} and {args.config_file}): give one, without --config_file"
        )
    return args
