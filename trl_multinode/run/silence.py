"""Silence of ranks and nodes, as seen by the process that reads their signs of life."""

from collections.abc import Mapping


class Silence:
    """Seconds for which signs of life have not changed. A suspension of the reader does not count.

    Args:
        late_s (`float`):
            Seconds between two looks after which this process was suspended, and perhaps the others too.
    """

    def __init__(self, late_s: float):
        self._late_s = late_s
        self._last_look = 0.0
        # rank or node -> its last sign, and when it was first seen
        self._seen: dict[int, tuple[str, float]] = {}

    def forgive(self) -> None:
        """Count all seconds anew from the next look on."""
        self._seen.clear()

    def look(self, now: float, signs: Mapping[int, str]) -> dict[int, float]:
        """Return the seconds of silence of each rank or node, given its present sign."""
        if now - self._last_look > self._late_s:
            self.forgive()
        self._last_look = now
        for key, sign in signs.items():
            if key not in self._seen or self._seen[key][0] != sign:
                self._seen[key] = sign, now
        return {key: now - self._seen[key][1] for key in signs}
