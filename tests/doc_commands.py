"""Commands of the ```bash blocks of the documentation; `command_parsers.py` has the parsers of their programs."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("accelerate", "trl-multinode", "python", "python3", "make", "pip")
SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")  # of the shell
ASSIGNED_FLAGS = re.compile(r'(\w+)="?\$\((trl-multinode flags[^()]*)\)"?')
FLAGS = "--machine_rank 0 --main_process_ip HOST0"  # what `trl-multinode flags` prints


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


def blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, language and text of each fenced block."""
    for block in re.finditer(r"^( *)```(\w*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        yield text[: block.start(3)].count("\n") + 1, block[2], block[3]


def commands(page: Path, text: str | None = None) -> Iterator[Command]:
    """The commands of all bash and console blocks of a page, and those that they pass on as one word."""
    for start, language, block in blocks(page.read_text() if text is None else text):
        if language == "console":  # commands after a prompt, among what they print
            block = "\n".join(line[2:] if line.startswith("$ ") else "" for line in block.splitlines())
        if language in ("bash", "console"):
            block = with_flags(block)
            found = [(block[: inner.start()].count("\n"), inner[1]) for inner in SUBSTITUTION.finditer(block)]
            lines = [(line + more, words) for line, inner in found for more, words in split(inner)]
            block = SUBSTITUTION.sub("0", block)
            for line, words in sorted([*lines, *split(block)]):
                yield from nested(Command(page, start + line, tuple(words)))


def with_flags(block: str) -> str:
    """Put what `trl-multinode flags` prints where a block substitutes it, also through a variable."""
    for name, _ in ASSIGNED_FLAGS.findall(block):
        block = re.sub(rf'"?\$\{{?{name}\b\}}?"?', FLAGS, block)
    block = ASSIGNED_FLAGS.sub(r"\2", block)  # the command without the assignment
    return re.sub(r'"?\$\(trl-multinode flags[^()]*\)"?', FLAGS, block)


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
