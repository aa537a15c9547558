"""Clocks of a node's engines, as one of its ranks reads them after each weight sync."""

import numpy as np

from ..engine.client import EngineClient
from ..wire.messages import Done, Message

NUM_CLOCKS = 4  # busy seconds, total seconds, row-seconds over slots, and seconds of the last rows of each round


class EngineClocks:
    """Clocks of the engines of one node.

    They begin at the first sync, because engines wait for the trainer's set-up before it. The clock of an engine that
    was started again goes on where it was.
    """

    def __init__(self) -> None:
        self.seconds = np.zeros((0, NUM_CLOCKS))  # per engine, at the last sync
        # by engine: number of the process whose clock was read last, and clocks of the processes before it
        self._processes: dict[int, tuple[int, np.ndarray]] = {}
        self._kv_use = 0.0

    def read(self, replies: list[tuple[EngineClient, Message]], num_engines: int) -> None:
        """Read the clocks from the replies of the engines."""
        is_first = not len(self.seconds)
        clocks = np.zeros((num_engines, NUM_CLOCKS)) if is_first else self.seconds.copy()
        for client, reply in replies:
            assert isinstance(reply, Done)
            index, times = client.index, reply.times
            read = np.array([times.busy_s, times.clock_s, times.slot_s, times.tail_s])
            start, offset = self._processes.get(index, (0, np.zeros(NUM_CLOCKS)))
            if is_first:
                offset = -read
            elif client.ready.start != start:
                offset = clocks[index].copy()
            self._processes[index] = client.ready.start, offset
            clocks[index] = read + offset
            self._kv_use = max(self._kv_use, reply.kv_use)
        self.seconds = clocks

    def take_kv_use(self) -> float:
        """Return the greatest share of an engine's key-value cache that was in use, up to the last sync."""
        use, self._kv_use = self._kv_use, 0.0
        return use
