"""Check the pages without pytest: `python docs/check_pages.py`. Each fault is one line, `file:line: fault`.

Links and anchors resolve, and lead from docs/index.md to every page; files and names that a page mentions exist;
Python blocks parse; the commands of bash and console blocks are parsed by their programs; a page that a program writes
is what it would write now; the page of the errors has all of them.
"""

import argparse
import ast
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from importlib import import_module
from io import StringIO
from itertools import takewhile
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("benchmarks/*.md")])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The README is also the page on PyPI, where a relative link leads nowhere
ABSOLUTE = re.compile(re.escape(PROJECT["urls"]["Homepage"]) + r"/(?:blob|tree)/main/")
SOURCES = ("trl_multinode", "tests", "benchmarks", "docs", "evidence", "examples", "requirements")
# `file.py: Name`, `file.py::test`
MENTION = re.compile(r"([\w/.-]*\w\.py)\b(?:(?:::|: )([\w.]+))?")

SHELL = {"bash", "cd", "exec", "exit", "export", "trap"}
# Programs of others, which are not parsed; a command of ours among their words is
OTHERS = {"getent", "git", "ip", "kubectl", "patch", "pip", "sbatch", "srun"}
# of the pages, for a node's number and for the address of node 0
PLACEHOLDERS = {
    "K": "0",
    "HOST0": "10.0.0.1",
}

Fault = tuple[int, str]  # line and text


# ---- links, paths and names


def prose(text: str) -> str:
    """Return a page with its fenced blocks emptied, line by line."""
    return re.sub(
        r"^( *)```.*?^ *```", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S
    )


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and the site give to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def links(page: Path) -> list[tuple[int, str, Path, str]]:
    """Return line, text, file and anchor of each link of a page into this repository."""
    found = []
    for number, line in enumerate(prose(page.read_text()).splitlines(), 1):
        for link in re.findall(r"\]\(([^)\s]+)\)", line):
            file, _, anchor = ABSOLUTE.sub("/", link).partition("#")
            if "://" in file or file.startswith("mailto:"):
                continue
            base = ROOT if file.startswith("/") else page.parent
            target = (base / file.lstrip("/")).resolve() if file else page
            found.append((number, link, target, anchor))
    return found


def broken_links(page: Path) -> Iterator[Fault]:
    for number, link, target, anchor in links(page):
        if not target.exists():
            yield number, f"the link {link} leads nowhere"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield number, f"the link {link} leads to no heading"
        elif page == ROOT / "README.md" and "://" not in link:
            yield number, f"the link {link} must be absolute, because PyPI shows this page too"


