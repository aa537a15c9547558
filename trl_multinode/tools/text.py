"""Words of several commands: their parser, numbers with their nouns, templates, and files that must not exist."""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from rich.table import Table

# What pip installs on a node and in an image; after the first release `trl-multinode[gpu]`
PACKAGE = "trl-multinode[gpu] @ git+https://github.com/trl-multinode/trl-multinode"


class Parser(argparse.ArgumentParser):
    """Parser of a command. Its flags have `_` or `-` between their words, and cannot be abbreviated."""

    def __init__(self, prog: str | None = None, **settings: Any):
        super().__init__(prog, **settings, allow_abbrev=False)

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """Add an argument under its own name, and a flag under that with `-` too."""
        dashed = [name.replace("_", "-") for name in names if name.startswith("-")]
        return super().add_argument(*dict.fromkeys([*names, *dashed]), **settings)


def matching(pattern: str, expected: str) -> Callable[[str], Any]:
    """Return the type of an argument that must match a pattern: its groups, or the text if the pattern has none."""

    def parse(text: str) -> Any:
        match = re.fullmatch(pattern, text)
        if match is None:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
        return match.groups() or text

    return parse


def count(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}" + ("s" if number != 1 else "")


def positive(text: str) -> int:
    """Return a number from 1, for a parser."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a number from 1")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Return numbers from 1 with commas between them, for a parser."""
    return tuple(map(positive, text.split(",")))


def indices(text: str) -> list[int]:
    """Return numbers from 0 with commas between them, for a parser."""
    found = matching(r"\d+(?:,\d+)*", "indices of GPUs, as in 6,7")(text)
    return [int(part) for part in found.split(",")]


def joined(values: Iterable[Any]) -> str:
    """Return numbers as such a text."""
    return ",".join(map(str, values))


def rich_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], justify: Any = "left"
) -> "Table":
    """Return a table of rich; it has a head if a column has a name."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", show_header=any(columns))
    for column in columns:
        made.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def environment() -> "Environment":
    """Return the reader of templates: `@{x}` is a value and a line `@@ if x` a statement.

    So `{{`, `${x}`, `${#x}` and `$(x)` of a shell stay as they are.
    """
    import jinja2

    made = jinja2.Environment(
        variable_start_string="@{",
        variable_end_string="}",
        line_statement_prefix="@@",
        block_start_string="@%",
        block_end_string="%@",
        comment_start_string="@#",
        comment_end_string="#@",
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=False,  # noqa: S701  # shell, YAML and plain text
    )
    made.filters.update(quote=shlex.quote, json=json.dumps, count=count)
    return made


class FileError(ValueError):
    """A file of keys that cannot be read; `str()` has what was given, and `cure` what to do."""

    def __init__(self, what: str, cure: str):
        super().__init__(f"{what}: {cure}")
        self.cure = cure


def read_keys(path: str, cure: str) -> dict[str, Any]:
    """Return the keys of a YAML file.

    Args:
        path (`str`):
            File.
        cure (`str`):
            Cure if there is no such file, or if it holds no keys.

    Raises:
        [`FileError`]: if it cannot be read.
    """
    # not with the module, because other commands than those that read one start without a library
    import yaml

    try:
        file = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot read `{path}` ({reason})", cure) from None
    except yaml.YAMLError as error:
        mark, cause = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "some line"
        raise FileError(
            f"`{path}` is no valid YAML: {where} ({' '.join(str(cause).split())})",
            "correct that line or the one above: `key: value` with a blank, spaces and no tabs",
        ) from None
    if not isinstance(file, dict):
        raise FileError(f"`{path}` holds no keys (got YAML's {file!r})", cure)
    return file


def fill(name: str, /, **values: Any) -> Any:
    """Fill a template; its text is `str()` of the result, and the variables that it sets are attributes.

    Raises:
        `jinja2.UndefinedError`: if the template has a variable without a value.
    """
    return environment().get_template(name).make_module(values)


def write_new(path: str, text: str, prog: str) -> bool:
    """Write a file, and return whether that worked; it must not exist."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        reason = "it exists" if isinstance(error, FileExistsError) else error.strerror
        print(
            f"{prog}: {path} is not written ({reason}): name another file with --out",
            file=sys.stderr,
        )
        return False
    return True
