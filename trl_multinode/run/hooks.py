"""Functions of this library in the place of others, which come back unless somebody has put theirs on top."""

from collections.abc import Callable
from typing import Any


class Hooks:
    """Replaced functions, in the order of their replacement."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, hook: Callable) -> None:
        """Put `hook` in the place of an attribute."""
        previous = getattr(owner, name)
        setattr(owner, name, hook)

        def undo() -> None:
            if getattr(owner, name) is hook:  # otherwise the script has installed its own on top
                setattr(owner, name, previous)

        self._undo.append(undo)

    def restore(self) -> None:
        """Give every attribute back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
