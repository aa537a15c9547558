"""Texts of several commands: numbers with their nouns, templates, and files that must not exist."""

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from rich.table import Table

# What pip installs on a node and in an image; after the first release `trl-multinode[gpu]`
PACKAGE = "trl-multinode[gpu] @ git+https://github.com/trl-multinode/trl-multinode"


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
