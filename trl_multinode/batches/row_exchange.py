"""Exchange of rows between ranks, as flat int32 arrays of known sizes: first between nodes, then within each node.

A row goes to another node by way of the rank with its owner's local rank, and from there to its target. A rank's peers
are thus one rank of each other node and the ranks of its own node: 133 on 128 nodes with 7 ranks. A single collective
of all ranks would in time connect every rank to all 895 others, and NCCL holds GPU memory for every connection. Where
the smallest node has fewer ranks, those with the same local rank modulo its number are peers.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from ..run.topology import NodeShape, Topology


def topology_of_ranks(device: torch.device) -> Topology:
    """Return the topology of a rank without node mode. A collective of all ranks if there are several nodes."""
    topology = Topology.from_environment()
    if topology.num_nodes > 1 and dist.is_initialized():
        mine = torch.tensor([topology.local_world_size], device=device)
        every = mine.new_empty(topology.world_size)
        dist.all_gather_into_tensor(every, mine)
        topology.learn({rank: NodeShape(count) for rank, count in enumerate(every.tolist())})
    return topology


class RowExchange:
    """Exchange of rows. All ranks build it at the same point, because it creates process groups.

    Args:
        topology (`Topology`):
            Topology of this rank.
        across (`str`):
            Ranks between which rows move: `"node"` for those of one node, `"world"` for all ranks.
        device (`torch.device`):
            Device of the rows; the process group's backend must be able to send from it.
    """

    def __init__(self, topology: Topology, across: str, device: torch.device):
        self.rank, nodes = topology.rank, [node.ranks for node in topology.nodes]
        world, fewest = sum(nodes), min(nodes)
        first = np.cumsum([0, *nodes[:-1]])
        self._node = np.repeat(np.arange(len(nodes)), nodes)  # of each rank
        self._first = first[self._node]  # first rank of its node
        # local rank of the ranks through which each one sends to other nodes
        self._channel = (np.arange(world) - self._first) % fewest
        peers = [np.array([rank]) for rank in range(world)]
        self.groups = nodes  # ranks of each group between which rows move
        if across == "world":
            self.groups = [world]
            peers = [np.flatnonzero(self._channel == channel) for channel in range(fewest)]
        self._between = Hop(peers, self.rank, device)
        self._within = Hop(np.split(np.arange(world), first[1:]), self.rank, device)
        # sums over all ranks since `take_moved`; the second between nodes only
        self._moved_bytes, self._crossed_bytes = 0, 0

    def all_lengths(self, mine: torch.Tensor) -> np.ndarray:
        """Gather the prompt and completion tokens and the record's words of all rows, shape `(world_size, rows, 3)`.

        A collective of all ranks, which hold the same number of rows each, because TRL's batch size sets it, or
        `RowDealer` has added empty ones. It is all that ranks must agree on: 12 bytes a row, 1.4 MB for 128 rows on
        each of 896 ranks.

        Args:
            mine (`torch.Tensor` of shape `(rows, 3)`):
                Lengths of this rank's rows.
        """
        world = len(self._node)
        if world == 1:
            return mine.cpu().numpy()[None]
        mine = mine.to(torch.int32).contiguous()
        every = mine.new_empty(world * len(mine), mine.shape[1])
        dist.all_gather_into_tensor(every, mine)
        return every.view(world, *mine.shape).cpu().numpy()

    def most(self, number: torch.Tensor) -> int:
        """Return the greatest of the ranks' numbers. A collective of all ranks."""
        if len(self._node) > 1:
            dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def move(
        self,
        records: dict[int, torch.Tensor],
        sizes: np.ndarray,
        sources: np.ndarray,
        targets: np.ndarray,
    ) -> dict[int, torch.Tensor]:
        """Send the records that leave this rank and return those that arrive. A collective of all ranks.

        Args:
            records (`dict[int, torch.Tensor]`):
                Records by row number, int32 of shape `(sizes[row],)`: at least those that leave this rank.
            sizes (`np.ndarray`), sources (`np.ndarray`), targets (`np.ndarray` of shape `(rows,)`):
                Length of each row's record, the rank that holds it, and the rank that receives it; the same on every
                rank.
        """
        via = self._first[targets] + self._channel[sources]
        crosses = self._node[sources] != self._node[targets]
        # a row that stays on its node does not take the first hop
        via[~crosses] = sources[~crosses]
        self._moved_bytes += 4 * int(sizes[sources != targets].sum())
        self._crossed_bytes += 4 * int(sizes[crosses].sum())
        held = records | self._between.move(records, sizes, sources, via)
        held |= self._within.move(held, sizes, via, targets)
        arrived = np.flatnonzero((targets == self.rank) & (sources != self.rank))
        return {row: held[row] for row in arrived.tolist()}

    def take_moved(self) -> tuple[int, int]:
        """Return the bytes that moved between ranks, and between nodes, since the last call."""
        moved = self._moved_bytes, self._crossed_bytes
        self._moved_bytes, self._crossed_bytes = 0, 0
        return moved


class Hop:
    """One step of the exchange: every rank sends to the ranks of its group. All ranks build it at the same point.

    Args:
        groups (`Sequence[np.ndarray]`):
            Ranks of each group, ascending; every rank is in one group.
        rank (`int`):
            This rank.
        device (`torch.device`):
            Device of the records.
    """

    def __init__(self, groups: Sequence[np.ndarray], rank: int, device: torch.device):
        index = next(index for index, ranks in enumerate(groups) if rank in ranks)
        self._rank = rank
        self._device = device
        self._ranks = groups[index]
        self._group = None
        # one group is the default group, and groups of one rank need no communication
        if len(groups) > 1 and max(map(len, groups)) > 1:
            self._group = [dist.new_group(ranks.tolist()) for ranks in groups][index]

    def move(
        self,
        records: dict[int, torch.Tensor],
        sizes: np.ndarray,
        sources: np.ndarray,
        targets: np.ndarray,
    ) -> dict[int, torch.Tensor]:
        """Send and return records as [`RowExchange.move`] does; a row's source and target are in one group."""
        if len(self._ranks) == 1:
            return {}
        moving = sources != targets
        out = np.flatnonzero(moving & (sources == self._rank))
        leaving, out_sizes = self._by_peer(out, targets, sizes)
        into = np.flatnonzero(moving & (targets == self._rank))
        arriving, in_sizes = self._by_peer(into, sources, sizes)
        nothing = torch.empty(0, dtype=torch.int32, device=self._device)
        outgoing = torch.cat([nothing, *(records[row] for row in leaving.tolist())])
        incoming = nothing.new_empty(sum(in_sizes))
        dist.all_to_all_single(incoming, outgoing, in_sizes, out_sizes, group=self._group)
        parts = incoming.split(sizes[arriving].tolist())
        return dict(zip(arriving.tolist(), parts, strict=True))

    def _by_peer(
        self, rows: np.ndarray, peers: np.ndarray, sizes: np.ndarray
    ) -> tuple[np.ndarray, list[int]]:
        """Sort rows by their peer; return them and the summed size for each rank of the group."""
        rows = rows[np.argsort(peers[rows], kind="stable")]
        return rows, [int(sizes[rows[peers[rows] == rank]].sum()) for rank in self._ranks]
