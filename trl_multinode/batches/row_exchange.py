"""Exchange of rows between the ranks of a pool (by default a node), as flat int32 arrays of known sizes."""

import numpy as np
import torch
import torch.distributed as dist

from ..run.topology import Topology


class RowExchange:
    """Exchange within pools of ranks. All ranks build it at the same point, because it creates their process groups.

    Args:
        topology (`Topology`):
            Topology of this rank.
        across (`str`):
            Extent of a pool: `"node"` for the ranks of one node, `"world"` for all ranks.
        device (`torch.device`):
            Device of the rows; the process group's backend must be able to send from it.
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
        """Gather the prompt and completion tokens of all ranks' rows, shape `(world_size, rows, 2)`.

        A collective of all ranks, which hold the same number of rows each, because TRL's batch size sets it.

        Args:
            mine (`torch.Tensor` of shape `(rows, 2)`):
                Tokens of this rank's rows.
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
        """Send the records that leave this rank and return those that arrive. A collective of the pool's ranks.

        Args:
            records (`dict[int, torch.Tensor]`):
                Records by row number, int32 of shape `(sizes[row],)`: at least those that leave this rank.
            sizes (`np.ndarray`), sources (`np.ndarray`), targets (`np.ndarray` of shape `(rows,)`):
                Length of each row's record, the rank that holds it, and the rank that receives it; the same on every
                rank.
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
        """Return the ascending numbers of the rows that go from one rank to another."""
        return np.flatnonzero((sources == source) & (targets == target) & (sources != targets))
