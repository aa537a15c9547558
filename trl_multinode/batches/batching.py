"""Plan of the rows that a rank puts through the model together, from known lengths. No tensors, no communication.

Ranks run in lock-step, micro-step by micro-step, so a step takes the sum over micro-steps of the *slowest* rank's
cost. The rows of a pool of ranks are sorted by length and cut into runs; a run is one micro-step and is cut into one
bin per rank. Neighbours in the sorted order have almost the same length, so a bin has little padding, and the bins of
a micro-step differ little.

A plan of all rows of a large run would take seconds, so a large run has several pools and one plan for all of them.
Rows are sorted by length and dealt to the pools in snake order (1 2 3, 3 2 1, 1 2 3, ...), so the sorted rows of the
pools have almost the same lengths at each place. The plan is made for the longest row of each place, because in
lock-step the other pools wait for it anyway. Nodes with different numbers of ranks have pools of different sizes:
those of one size are planned together, all with the same number of micro-steps. All numbers are integers, so every
rank computes the same plan; the lengths are all that ranks have to exchange for it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

POOL_ROWS = (
    1024  # limit for the rows of a pool; 2048 would gain 1 to 2 % in three times the planning time
)
POOL_RANKS = 64  # limit for the ranks of a pool; with 8 rows each, 128 would gain 1 % in three times the planning time
BUDGETS = 24  # number of micro-step sizes to try; 48 would gain 0.3 %
OVERHEAD = 16  # a micro-step has the fixed cost of a sixteenth of a full bin (ZeRO-3 gathers, kernel launches)
MORE_STEPS = 3  # try up to this many times the fewest possible micro-steps
NEVER = 1 << 60


@dataclass(frozen=True)
class Plan:
    """Assignment of rows to ranks and micro-steps. Rows are numbered across the ranks that hold them now.

    Args:
        targets (`np.ndarray` of shape `(rows,)`):
            Rank that runs each row.
        steps (`np.ndarray` of shape `(rows,)`):
            Micro-step in which it does.
        lengths (`np.ndarray` of shape `(rows,)`):
            Tokens of each row, rounded up to `pad_to_multiple_of`.
        ranks (`int`), pools (`int`):
            Number of ranks and of pools.
        linear (`int`):
            Argument `linear` of [`cost`].
    """

    targets: np.ndarray
    steps: np.ndarray
    lengths: np.ndarray
    ranks: int
    pools: int
    linear: int

    @property
    def micro_steps(self) -> int:
        return int(self.steps.max()) + 1

    @property
    def owners(self) -> np.ndarray:
        """Rank that holds each row now, shape `(rows,)`."""
        return np.arange(len(self.lengths)) // (len(self.lengths) // self.ranks)

    def bins(self, rank: int) -> list[list[int]]:
        """Return the row numbers of each micro-step of a rank, the longest row first."""
        own = np.flatnonzero(self.targets == rank)
        own = own[np.lexsort((own, -self.lengths[own], self.steps[own]))]
        ends = np.searchsorted(self.steps[own], np.arange(1, self.micro_steps))
        return [rows.tolist() for rows in np.split(own, ends)]

    def slots(self) -> np.ndarray:
        """Return rows x padded length of every bin, shape `(ranks, micro_steps)`."""
        rows, widths = self._shapes()
        return rows * widths

    def costs(self) -> np.ndarray:
        """Return the [`cost`] of every bin, shape `(ranks, micro_steps)`."""
        return cost(*self._shapes(), self.linear)

    def _shapes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows and the width of every bin."""
        shape = self.ranks, self.micro_steps
        bins = self.targets * self.micro_steps + self.steps
        widths = np.zeros(shape, dtype=np.int64)
        np.maximum.at(widths.reshape(-1), bins, self.lengths)
        return np.bincount(bins, minlength=widths.size).reshape(shape), widths


def cost(rows: int | np.ndarray, width: int | np.ndarray, linear: int) -> Any:
    """Return the work of a micro-batch, up to a constant factor: `rows * width * (linear + width)`.

    A transformer layer takes `24 s h^2 + 4 s^2 h` operations per sequence of s tokens (Narayanan et al. 2021,
    arXiv:2104.04473, appendix), so attention costs as much as the rest at `s = 6 h`: `linear` is six times the hidden
    size.
    """
    return rows * width * (linear + width)


