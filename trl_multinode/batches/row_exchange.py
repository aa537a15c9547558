"""Exchange of rows between ranks, as flat int32 arrays of known sizes: first between nodes, then within each node.

A row goes to another node by way of the rank with its owner's local rank, and from there to its target. A rank's peers
are thus one rank of each other node and the ranks of its own node: 133 on 128 nodes with 7 ranks. A single collective
of all ranks would in time connect every rank to all 895 others, and NCCL holds GPU memory for every connection.
"""

import numpy as np
import torch
import torch.distributed as dist

from ..run.topology import Topology


class RowExchange:
    """Exchange of rows. All ranks build it at the same point, because it creates process groups.

    Args:
        topology (`Topology`):
            Topology of this rank.
        across (`str`):
            Ranks between which rows move: `"node"` for those of one node, `"world"` for all ranks.
        device (`torch.device`):
            Device of the rows; the process group's backend must be able to send from it.

    Raises:
        `ConfigurationError`: if the nodes have different numbers of ranks.
    """

    def __init__(self, topology: Topology, across: str, device: torch.device):
        self._distributed = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if self._distributed else 0
        world: int = dist.get_world_size() if self._distributed else 1
        if self._distributed:
            topology.check()
        self._per_node = min(topology.ranks_per_node, world)
        self.across = world if across == "world" else self._per_node  # ranks between which rows move
        nodes = np.arange(world).reshape(-1, self._per_node)
        peers = nodes.T if across == "world" else np.arange(world)[:, None]
        self._between, self._within = (Hop(groups, self.rank, device) for groups in (peers, nodes))

    def all_lengths(self, mine: torch.Tensor) -> np.ndarray:
        """Gather the prompt and completion tokens of all ranks' rows, shape `(world_size, rows, 2)`.

        A collective of all ranks, which hold the same number of rows each, because TRL's batch size sets it. It is all
        that ranks must agree on: 8 bytes a row, 0.9 MB for 128 rows on each of 896 ranks.

        Args:
            mine (`torch.Tensor` of shape `(rows, 2)`):
                Tokens of this rank's rows.
        """
        if not self._distributed:
            return mine.cpu().numpy()[None]
        mine = mine.to(torch.int32).contiguous()
        every = mine.new_empty(dist.get_world_size() * len(mine), 2)
        dist.all_gather_into_tensor(every, mine)
        return every.view(-1, len(mine), 2).cpu().numpy()

    def move(
        self, records: dict[int, torch.Tensor], sizes: np.ndarray, sources: np.ndarray, targets: np.ndarray
    ) -> dict[int, torch.Tensor]:
        """Send the records that leave this rank and return those that arrive. A collective of all ranks.

        Args:
            records (`dict[int, torch.Tensor]`):
                Records by row number, int32 of shape `(sizes[row],)`: at least those that leave this rank.
            sizes (`np.ndarray`), sources (`np.ndarray`), targets (`np.ndarray` of shape `(rows,)`):
                Length of each row's record, the rank that holds it, and the rank that receives it; the same on every
                rank.
        """
        via = targets - targets % self._per_node + sources % self._per_node  # on the target's node
        held = records | self._between.move(records, sizes, sources, via)
        held |= self._within.move(held, sizes, via, targets)
        return {row: held[row] for row in np.flatnonzero((targets == self.rank) & (sources != self.rank)).tolist()}


class Hop:
    """One step of the exchange: every rank sends to the ranks of its group. All ranks build it at the same point.

    Args:
        groups (`np.ndarray` of shape `(groups, ranks of a group)`):
            Ranks of each group, ascending; every rank is in one group.
        rank (`int`):
            This rank.
        device (`torch.device`):
            Device of the records.
    """

    def __init__(self, groups: np.ndarray, rank: int, device: torch.device):
        index, self._rank, self._device = int((groups == rank).any(axis=1).argmax()), rank, device
        self._ranks = groups[index]
        whole = len(groups) == 1 or len(self._ranks) == 1  # the default group, or no communication
        self._group = None if whole else [dist.new_group(ranks.tolist()) for ranks in groups][index]

    def move(
        self, records: dict[int, torch.Tensor], sizes: np.ndarray, sources: np.ndarray, targets: np.ndarray
    ) -> dict[int, torch.Tensor]:
        """Send and return records as [`RowExchange.move`] does; a row's source and target are in one group."""
        if len(self._ranks) == 1:
            return {}
        moving = sources != targets
        leaving, out_sizes = self._by_peer(np.flatnonzero(moving & (sources == self._rank)), targets, sizes)
        arriving, in_sizes = self._by_peer(np.flatnonzero(moving & (targets == self._rank)), sources, sizes)
        sent = [records[row] for row in leaving.tolist()]
        outgoing = torch.cat(sent) if sent else torch.empty(0, dtype=torch.int32, device=self._device)
        incoming = torch.empty(sum(in_sizes), dtype=torch.int32, device=self._device)
        dist.all_to_all_single(incoming, outgoing, in_sizes, out_sizes, group=self._group)
        return dict(zip(arriving.tolist(), incoming.split(sizes[arriving].tolist()), strict=True))

    def _by_peer(self, rows: np.ndarray, peers: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Sort rows by their peer; return them and the summed size for each rank of the group."""
        rows = rows[np.argsort(peers[rows], kind="stable")]
        index = np.searchsorted(self._ranks, peers[rows])
        total = np.zeros(len(self._ranks), dtype=np.int64)
        np.add.at(total, index, sizes[rows])
        return rows, total.tolist()
