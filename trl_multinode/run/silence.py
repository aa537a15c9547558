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
        # rank or node with its last sign -> when this was first seen
        self._since: dict[tuple[int, str], float] = {}

    def forgive(self) -> None:
        """Count all seconds anew from the next look on."""
        self._since.clear()

    def look(self, now: float, signs: Mapping[int, str]) -> dict[int, float]:
        """Return the seconds of silence of each rank or node, given its present sign."""
        if now - self._last_look > self._late_s:
            self.forgive()
        self._last_look = now
        self._since = {sign: self._since.get(sign, now) for sign in signs.items()}
        return {key: now - since for (key, _), since in self._since.items()}
