"""The failure that this rank reports, until the watch thread writes it to the store."""

import threading
import time

from ..endings.fatal import Fatal


class LocalFailure:
    """First failure of this rank. A cause replaces a symptom, which is due later."""

    def __init__(self) -> None:
        self._found: tuple[Fatal, float] | None = None  # and the time at which to report it
        self._only_symptom = False
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
            if self._found is None or (delay_s == 0.0 and self._only_symptom):
                self._found = fatal, time.monotonic() + delay_s
                self._only_symptom = delay_s > 0.0

    def is_found(self) -> bool:
        """Return whether this rank has failed, due or not."""
        with self._lock:
            return self._found is not None

    def due(self) -> Fatal | None:
        """Return the failure, if its time has come."""
        with self._lock:
            return self._found[0] if self._found is not None and time.monotonic() >= self._found[1] else None
