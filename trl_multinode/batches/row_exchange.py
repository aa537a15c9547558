"""Rows travel between the ranks of a pool, by default those of a node: flat int32 arrays of sizes known beforehand."""

import numpy as np
import torch
import torch.distributed as dist

from ..topology import Topology


class RowExchange:
    """The ranks among which rows move. Built by all ranks at the same point: it makes the pools' process groups.

    Args:
        topology (`Topology`):
            Of this rank.
        across (`str`):
            `"node"`: rows move between the ranks of one node. `"world"`: between all ranks.
        device (`torch.device`):
            Where the rows are; what the process group's backend can send.
    """

    def __init__(self, topology: Topology, across: str, device: torch.device):
        self._distributed = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if self._distributed else 0
        world: int = dist.get_world_size() if self._distributed else 1
        size = world if across == "world" else min(topology.ranks_per_node, world)
        self.pools = [list(range(first, first + size)) for first in range(0, world, size)]
        self._pool = self.pools[self.rank // size]
        groups = [dist.new_group(pool) for pool in self.pools] if 1 < size < world else [None] * len(self.pools)
        self._group = groups[self.rank // size]
        self._device = device

    def all_lengths(self, mine: torch.Tensor) -> np.ndarray:
        """Prompt and completion tokens of the rows of all ranks, `(world_size, rows, 2)`.

        A collective of all ranks, who hold the same number of rows: that number is TRL's batch size.

        Args:
            mine (`torch.Tensor` of shape `(rows, 2)`):
                Of this rank.
        """
        if not self._distributed:
            return mine.cpu().numpy()[None]
        mine = mine.to(torch.int32).contiguous()
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        return torch.stack(every).cpu().numpy()

    def move(
        self, records: dict[int, torch.Tensor], sizes: np.ndarray, sources: np.ndarray, targets: np.ndarray
    ) -> dict[int, torch.Tensor]:
        """The records of other ranks' rows that are now for this rank. A collective of the pool's ranks.

        Args:
            records (`dict[int, torch.Tensor]`):
                By row number, int32 of shape `(sizes[row],)`: at least those that leave this rank.
            sizes (`np.ndarray`), sources (`np.ndarray`), targets (`np.ndarray` of shape `(rows,)`):
                Length of each row's record, the rank that has it, the rank that gets it. The same on every rank.
        """
        if len(self._pool) == 1:
            return {}
        out = [self._rows(sources, targets, self.rank, rank) for rank in self._pool]
        into = [self._rows(sources, targets, rank, self.rank) for rank in self._pool]
        sent = [records[row] for rows in out for row in rows]
        outgoing = torch.cat(sent) if sent else torch.empty(0, dtype=torch.int32, device=self._device)
        in_sizes = [int(sizes[rows].sum()) for rows in into]
        incoming = torch.empty(sum(in_sizes), dtype=torch.int32, device=self._device)
        dist.all_to_all_single(
            incoming, outgoing, in_sizes, [int(sizes[rows].sum()) for rows in out], group=self._group
        )
        numbers = np.concatenate(into)
        return dict(zip(numbers.tolist(), incoming.split(sizes[numbers].tolist()), strict=True))

    @staticmethod
    def _rows(sources: np.ndarray, targets: np.ndarray, source: int, target: int) -> np.ndarray:
        """Ascending row numbers that go from one rank to another one."""
        return np.flatnonzero((sources == source) & (targets == target) & (sources != targets))
