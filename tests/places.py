"""Topologies of ranks on nodes that may differ."""

from collections.abc import Sequence

from trl_multinode.run.topology import NodeShape, Topology


def topology_on(
    nodes: Sequence[NodeShape | int], rank: int = 0, launched: bool = False
) -> Topology:
    """Return a rank's topology on nodes of these shapes, or numbers of ranks, as all ranks have learned it."""
    shapes = [node if isinstance(node, NodeShape) else NodeShape(node) for node in nodes]
    places = [
        (node, local, shape) for node, shape in enumerate(shapes) for local in range(shape.ranks)
    ]
    node, local, own = places[rank]
    found = Topology(rank, len(places), local, own.ranks, node, len(shapes), launched)
    found.learn({rank: shape for rank, (_, _, shape) in enumerate(places)})
    return found