def unreachable_pages() -> Iterator[str]:
    """Yield the pages of docs/ to which no chain of links leads from docs/index.md."""
    seen, waiting = set(), [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page not in PAGES:
            continue
        seen.add(page)
        if page.is_relative_to(DOCS):
            waiting += [target for _, _, target, _ in links(page)]
    for page in PAGES:
        if page.is_relative_to(DOCS) and page not in seen:
            yield f"{page.relative_to(ROOT)}:1: no link from docs/index.md leads here"


@cache
def sources() -> dict[str, str]:
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    return {f"/{path.relative_to(ROOT)}": path.read_text() for path in files}


@cache
def exists(file: str, name: str) -> bool:
    """Return whether there is a file with this end of its path, and with all parts of the dotted name in it."""
    words = [re.compile(rf"\b{part}\b") for part in name.split(".") if part]
    texts = [text for path, text in sources().items() if path.endswith(f"/{file}")]
    return any(all(word.search(text) for word in words) for text in texts)


def lost_paths(page: Path) -> Iterator[Fault]:
    for number, line in enumerate(page.read_text().splitlines(), 1):
        for file, name in (
            found for span in re.findall(r"`([^`]+)`", line) for found in MENTION.findall(span)
        ):
            if not exists(file, name):
                yield number, f"there is no {file}{f': {name}' if name else ''}"


# ---- commands


class Refused(Exception):
    """A program's parser refuses a command."""


def blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line before its first one, the language and the text of each fenced block."""
    for block in re.finditer(r"^( *)```(\w*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        yield text[: block.start(3)].count("\n"), block[2], block[3]


def commands(block: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the words of each command; a backslash at its end continues a line."""
    block = re.sub(r"\$\(([^()]*)\)", "0", block)
    pending, first = "", 1
    for number, line in enumerate(block.splitlines(), 1):
        first = first if pending else number
        pending += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        lexer = shlex.shlex(pending, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        pending, command = "", []
        for word in [*lexer, ";"]:
            if re.fullmatch(r"[;&|<>]+", word):
                yield from [(first, command)] if command and command[0] != "TARGET" else []
                command = ["TARGET"] if word[0] in "<>" else []  # the file of a redirection
            elif command or not re.fullmatch(r"\w+=.*", word, re.DOTALL):
                command.append(PLACEHOLDERS.get(word, re.sub(r"\$\{?\w+\}?", "0", word)))


def check(words: list[str]) -> None:
    """Parse a command with its program's own parser; another program's arguments may hold a command of ours."""
    program, *rest = words
    if "..." in words:
        raise Refused("write the command in full")
    if program in PARSERS:
        PARSERS[program](rest)
    elif program not in SHELL | OTHERS:
        raise Refused(f"no parser for {program}; add it to docs/check_pages.py")
    elif program != "cd":  # the folder of the clone has the name of our command
        check_inner(rest)


def check_inner(words: list[str]) -> None:
    """Check the command of ours that another program gets: `srun accelerate ...`, `bash -c '...'`."""
    for at, word in enumerate(words):
        if word in PARSERS:
            check(words[at:])
            return
        if " " in word and any(own in word for own in PARSERS):
            for _, inner in commands(word):
                check(inner)


def check_launch(words: list[str]) -> None:
    """Parse as accelerate does, and check the launch by this library's rules; nothing starts."""
    from trl_multinode.tools.check.report import check as problems_of

    if words[:1] != ["launch"]:
        raise Refused("only `accelerate launch` is parsed")
    if launch_parser().parse_args(words[1:]).config_file is not None:
        at = words.index("--config_file")
        launch, problems = problems_of(words[at + 1], [*words[1:at], *words[at + 2 :]], port=False)
        if problems:
            raise Refused("; ".join(problem.what for problem in problems))
        unread = [
            note
            for note in launch.script.notes
            if "are not checked" in note and "examples/" in note
        ]
        if unread:
            raise Refused(unread[0])


@cache
def launch_parser() -> argparse.ArgumentParser:
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser()


class Parsed(Exception):
    """A command has parsed its words; the argument is what it does not know."""


def check_own(words: list[str]) -> None:
    """Run `config` and `check`, which start nothing, and let each other command run until it has parsed its words.

    Of `launch` only the check runs.
    """
    from trl_multinode.tools import COMMANDS

    name, *rest = words
    if name not in COMMANDS:
        raise Refused(f"there is no command {name}")
    if name == "config":
        write_config(rest)
    elif name in ("check", "launch"):
        check_check(name, rest)
    elif name == "grpo":
        check_grpo(rest)
    else:
        with mock.patch.object(
            argparse.ArgumentParser, "parse_known_args", parsed_only(known_flags())
        ):
            try:
                import_module(f"trl_multinode.tools.{COMMANDS[name]}").main(rest)
            except Parsed as parsed:
                if lost := parsed.args[0]:
                    raise Refused(f"it has no argument {' '.join(lost)}") from None
            else:
                raise Refused("it parses no command line")


def write_config(words: list[str]) -> None:
    """Write the file of `trl-multinode config`; later commands of the page use it."""
    from trl_multinode.tools.config import main

    with tempfile.TemporaryDirectory() as folder:
        with chdir(folder):
            main(words)
        shutil.copytree(folder, ".", dirs_exist_ok=True)


def check_check(name: str, words: list[str]) -> None:
    """Check a launch; a scheduler would give the rank and the address that `launch` does without."""
    from trl_multinode.tools.check.command_line import parse
    from trl_multinode.tools.check.report import check as problems_of

    options = parse(words, name)
    node = (
        [] if "--machine_rank" in words else ["--machine_rank", "0", "--main_process_ip", "HOST0"]
    )
    flags = [*options.flags, *(node if name == "launch" else []), *options.script]
    gpus, table = options.gpus_per_node or 8, options.ranks
    _, problems = problems_of(
        options.file, flags, options.batch, gpus, options.engines, port=False, table=table
    )
    if problems:
        raise Refused("; ".join(problem.what for problem in problems))


def check_grpo(words: list[str]) -> None:
    from trl_multinode.tools.grpo import MODULE, split

    with ExitStack() as stack:
        script, launch = split(words, launch_parser(), stack)
        check_launch(["launch", *launch, "--module", MODULE, *script])


@cache
def known_flags() -> frozenset[str]:
    """Return the flags that a command passes on to `accelerate launch` or to the check."""
    from trl_multinode.tools.check.command_line import own_parser

    return frozenset(
        flag for parser in (launch_parser(), own_parser()) for flag in parser._option_string_actions
    )


def parsed_only(known: frozenset[str]) -> Callable:
    """Return a `parse_known_args` that ends the command after its first parser, sub-parsers included."""
    real, inner = argparse.ArgumentParser.parse_known_args, False

    def parse(self: argparse.ArgumentParser, *args: object, **more: object) -> tuple:
        nonlocal inner
        if inner:
            return real(self, *args, **more)
        inner = True
        _, rest = real(self, *args, **more)
        raise Parsed([word for word in rest if word.startswith("--") and word not in known])

    return parse


def check_python(words: list[str]) -> None:
    """Look for the script, and for the flags among the literals of its source: running it would import its stack."""
    if words[0] == "-m":
        words = [f"{words[1].replace('.', '/')}.py", *words[2:]]
    script = ROOT / words[0]
    if not script.is_file():
        raise Refused(f"there is no {words[0]}")
    flags = {word.partition("=")[0] for word in words[1:] if word.startswith("-")}
    literals = {
        node.value
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Constant)
    }
    if lost := sorted(flags - literals):
        raise Refused(f"{words[0]} has no argument {' '.join(lost)}")


def check_make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    known = set(re.findall(r"^([\w-]+):|\$[({](?:if \$\()?(\w+)", text, re.MULTILINE))
    targets, variables = ({pair[at] for pair in known} for at in (0, 1))
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in (variables if equals else targets):
            raise Refused(f"the Makefile has no {name}")


PARSERS: dict[str, Callable[[list[str]], None]] = {
    "accelerate": check_launch, "trl-multinode": check_own, "python": check_python, "python3": check_python,
    "make": check_make,
}  # fmt: skip


def bad_blocks(page: Path) -> Iterator[Fault]:
    """Yield what is wrong in the fenced blocks of a page; its commands run in a folder of the page's own."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        fill(Path(folder))
        for start, language, block in blocks(page.read_text()):
            if language == "python" and page.parent.name != "api":  # whose blocks are signatures
                try:
                    ast.parse(textwrap.dedent(block))
                except SyntaxError as error:
                    yield start + (error.lineno or 1), f"not Python: {error.msg}"
            if language == "console":  # commands after a prompt, among what they print
                block = "\n".join(
                    line[2:] if line.startswith("$ ") else "" for line in block.splitlines()
                )
            if language in ("bash", "console"):
                yield from ((start + line, problem) for line, problem in refused(block))
    for number, line in enumerate(prose(page.read_text()).splitlines(), 1):
        if re.match(
            r" *(?:\$ )?(accelerate launch|trl-multinode \w|make \w|python3? [\w/]+\.py)", line
        ):
            yield number, "a command stands outside of a bash or console block"


def refused(block: str) -> Iterator[Fault]:
    try:
        found = list(commands(block))
    except ValueError as error:  # an open quote
        yield 1, str(error)
        return
    for line, words in found:
        if problem := refusal(words):
            yield line, f"{shlex.join(words)}: {problem}"


def fill(folder: Path) -> None:
    """Put what the pages assume into a folder: the shipped configs, a script of the user, the examples."""
    for path in (ROOT / "accelerate_configs").glob("*.yaml"):
        shutil.copy(path, folder)
    (folder / "accelerate_configs").symlink_to(ROOT / "accelerate_configs")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "train.py").write_text(
        "from trl_multinode import GRPOConfig, ModelConfig, TrlParser\n"
    )


def refusal(words: list[str]) -> str:
    """Return why a command is refused, empty if it is not."""
    output = StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(output):
            check(words)
    except Refused as error:
        return str(error)
    except SystemExit as error:
        return "" if error.code in (0, None) else output.getvalue().strip().rpartition("error: ")[2]
    except Exception as error:  # of a parser that does not expect such words
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def stand_in_for_math_verify() -> Iterator[None]:
    """Add the package without which `accuracy_reward` is refused, after TRL, which would import from the empty one."""
    import_module("trl.rewards.accuracy_rewards")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "math_verify.py").touch()
        with mock.patch.object(sys, "path", [folder, *sys.path]):
            yield


# ---- generated pages and complete lists


def generated() -> Iterator[tuple[Path, str, str]]:
    """Yield each page that a program writes, its text as of now, and the command that writes it."""
    for folder in ("docs", "evidence", "requirements", "benchmarks"):
        sys.path.insert(0, str(ROOT / folder))
    import compatibility
    import fault_table
    import table
    import versions
    import write_api

    for name, text in write_api.render().items():
        yield write_api.PAGES / name, text, "python docs/write_api.py"
    yield write_api.SETTINGS, write_api.settings_page(), "python docs/write_api.py"
    yield (
        fault_table.PAGE,
        fault_table.page(fault_table.recorded()),
        "python evidence/fault_table.py",
    )
    yield (
        compatibility.PAGE,
        compatibility.page(compatibility.recorded()),
        "python evidence/compatibility.py",
    )
    yield versions.PAGE, versions.page(json.loads(versions.RECORD.read_text())), "make versions"
    yield ROOT / "benchmarks" / "RESULTS.md", table.render(), "python benchmarks/table.py"


def stale_pages() -> Iterator[str]:
    for page, text, command in generated():
        old, new = page.read_text().splitlines() if page.exists() else [], text.splitlines()
        if old != new:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False))
            yield f"{page.relative_to(ROOT)}:{sum(1 for _ in same) + 1}: not what `{command}` writes"
    import scaling

    for part in scaling.tables(json.loads(scaling.RESULTS.read_text())).values():
        if part not in (DOCS / "operate" / "sizing.md").read_text():
            yield "docs/operate/sizing.md:1: lacks a table of `python benchmarks/scaling.py --tables`"


def missing_errors() -> Iterator[str]:
    page = DOCS / "operate" / "errors.md"
    for node in ast.parse((ROOT / "trl_multinode" / "errors.py").read_text()).body:
        if isinstance(node, ast.ClassDef) and f"`{node.name}`" not in page.read_text():
            yield f"{page.relative_to(ROOT)}:1: lacks {node.name}"


def main() -> int:
    """Print the faults of all pages."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PET_", "CUDA_"))]:
        del os.environ[name]  # a launch would take this machine's job and GPUs for its own
    faults = [*stale_pages(), *missing_errors(), *unreachable_pages()]
    with stand_in_for_math_verify():
        for page in PAGES:
            for line, fault in [*broken_links(page), *lost_paths(page), *bad_blocks(page)]:
                faults.append(f"{page.relative_to(ROOT)}:{line}: {fault}")
    print("\n".join(faults) or f"{len(PAGES)} pages are right")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
