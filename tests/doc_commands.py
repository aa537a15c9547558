"""Commands of the ```bash blocks of the documentation, and the parser of each program that they call."""

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
OURS = ("accelerate", "trl-multinode", "python", "python3", "make", "pip")
SHELL = {"cd", "exec", "export", "set", "source", "trap"}  # the shell's own
# Programs of others, which are not parsed. A command of ours among their arguments is.
OTHERS = {"docker", "enroot", "git", "head", "hf", "kubectl", "sbatch", "scancel", "scontrol", "scp",
          "sky", "squeue", "srun", "ssh", "trackio"}  # fmt: skip
PLACEHOLDERS = {"K": "0", "HOST0": "10.0.0.1"}  # words of the pages for a node's number and for node 0's address
SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")  # of the shell: `$(trl-multinode flags)`
FLAGS = "--machine_rank 0 --main_process_ip HOST0"  # what that command prints


@dataclass(frozen=True)
class Command:
    """One command of a block."""

    page: Path
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {shlex.join(self.words)}"


class Refused(Exception):
    """A program's parser, or the check of a launch, refuses a command."""


# ---- from a page to its commands


def blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, language and text of each fenced block."""
    for block in re.finditer(r"^( *)```(\w*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        yield text[: block.start(3)].count("\n") + 1, block[2], block[3]


def commands(page: Path, text: str | None = None) -> Iterator[Command]:
    """The commands of all bash blocks of a page, and those that they pass to another program as one word."""
    for start, language, block in blocks(page.read_text() if text is None else text):
        if language == "bash":
            found = [(block[: inner.start()].count("\n"), inner[1]) for inner in SUBSTITUTION.finditer(block)]
            lines = [(line + more, words) for line, inner in found for more, words in split(inner)]
            block = SUBSTITUTION.sub(lambda inner: FLAGS if "flags" in inner[1] else "0", block)
            for line, words in sorted([*lines, *split(block)]):
                yield from nested(Command(page, start + line, tuple(words)))


def split(block: str) -> Iterator[tuple[int, list[str]]]:
    """Line and words of each command. A command ends with its line, unless a quote or a backslash continues it."""
    pending, first = "", 0
    for number, line in enumerate(block.splitlines()):
        first = first if pending else number
        pending += line.removesuffix("\\") if line.endswith("\\") else f"{line}\n"
        if line.endswith("\\"):
            continue
        lexer = shlex.shlex(pending, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # an open quote
            continue
        pending = ""
        for part in parts(words):
            yield first, part
    if pending:
        raise Refused(f"a quote is open at the end of a block: {pending}")


def parts(words: list[str]) -> Iterator[list[str]]:
    """The commands among words that `;`, `&&`, `|` or a redirection separate; without a variable set for one."""
    part: list[str] = []
    for word in [*words, ";"]:
        if re.fullmatch(r"[;&|<>]+", word):
            yield from [part] if part and part[0] != "TARGET" else []
            part = ["TARGET"] if word[0] in "<>" else []  # the file of a redirection
        elif part or not re.fullmatch(r"\w+=.*", word, re.DOTALL):
            part.append(word)


def nested(command: Command) -> Iterator[Command]:
    """The command itself, and commands of ours that another program gets: `srun accelerate ...`, `bash -c '...'`."""
    yield command
    if command.words[0] in OURS:
        return
    for at, word in enumerate(command.words[1:], 1):
        if word in OURS:
            yield Command(command.page, command.line, command.words[at:])
            return
        if re.search(r"\s", word) and any(own in word for own in OURS):
            for _, words in split(word + "\n"):
                yield from nested(Command(command.page, command.line, tuple(words)))


def filled(words: tuple[str, ...]) -> list[str]:
    """The words with values in the place of shell variables and of the pages' placeholders."""
    return [PLACEHOLDERS.get(word, re.sub(r"\$\{?\w+\}?", "0", word)) for word in words]


# ---- parsers


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
        raise Refused(f"{command}: no parser for {program}; add it to tests/doc_commands.py")
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
    _, problems = check_launch(args.config_file, [*words[1:at], *words[at + 2 :]], port=False)
    if problems:
        raise Refused("; ".join(problem.what for problem in problems))


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
        if (status := main(words)) != 0:
            raise Refused(f"status {status}")
    elif name in COMMANDS:
        with parsed_only():
            COMMANDS[name](rest)
    else:
        raise Refused(f"there is no command {name}")


def _without_wait(words: list[str]) -> list[str]:
    """The words of a check without the roll-call, which would wait for the other nodes."""
    end = words.index("--") if "--" in words else len(words)
    return [word for word in words[:end] if word != "--wait"]


class _Parsed(Exception):
    """The outermost parser is done."""


@contextmanager
def parsed_only() -> Iterator[None]:
    """Let the code inside run until its first argument parser has parsed the command line."""
    depth, real = 0, argparse.ArgumentParser.parse_known_args

    def parse(self: argparse.ArgumentParser, *args: object, **kwargs: object) -> tuple:
        nonlocal depth
        depth += 1
        namespace, unknown = real(self, *args, **kwargs)
        depth -= 1
        if depth == 0 and unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        if depth == 0:
            raise _Parsed
        return namespace, unknown

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", parse):
        try:
            yield
        except _Parsed:
            return
    raise Refused("it parses no command line")


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
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for word in words for group in re.findall(r"\[([\w,]+)\]", word) for name in group.split(",")}
    if words[:1] != ["install"] or not named <= extras.keys():
        raise Refused(f"extras {sorted(named)}, pyproject.toml has {sorted(extras)}")
