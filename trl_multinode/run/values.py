"""Values as text that is equal on two ranks exactly if the values are, for settings, configs and rows of a dataset."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from math import isfinite
from typing import Any

from ..wire.secret_names import has_secret_form, is_secret_name

LONGEST = 160  # characters that a message shows of a value
NOTHING = ("null", "true", "false")  # as JSON writes values that hide nothing


def text_of(value: Any) -> str:
    """Return a value as text without addresses in memory; of an object without a text of its own, its class."""
    return (
        value
        if isinstance(value, str)
        else json.dumps(plain(value), sort_keys=True, ensure_ascii=False)
    )


def flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield name and text of each part of a value: `config.rope.theta` of a nested dict, one part of anything else."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from flat(f"{name}.{key}", part)
    else:
        yield name, text_of(value)


def digest_of(content: str | bytes) -> str:
    """Return 16 hex digits that tell contents apart."""
    data = content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def is_secret(name: str, text: str) -> bool:
    """Return whether a value may be a secret, by the last part of its name or by its text."""
    if text in NOTHING:
        return False
    return is_secret_name(name.rpartition(".")[2]) or has_secret_form(text)


def shown(text: str) -> str:
    """Return a text as a message shows it: a long one by its beginning, its length and its digest."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]!r}... ({len(text)} characters, digest {digest_of(text)[:8]})"


def listed(words: Sequence[Any], most: int) -> str:
    """Return the first `most` words, and the number of the others."""
    first = ", ".join(map(str, words[:most]))
    return first if len(words) <= most else f"{first} and {len(words) - most} more"


def plain(value: Any) -> Any:
    """Return a value in the types of JSON."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if isfinite(value) else str(value)  # JSON has neither infinity nor NaN
        case Enum():
            return plain(value.value)
        case bytes():
            return f"{len(value)} bytes, {digest_of(value)}"
        case Mapping():
            return {str(key): plain(part) for key, part in value.items()}
        case Set():
            return sorted(text_of(part) for part in value)
        case list() | tuple():
            return [plain(part) for part in value]
    return _plain_object(value)


def _plain_object(value: Any) -> Any:
    """Return what an object of a class of somebody's own is compared by."""
    if isinstance(value, type):
        return value.__qualname__
    if is_dataclass(value):
        return {one.name: plain(getattr(value, one.name, None)) for one in fields(value)}
    if callable(getattr(value, "to_dict", None)):
        return plain(value.to_dict())
    if isinstance(value, Callable) and hasattr(value, "__qualname__"):  # type: ignore[arg-type]
        return value.__qualname__
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text or "object at" in text else text
