"""`NodeHost`: one rank's part in its node's engines, put together from four objects and the one that ends them."""

from collections.abc import Callable
from typing import Any

from ..engine.node_engines import NodeEngines
from .agreement import Agreement
from .closing import Closing
from .presence import Presence
from .rank import RankContext
from .updates import Updates


class NodeHost:
    """The engines of a node, as one of its ranks uses them.

    Every rank has one. The local main process's `NodeHost` also owns the engine processes; the other ranks of the node
    read the folder of the engines' sockets from the run's rendezvous store.

    | attribute | what it has |
    |---|---|
    | `rank` | [`RankContext`]: what it is; the fields that most code needs are attributes here too |
    | `agreement` | [`Agreement`]: meetings and decisions of all ranks |
    | `presence` | [`Presence`]: what this rank tells the others, and the reader of its log |
    | `updates` | [`Updates`]: the engines and their weights |

    Args:
        args ([`~trl.GRPOConfig`]):
            Argument of [`RankContext`], which says what it raises.
    """

    def __init__(self, args: Any):
        self.rank = rank = RankContext(args)
        self.settings = rank.settings
        self.topology = rank.topology
        self.devices = rank.devices
        self.phases = rank.phases
        self.watch = rank.watch
        self.step = rank.step
        self.agreement = Agreement(rank)
        self.presence = Presence(rank)
        self.presence.begin(self.agreement.meeting)
        self.updates = Updates(rank, self.agreement, self.presence)
        self._closing = Closing(rank, self.presence, self.updates)

    def follow(self, trainer: Any) -> None:
        """Read the optimizer steps of `trainer`, and end the engines when it is garbage-collected."""
        self.rank.follow(trainer, self._closing.on_collected)

    def start_early(self, outline: Callable[[], tuple[Any, Any]], keywords: dict[str, Any]) -> None:
        """Start this node's engine processes before the model is loaded. Every rank calls it; the others do nothing.

        `start_engines` compares what they got with the loaded model, so a wrong outline costs only their early start.

        Args:
            outline (`Callable`):
                Function that returns the model without weights, and its processor.
            keywords (`dict`):
                Keywords that TRL will pass to its `VLLMGeneration`, as far as engines start with them.
        """
        # vLLM measures the free memory of its GPU while it starts, which a load on the same GPU would change
        starts = self.topology.is_local_main and self.rank.has_engines
        if not starts or self.devices.shared_with_training:
            return
        self._closing.make_room()
        try:
            self.updates.launch(*outline(), keywords)
        except Exception as error:  # TRL's own load reports what is wrong with a model
            self.updates.end()
            self.rank.report(f"the engines start after the model is loaded ({error!r})")

    def start_engines(
        self, model: Any, processing_class: Any, keywords: dict[str, Any]
    ) -> NodeEngines:
        """Start this node's engines (local main process) and connect to them (every rank of the node)."""
        with self.watch.guard():
            self._closing.make_room()
            return self.updates.start(model, processing_class, keywords)

    def close(self) -> None:
        """Shut the engines down cleanly. The ranks of a launch wait for each other."""
        self._closing.close()
