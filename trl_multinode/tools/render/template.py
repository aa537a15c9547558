"""Templates: files in which `@{name}` is a placeholder, so `$X`, `${X}` and `$(x)` of a shell stay as they are."""

import re
from collections.abc import Mapping
from pathlib import Path

TEMPLATES = Path(__file__).parent / "templates"
PLACEHOLDER = re.compile(r"@\{([a-z_]+)\}")


def placeholders(text: str) -> set[str]:
    """Return the names of a template's placeholders."""
    return set(PLACEHOLDER.findall(text))


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders of a template.

    The further lines of a value get the indentation of the line that its placeholder stands in. A line that consists
    of placeholders without text is left out.

    Args:
        text (`str`):
            Text of the template.
        values (`Mapping[str, str]`):
            Value of each placeholder.

    Raises:
        `KeyError`: if the template has a placeholder without a value.
    """
    return "".join(_filled(line, values) for line in text.splitlines(keepends=True))


def _filled(line: str, values: Mapping[str, str]) -> str:
    indentation = line[: len(line) - len(line.lstrip())]

    def value_of(match: re.Match[str]) -> str:
        return values[match[1]].replace("\n", f"\n{indentation}")

    filled = PLACEHOLDER.sub(value_of, line)
    return "" if filled != line and not filled.strip() else re.sub(r"[ \t]+$", "", filled, flags=re.MULTILINE)
