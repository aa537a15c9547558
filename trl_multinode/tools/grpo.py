"""`trl-multinode grpo`: `accelerate launch` of the script of `examples/grpo.py`, in the form of `trl grpo`.

The command line may mix arguments of the script and flags of `accelerate launch`; a name of both is the script's. A
mistyped one is an error before any process starts.
"""

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).parents[1] / "accelerate_configs"
MODULE = "trl_multinode.examples.grpo"
PROG = "trl-multinode grpo"


def main(argv: list[str]) -> int:
    """Launch this node's share of a run.

    Raises:
        `SystemExit`: with status 2 for an invalid command line, and with the launcher's if a rank fails.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser

    launcher = launch_command_parser()
    with ExitStack() as stack:
        script, launch = split(argv, launcher, stack)
        launch_command(launcher.parse_args([*launch, "--module", MODULE, *script]))
    return 0


def split(argv: list[str], launcher: Any, stack: ExitStack) -> tuple[list[str], list[str]]:
    """Divide a command line between the script and `accelerate launch`.

    The training config is not built here: outside the launch they would take the world for one rank, and refuse
    batches that all ranks together fill.

    Args:
        argv (`list[str]`):
            Arguments. `--config FILE` names a YAML file with arguments of both.
        launcher (`argparse.ArgumentParser`):
            Parser of `accelerate launch`.
        stack (`ExitStack`):
            Deletes the script's own config file at its end, if `FILE` has keys of `accelerate launch` too.

    Returns:
        `tuple[list[str], list[str]]`: arguments of the script, and flags of `accelerate launch`.
    """
    from ..examples.grpo import make_parser

    parser = make_parser(PROG)
    parser.others = {
        "--accelerate_config",
        "-q",
        *(f"--{name}" for name in vars(launcher.parse_args(["script"]))),
    }
    path, arguments = _taken(argv, "--config")
    config = {} if path is None else _read_config(path, parser)
    in_config = parser.set_defaults_with_config(
        **{key: value for key, value in config.items() if key != "env"}
    )
    namespace, in_arguments = parser.parse_known_args(arguments)
    check_script_arguments(parser, namespace)
    script = without(arguments, in_arguments)
    if config:
        theirs = {flag.removeprefix("--") for flag in in_config[::2]}
        script += [
            "--config",
            _write({key: value for key, value in config.items() if key not in theirs}, stack),
        ]
    return script, resolved([*in_config, *in_arguments], parser)


def _read_config(path: str, parser: Any) -> dict[str, Any]:
    try:
        found = yaml.safe_load(Path(path).read_text()) or {}
    except OSError as error:
        parser.error(f"cannot read --config {path} ({error.strerror})")
    except yaml.YAMLError as error:
        parser.error(f"--config {path} is no valid YAML: {' '.join(str(error).split())}")
    if not isinstance(found, dict):
        parser.error(f"--config {path} holds no keys, got YAML's {found!r}")
    return found


def check_script_arguments(parser: Any, namespace: Any) -> None:
    """Build the script's own arguments: an unknown reward is an error before any process starts."""
    kind = parser.dataclass_types[0]
    try:
        kind(**{each.name: getattr(namespace, each.name) for each in fields(kind)})
    except ValueError as error:
        parser.error(str(error))


def without(words: list[str], taken: list[str]) -> list[str]:
    """Return `words` without those of `taken`, a part of them in the same order."""
    rest, left = [], list(taken)
    for word in words:
        if left and word == left[0]:
            left.pop(0)
        else:
            rest.append(word)
    return rest


def resolved(flags: list[str], parser: Any) -> list[str]:
    """Replace `--accelerate_config NAME`, a shipped config or a file, by accelerate's own `--config_file`."""
    name, others = _taken(flags, "--accelerate_config")
    if name is None:
        return flags
    path = Path(name) if Path(name).is_file() else CONFIGS / f"{name}.yaml"
    if not path.is_file():
        shipped = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
        parser.error(
            f"--accelerate_config is neither a file nor a shipped config (got {name}, expected one of {shipped})"
        )
    return ["--config_file", str(path), *others]


def _taken(words: list[str], flag: str) -> tuple[str | None, list[str]]:
    """Return the value of a flag, and the words without it."""
    parser = argparse.ArgumentParser(PROG, add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value")
    found, others = parser.parse_known_args(words)
    return found.value, others


def _write(config: dict[str, Any], stack: ExitStack) -> str:
    file = stack.enter_context(tempfile.NamedTemporaryFile("w", prefix="grpo-", suffix=".yaml"))
    yaml.safe_dump(config, file)
    file.flush()
    return file.name
