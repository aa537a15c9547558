"""Completions of a run, from the files that TRL writes with `log_completions=True`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

LONGEST = 2000  # characters of a text on the page
TEXTS = ("prompt", "completion")  # behind the numbers, which a narrow page shows first
SHOWN = 5  # of the highest, and as many of the lowest advantage


def read_completions(folders: Sequence[Path]) -> dict[str, Any]:
    """Return columns and rows of the newest log with completions; nothing if no file can be read."""
    paths = [path for folder in folders for path in folder.glob("completions/*.parquet")]
    newest = sorted(paths, key=lambda path: path.name, reverse=True)
    return next((_shown(rows) for rows in map(_rows, newest) if rows), {})


def _shown(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows of the highest, then those of the lowest advantage."""
    rows.sort(key=lambda row: -(row.get("advantage") or 0.0))
    ends = rows if len(rows) <= 2 * SHOWN else [*rows[:SHOWN], *rows[-SHOWN:]]
    columns = sorted(
        rows[0].keys() - {"step"}, key=lambda name: (name in TEXTS, list(rows[0]).index(name))
    )
    return {
        "step": rows[0].get("step"),
        "of": len(rows),
        "columns": columns,
        "rows": [[_cell(row[name]) for name in columns] for row in ends],
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; none of one that is being written."""
    from pyarrow import ArrowException, parquet

    try:
        return parquet.read_table(path).to_pylist()
    except (ArrowException, OSError):
        return []


def _cell(value: Any) -> str:
    if isinstance(value, list):
        value = "\n".join(map(_message, value))
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _message(message: Any) -> str:
    if not isinstance(message, dict):
        return str(message)
    parts = [message.get("content"), message.get("tool_calls")]
    return f"{message.get('role')}: {' '.join(str(part) for part in parts if part)}"
