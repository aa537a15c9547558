"""The failure that this rank reports, until the watch thread writes it to the store."""

import threading
import time

from ..endings.fatal import Fatal


class LocalFailure:
    """First failure of this rank. One that is due earlier replaces it, as a cause does with a symptom."""

    def __init__(self) -> None:
        self._found: tuple[Fatal, float] | None = None  # and the time at which to report it
        self._lock = threading.Lock()

    def add(self, fatal: Fatal, delay_s: float) -> None:
        """Add a failure, from any thread.

        Args:
            fatal ([`Fatal`]):
                Failure.
            delay_s (`float`):
                Seconds in which another rank may report a better explanation; 0 for a cause.
        """
        with self._lock:
            due = time.monotonic() + delay_s
            if self._found is None or due < self._found[1]:
                self._found = fatal, due

    def is_found(self) -> bool:
        """Return whether this rank has failed, due or not."""
        with self._lock:
            return self._found is not None

    def due(self) -> Fatal | None:
        """Return the failure, if its time has come."""
        with self._lock:
            return (
                self._found[0]
                if self._found is not None and time.monotonic() >= self._found[1]
                else None
            )
