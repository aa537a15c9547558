"""The failure of a rank before all ranks know it."""

import math
import time

from ..endings.fatal import Fatal


class LocalFailure:
    """First failure of this rank. One that is due earlier replaces it, as a cause does with a symptom."""

    def __init__(self) -> None:
        self._found: list[tuple[float, Fatal]] = []  # each with the time at which to report it

    def add(self, fatal: Fatal, delay_s: float) -> None:
        """Add a failure, from any thread.

        Args:
            fatal ([`Fatal`]):
                Failure.
            delay_s (`float`):
                Seconds in which another rank may report a better explanation; 0 for a cause.
        """
        self._found.append((time.monotonic() + delay_s, fatal))

    def is_found(self) -> bool:
        """Return whether this rank has failed, due or not."""
        return bool(self._found)

    def due(self) -> Fatal | None:
        """Return the failure, if its time has come."""
        never = math.inf, None
        at, fatal = min(self._found, default=never, key=lambda one: one[0])
        return fatal if time.monotonic() >= at else None
