"""Versions of the libraries on all nodes, compared once per run through the store."""

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .endings.exit_codes import CONFIGURATION
from .reporter import warn
from .topology import Topology
from .versions import differences, local_versions

if TYPE_CHECKING:
    from .store import Store

LOOK_EVERY_S = 2.0


class VersionCheck:
    """Chore of the watch thread: local main processes write their versions, and rank 0 compares them, once.

    No rank waits for it. Rank 0 ends the run if versions differ that must match, and warns about others.

    Args:
        topology (`Topology`):
            Topology of this rank.
        fail (`Callable[..., None]`):
            Function that reports a failure, given its cause and `code`.
    """

    def __init__(self, topology: Topology, fail: Callable[..., None]):
        self._topology = topology
        self._fail = fail
        self._written = not topology.is_local_main
        self._done = topology.rank != 0 or topology.num_nodes == 1
        self._next_look = 0.0

    def __call__(self, store: "Store") -> None:
        if not self._written:
            store.set(f"versions/{self._topology.node}", json.dumps(local_versions()))
            self._written = True
        if self._done or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_EVERY_S
        keys = [f"versions/{node}" for node in range(self._topology.num_nodes)]
        if store.check(keys):
            self._done = True
            self._judge([json.loads(store.get(key)) for key in keys])

    def _judge(self, nodes: list[dict[str, str]]) -> None:
        different = differences(nodes)
        if not different:
            return
        text = "the nodes have different versions: " + "; ".join(map(str, different))
        if wrong := [difference.library for difference in different if difference.is_error]:
            cure = f"Install the same {', '.join(wrong)} on every node (`pip install -r` one file on all)."
            self._fail(f"ConfigurationError: {text}. {cure}", code=CONFIGURATION)
        else:
            warn(f"{text}. The run goes on; install the same ones if results differ or a node fails.")