def plan_micro_steps(
    lengths: np.ndarray,
    groups: Sequence[int],
    cap: int,
    linear: int,
    pool_rows: int = POOL_ROWS,
    pool_ranks: int = POOL_RANKS,
) -> Plan:
    """Put every row into one bin of at most `cap` slots. No bin is empty, and every rank has the same number of bins.

    Args:
        lengths (`np.ndarray` of shape `(ranks, rows)`):
            Tokens of each row, by the rank that holds it. No row may be longer than `cap`.
        groups (`Sequence[int]`):
            Ranks of each group of neighbouring ranks between which rows may move: one group of all of them, or a group
            per node.
        cap (`int`):
            Largest rows x padded length of a bin.
        linear (`int`):
            Argument `linear` of [`cost`].
        pool_rows (`int`), pool_ranks (`int`):
            Limits for the rows and ranks of a pool; a pool of one rank may have more rows.
    """
    ranks, rows = lengths.shape
    flat = lengths.reshape(-1).astype(np.int64)
    starts = np.cumsum([0, *groups[:-1]])  # first rank of each group
    sizes = sorted(set(groups))
    parts = []
    for size in sizes:
        most = max(1, min(size, pool_ranks, pool_rows // rows))
        in_pool = max(count for count in range(1, most + 1) if size % count == 0)
        firsts = starts[np.equal(groups, size)]
        numbers = firsts[:, None] * rows + np.arange(size * rows)
        order = numbers.reshape(-1)[deal(flat[numbers], size // in_pool)]
        # first rank of each pool
        pools = (firsts[:, None] + np.arange(0, size, in_pool)).reshape(-1)
        cuts = Cuts(flat[order].max(axis=1), in_pool, cap, linear)
        parts.append((order, pools, cuts))
    counts = common_counts([cuts for *_, cuts in parts], rows)
    overhead = cap * linear // OVERHEAD
    curve = np.max([cuts.curve(counts[-1]) for *_, cuts in parts], axis=0)[counts]
    count = counts[int((curve + overhead * np.array(counts)).argmin())]
    targets, steps = np.empty_like(flat), np.empty_like(flat)
    for order, pools, cuts in parts:
        for step, edges in enumerate(cuts.cut(count)):
            members = np.repeat(np.arange(cuts.ranks), np.diff(edges))
            placed = order[edges[0] : edges[-1]]
            targets[placed] = members[:, None] + pools
            steps[placed] = step
    num_pools = sum(len(pools) for _, pools, _ in parts)
    return Plan(targets, steps, flat, ranks, num_pools, linear)


def common_counts(parts: Sequence["Cuts"], rows: int) -> range:
    """Return the numbers of micro-steps to choose from, which are possible in all parts, for `rows` rows per rank."""
    fewest = max(cuts.count_fewest() for cuts in parts)
    # one row per bin is possible in every part, which a number below may not be
    most = rows if len(parts) > 1 else max(fewest, min(rows, MORE_STEPS * fewest))
    return range(fewest, most + 1)


def deal(lengths: np.ndarray, pools: int) -> np.ndarray:
    """Deal the rows of each part to `pools` pools in snake order; return their numbers, `(places, parts * pools)`.

    Args:
        lengths (`np.ndarray` of shape `(parts, rows)`):
            Lengths of the rows; those of one part stay together. `pools` divides their number.
        pools (`int`):
            Pools of each part.
    """
    parts, rows = lengths.shape
    places = rows // pools
    longest = lengths.max()
    # numpy sorts 16 bits six times as fast as 64
    shorter_by = (longest - lengths).astype(np.min_scalar_type(longest))
    order = np.argsort(shorter_by, axis=1, kind="stable")
    order += np.arange(parts)[:, None] * rows
    order = order.reshape(parts, places, pools)
    order[:, 1::2] = order[:, 1::2, ::-1].copy()
    by_place = order.transpose(1, 0, 2)
    return np.ascontiguousarray(by_place.reshape(places, parts * pools))


class Cuts:
    """Candidate cuts of sorted rows into micro-steps, and the cheapest cut for each number of micro-steps.

    A micro-step begins at row i and gives each rank in turn as many rows as fit its budget, at least one.

    Args:
        lengths (`np.ndarray` of shape `(rows,)`):
            Lengths of the rows, descending; at least one row per rank.
        ranks (`int`):
            Number of ranks in the pool.
        cap (`int`), linear (`int`):
            Arguments `cap` and `linear` of [`plan_micro_steps`].
    """

    def __init__(self, lengths: np.ndarray, ranks: int, cap: int, linear: int):
        self.ranks = ranks
        self._cap = cap
        self._linear = linear
        self._lengths = lengths
        self._units = cost(1, lengths, linear)
        self._fits = cap // lengths  # most rows of a bin that begins at each row
        self._edges, self._costs = self._all_steps()

    def _all_steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the last edges and the costs of all candidate micro-steps, both `(rows, budgets)`.

        A candidate begins at one row and has one budget. It costs `NEVER` if it has an empty bin, or if it would leave
        the next micro-step fewer rows than ranks.
        """
        n, units = len(self._lengths), self._units
        full_bin = self._cap * (self._linear + self._lengths)
        share_of_a_rank = units.sum() // self.ranks + units
        largest = np.minimum(full_bin, share_of_a_rank)
        budgets = largest[:, None] * np.arange(BUDGETS + 1) // BUDGETS
        position = np.broadcast_to(np.arange(n)[:, None], budgets.shape)
        costs = np.zeros(budgets.shape, dtype=np.int64)
        for later_ranks in reversed(range(self.ranks)):
            at = np.minimum(position, n - 1)
            unit = units[at]
            rows = np.maximum(1, budgets // unit)
            rows = np.minimum(self._fits[at], rows)
            left = n - position - later_ranks  # one row for each later rank
            rows = np.maximum(np.minimum(rows, left), 0)
            of_bin = np.where(rows > 0, rows * unit, NEVER)
            costs = np.maximum(costs, of_bin)
            position = position + rows
        left = n - position
        too_few = (left > 0) & (left < self.ranks)
        return position, np.where(too_few, NEVER, costs)

    def cut(self, count: int) -> np.ndarray:
        """Return the bin edges of the cheapest `count` micro-steps, the most expensive one first.

        Args:
            count (`int`):
                Number of micro-steps, at most the argument of the last call of `curve`.

        Returns:
            `np.ndarray` of shape `(micro_steps, ranks + 1)`.
        """
        found, start = [], 0
        for left in range(count, 0, -1):
            budget = self._choice[start, left]
            end = int(self._edges[start, budget])
            largest = int(self._costs[start, budget])
            found.append(self._even(start, end, largest))
            start = end
        edges = np.array(found)
        of_bins = np.diff(edges) * self._units[edges[:, :-1]]
        costs = of_bins.max(axis=1)
        return edges[np.argsort(-costs, kind="stable")]

    def count_fewest(self) -> int:
        """Return the fewest micro-steps of any candidate cut: follow all candidates from the first row."""
        possible = self._costs < NEVER
        reached, steps = np.array([0]), 0
        while reached[-1] < len(self._lengths):
            ends = self._edges[reached][possible[reached]]
            reached = np.unique(ends)
            steps += 1
        return steps

    def curve(self, most: int) -> np.ndarray:
        """Return the least cost of exactly k micro-steps for k = 0 to `most`.

        Dynamic programming from the last row.
        """
        n = len(self._lengths)
        best = np.full((n + 1, most + 1), NEVER, dtype=np.int64)
        best[n, 0] = 0
        choice = np.zeros((n, most + 1), dtype=np.int64)
        for i in range(n - 1, -1, -1):
            total = self._costs[i, :, None] + best[self._edges[i], :-1]
            choice[i, 1:] = total.argmin(axis=0)
            best[i, 1:] = np.minimum(total.min(axis=0), NEVER)
        self._choice = choice  # the budget to take at `[row, k]`
        return best[0]

    def _even(self, start: int, end: int, budget: int) -> list[int]:
        """Return the bin edges of the rows from `start` to `end`, with the smallest budget that fits them all."""
        count = end - start
        fits = self._fits[start:end].tolist()
        units = self._units[start:end].tolist()

        def edges(budget: int) -> list[int]:
            found = [0]
            for later_ranks in reversed(range(self.ranks)):
                at = found[-1]
                left = count - at - later_ranks
                rows = min(fits[at], max(1, budget // units[at]), left)
                found.append(at + rows)
            return found

        best = bisect_left(range(budget), True, key=lambda some: edges(some)[-1] == count)
        return [start + edge for edge in edges(best)]
