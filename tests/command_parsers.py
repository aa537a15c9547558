"""Parsers of the programs that the documentation calls: accelerate, this package, make, pip, our scripts."""

import argparse
import re
import runpy
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

from doc_commands import ROOT, Command, Refused

SHELL = {"cd", "exec", "exit", "export", "set", "source", "trap"}  # the shell's own
# Programs of others, which are not parsed. A command of ours among their arguments is.
OTHERS = {"docker", "enroot", "getent", "git", "head", "hf", "hostname", "ip", "kubectl", "sbatch", "scancel",
          "scontrol", "scp", "sinfo", "sky", "squeue", "srun", "ssh", "trackio"}  # fmt: skip
PLACEHOLDERS = {"K": "0", "HOST0": "10.0.0.1"}  # words of the pages for a node's number and for node 0's address


def filled(words: tuple[str, ...]) -> list[str]:
    """The words with values in the place of shell variables and of the pages' placeholders."""
    return [PLACEHOLDERS.get(word, re.sub(r"\$\{?\w+\}?", "0", word)) for word in words]


def check(command: Command) -> str:
    """Parse a command with its program's own parser. Returns what parsed it.

    Raises:
        Refused: the parser refuses it, or no parser is known.
    """
    program, *words = filled(command.words)
    if "..." in words:
        raise Refused(f"{command}: write the command in full")
    if program in SHELL | OTHERS or program == "bash":
        return "not parsed"
    checks: dict[str, Callable[[list[str]], None]] = {
        "accelerate": _launch, "trl-multinode": _own, "python": _python, "python3": _python, "make": _make,
        "pip": _pip,
    }  # fmt: skip
    if program not in checks:
        raise Refused(f"{command}: no parser for {program}; add it to tests/command_parsers.py")
    try:
        checks[program](words)
    except SystemExit as error:
        if error.code not in (0, None):
            raise Refused(f"{command}: refused with status {error.code}") from error
    except Refused as error:
        raise Refused(f"{command}: {error}") from error
    return program


def _launch(words: list[str]) -> None:
    """Parse as accelerate does, and check the launch by this library's rules; nothing starts."""
    from accelerate.commands.launch import launch_command_parser

    from trl_multinode.check.report import check as check_launch

    if words[:1] != ["launch"]:
        raise Refused("only `accelerate launch` is parsed")
    args = launch_command_parser().parse_args(words[1:])
    if args.config_file is None:
        return
    at = words.index("--config_file")
    launch, problems = check_launch(args.config_file, [*words[1:at], *words[at + 2 :]], port=False)
    if problems:
        raise Refused("; ".join(problem.what for problem in problems))
    if unread := [note for note in launch.script.notes if "are not checked" in note and "examples/" in note]:
        raise Refused(unread[0])


def _own(words: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    from trl_multinode.check.command_line import parse
    from trl_multinode.command import COMMANDS, main
    from trl_multinode.command.grpo import split as split_grpo

    name, *rest = words
    if name == "grpo":
        with ExitStack() as stack:
            script, launch = split_grpo(rest, launch_command_parser(), stack)
            _launch(["launch", *launch, "--module", "trl_multinode.examples.grpo", *script])
    elif name == "check":
        if (status := main(["check", *_without_wait(rest)])) != 0:
            raise Refused(f"the check has found problems, status {status}")
        if command := parse(rest).command:
            check(Command(ROOT / "its command", 0, tuple(command)))
    elif name == "config":
        _write_config(words)
    elif name in COMMANDS:
        with parsed_only():
            COMMANDS[name](rest)
    else:
        raise Refused(f"there is no command {name}")


def _write_config(words: list[str]) -> None:
    """Run `trl-multinode config`; the files that it writes replace those that are here."""
    from trl_multinode.command import main

    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        if (status := main(words)) != 0:
            raise Refused(f"status {status}")
        for path in Path(folder).iterdir():
            shutil.copy(path, here)


def _without_wait(words: list[str]) -> list[str]:
    """The words of a check without the roll-call, which would wait for the other nodes."""
    end = words.index("--") if "--" in words else len(words)
    return [word for word in words[:end] if word != "--wait"]


class _Parsed(Exception):
    """The outermost parser is done."""


@contextmanager
def parsed_only() -> Iterator[None]:
    """Let the code inside run until its first argument parser has parsed the command line.

    What `parse_known_args` leaves over must be flags of `accelerate launch` or of the check.
    """
    inner, real = False, argparse.ArgumentParser.parse_known_args
    strict, real_strict = False, argparse.ArgumentParser.parse_args

    def parse_known(self: argparse.ArgumentParser, *args: object, **kwargs: object) -> tuple:
        nonlocal inner
        if inner:  # a sub-parser's
            return real(self, *args, **kwargs)
        inner = True
        _, unknown = real(self, *args, **kwargs)
        if lost := [word for word in unknown if strict or (word[:2] == "--" and word not in _launch_flags())]:
            self.error(f"unrecognized arguments: {' '.join(lost)}")
        raise _Parsed

    def parse(self: argparse.ArgumentParser, *args: object, **kwargs: object) -> argparse.Namespace:
        nonlocal strict
        strict = True
        return real_strict(self, *args, **kwargs)

    patched = mock.patch.multiple(argparse.ArgumentParser, parse_known_args=parse_known, parse_args=parse)
    with patched:
        try:
            yield
        except _Parsed:
            return
    raise Refused("it parses no command line")


@cache
def _launch_flags() -> frozenset[str]:
    from accelerate.commands.launch import launch_command_parser

    from trl_multinode.check.command_line import own_parser

    return frozenset(
        name for parser in (launch_command_parser(), own_parser()) for name in parser._option_string_actions
    )


def _python(words: list[str]) -> None:
    if words[0] == "-m":
        words = [f"{words[1].replace('.', '/')}.py", *words[2:]]
    script = ROOT / words[0]
    if not script.is_file():
        raise Refused(f"there is no {words[0]}")
    if "argparse" not in script.read_text():
        if words[1:]:
            raise Refused(f"{words[0]} takes no arguments")
        return
    path = [str(script.parent), *sys.path]
    with parsed_only(), mock.patch.object(sys, "argv", words), mock.patch.object(sys, "path", path):
        runpy.run_path(str(script), run_name="__main__")


def _make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", text, re.MULTILINE))
    variables = set(re.findall(r"\$[({](\w+)[)}]", text)) | set(re.findall(r"\$\(if \$\((\w+)\)", text))
    for word in words:
        name, _, value = word.partition("=")
        if (name not in variables) if value else (name not in targets):
            raise Refused(f"the Makefile has no {name}")


def _pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for word in words for group in re.findall(r"\[([\w,]+)\]", word) for name in group.split(",")}
    if words[:1] != ["install"] or not named <= extras.keys():
        raise Refused(f"extras {sorted(named)}, pyproject.toml has {sorted(extras)}")
