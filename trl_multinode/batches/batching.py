"""Plan of the rows that a rank puts through the model together, from known lengths. No tensors, no communication.

Ranks run in lock-step, micro-step by micro-step, so a step takes the sum over micro-steps of the *slowest* rank's
cost. The rows of a pool of ranks are sorted by length and cut into runs; a run is one micro-step and is cut into one
bin per rank. Neighbours in the sorted order have almost the same length, so a bin has little padding, and the bins of
a micro-step differ little. All numbers are integers, so every rank computes the same plan.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

BUDGETS = 24  # number of micro-step sizes to try; 48 would gain 0.3 %
OVERHEAD = 16  # a micro-step has the fixed cost of a sixteenth of a full bin (ZeRO-3 gathers, kernel launches)
MORE_STEPS = 3  # try up to this many times the fewest possible micro-steps
NEVER = 1 << 60


@dataclass(frozen=True)
class Plan:
    """Assignment of rows, numbered across the ranks as in `owners`: `bins[rank][micro_step]` holds row numbers."""

    bins: list[list[list[int]]]
    owners: np.ndarray  # (rows,) the rank that holds the row now
    lengths: np.ndarray  # (rows,) in tokens, rounded up to `pad_to_multiple_of`
    linear: int  # see `cost`

    @property
    def micro_steps(self) -> int:
        return len(self.bins[0])

    @property
    def mean_rows(self) -> float:
        return len(self.lengths) / (len(self.bins) * self.micro_steps)

    def targets(self) -> np.ndarray:
        """Return the rank that runs each row, shape `(rows,)`."""
        targets = np.empty_like(self.owners)
        for rank, steps in enumerate(self.bins):
            targets[[row for rows in steps for row in rows]] = rank
        return targets

    def slots(self) -> np.ndarray:
        """Return rows x padded length of every bin, shape `(ranks, micro_steps)`."""
        return np.array([[len(rows) * self.lengths[rows].max() for rows in steps] for steps in self.bins])

    def costs(self) -> np.ndarray:
        """Return the [`cost`] of every bin, shape `(ranks, micro_steps)`."""
        return np.array([[cost(len(rows), self.lengths[rows].max(), self.linear) for rows in s] for s in self.bins])

    def lock_step_efficiency(self) -> float:
        """Return the mean cost of a rank divided by the summed cost of each micro-step's most expensive bin."""
        costs = self.costs()
        return float(costs.sum() / (len(costs) * costs.max(axis=0).sum()))


def cost(rows: int, width: int | np.ndarray, linear: int) -> Any:
    """Return the work of a micro-batch, up to a constant factor: `rows * width * (linear + width)`.

    A transformer layer takes `24 s h^2 + 4 s^2 h` operations per sequence of s tokens (Narayanan et al. 2021,
    arXiv:2104.04473, appendix), so attention costs as much as the rest at `s = 6 h`: `linear` is six times the hidden
    size.
    """
    return rows * width * (linear + width)


def plan_micro_steps(lengths: Sequence[Sequence[int]], pools: Sequence[Sequence[int]], cap: int, linear: int) -> Plan:
    """Put every row into one bin of at most `cap` slots. No bin is empty, and every rank has the same number of bins.

    Args:
        lengths (`Sequence[Sequence[int]]`):
            Tokens of each row, by the rank that holds it: `lengths[rank]`. No row may be longer than `cap`.
        pools (`Sequence[Sequence[int]]`):
            Pools of ranks among which rows may move; every rank is in one pool. All pools have the same size, and each
            has at least one row per rank for every micro-step that any pool needs: equal numbers of rows per rank
            guarantee it.
        cap (`int`):
            Largest rows x padded length of a bin.
        linear (`int`):
            Argument `linear` of [`cost`].
    """
    flat = np.concatenate([np.asarray(rows, dtype=np.int64) for rows in lengths])
    owners = np.repeat(np.arange(len(lengths)), [len(rows) for rows in lengths])
    members = [np.flatnonzero(np.isin(owners, pool)) for pool in pools]
    orders = [rows[np.argsort(-flat[rows], kind="stable")] for rows in members]
    cuts = [Cuts(flat[order], len(pool), cap, linear) for order, pool in zip(orders, pools, strict=True)]
    count, slowest = best_count(cuts, cap * linear // OVERHEAD)
    plans = []
    # Pools wait for each other, so also try a lower bound on the cost of a micro-step: see `curve`.
    for least in sorted({0, 0 if len(pools) == 1 else slowest // count}):
        bins: list[list[list[int]]] = [[] for _ in lengths]
        for order, pool, cut in zip(orders, pools, cuts, strict=True):
            for edges in cut.steps(count, least):
                for rank, (start, end) in zip(pool, pairwise(edges), strict=True):
                    bins[rank].append(order[start:end].tolist())
        plans.append(Plan(bins, owners, flat, linear))
    return max(plans, key=Plan.lock_step_efficiency)


def best_count(cuts: "Sequence[Cuts]", overhead: int) -> tuple[int, int]:
    """Return the cheapest number of micro-steps, and the slowest pool's cost for it without overhead.

    The cost of a number of micro-steps is that of the slowest pool, plus `overhead` for each micro-step.
    """
    fewest, most = max(cut.fewest for cut in cuts), min(len(cut.lengths) // cut.ranks for cut in cuts)
    tried = range(fewest, max(fewest, min(most, MORE_STEPS * fewest)) + 1)
    curves = [cut.curve(tried[-1]) for cut in cuts]
    slowest = {count: max(int(curve[count]) for curve in curves) for count in tried}
    count = min(tried, key=lambda count: slowest[count] + overhead * count)
    return count, slowest[count]


class Cuts:
    """Candidate cuts of one pool's sorted rows into micro-steps, and the cheapest cut for each number of micro-steps.

    A micro-step begins at row i and gives each rank in turn as many rows as fit its budget, at least one.

    Args:
        lengths (`np.ndarray` of shape `(rows,)`):
            Lengths of the rows, descending.
        ranks (`int`):
            Number of ranks in the pool.
        cap (`int`), linear (`int`):
            Arguments `cap` and `linear` of [`plan_micro_steps`].
    """

    def __init__(self, lengths: np.ndarray, ranks: int, cap: int, linear: int):
        self.lengths, self.ranks, self._cap, self._linear = lengths, ranks, cap, linear
        self._fits = cap // lengths  # most rows of a bin that begins at each row
        self._units = cost(1, lengths, linear)
        self._edges, self._costs = self._all_steps()
        self.fewest = self._count_fewest()

    def _all_steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the edges `(budgets, ranks + 1, rows)` and costs `(budgets, rows)` of all candidate micro-steps.

        A candidate begins at one row and has one budget. It costs `NEVER` if it has an empty bin, or if it would leave
        the next micro-step fewer rows than ranks.
        """
        n, units = len(self.lengths), self._units
        largest = np.minimum(self._cap * (self._linear + self.lengths), units.sum() // self.ranks + units)
        budgets = np.arange(BUDGETS + 1)[:, None] * largest // BUDGETS
        position = np.broadcast_to(np.arange(n), budgets.shape)
        edges, costs = [position], np.zeros(budgets.shape, dtype=np.int64)
        for rank in range(self.ranks):
            at = np.minimum(position, n - 1)
            rows = np.minimum(self._fits[at], np.maximum(1, budgets // units[at]))
            left = n - position - (self.ranks - rank - 1)  # one row for each later rank
            rows = np.maximum(np.minimum(rows, left), 0)
            costs = np.maximum(costs, np.where(rows > 0, rows * units[at], NEVER))
            position = position + rows
            edges.append(position)
        left = n - position
        return np.stack(edges, axis=1), np.where((left > 0) & (left < self.ranks), NEVER, costs)

    def _count_fewest(self) -> int:
        """Return the fewest micro-steps of any candidate cut."""
        n = len(self.lengths)
        fewest = np.full(n + 1, NEVER)
        fewest[n] = 0
        for i in range(n - 1, -1, -1):
            possible = self._costs[:, i] < NEVER
            fewest[i] = min(NEVER, 1 + fewest[self._edges[possible, -1, i]].min(initial=NEVER))
        return int(fewest[0])

    def curve(self, most: int, least: int = 0) -> np.ndarray:
        """Return the least cost with exactly k micro-steps for k = 0 to `most`: dynamic programming from the last row.

        Args:
            most (`int`):
                Largest k.
            least (`int`, defaults to 0):
                Lower bound on a micro-step's cost, because a cheaper one would still wait for the other pools.
        """
        costs = np.maximum(self._costs, least)
        n = len(self.lengths)
        best = np.full((n + 1, most + 1), NEVER, dtype=np.int64)
        best[n, 0] = 0
        self._choice = np.zeros((n, most + 1), dtype=np.int64)
        for i in range(n - 1, -1, -1):
            total = costs[:, i, None] + best[self._edges[:, -1, i], :-1]
            self._choice[i, 1:] = total.argmin(axis=0)
            best[i, 1:] = np.minimum(total.min(axis=0), NEVER)
        return best[0]

    def steps(self, count: int, least: int) -> list[list[int]]:
        """Return the bin edges of each of `count` micro-steps, the most expensive micro-step first."""
        self.curve(count, least)
        found, i = [], 0
        for left in range(count, 0, -1):
            budget = self._choice[i, left]
            found.append(self._even(i, int(self._edges[budget, -1, i]), int(self._costs[budget, i])))
            i = found[-1][-1]
        return sorted(found, key=lambda edges: -max((b - a) * self._units[a] for a, b in pairwise(edges)))

    def _even(self, start: int, end: int, budget: int) -> list[int]:
        """Return the bin edges of the rows from `start` to `end`, with the smallest budget that fits them all."""

        def edges(budget: int) -> list[int]:
            found = [start]
            for later in range(self.ranks - 1, -1, -1):
                at = found[-1]
                found.append(at + min(self._fits[at], max(1, budget // self._units[at]), end - at - later))
            return found

        best = bisect_left(range(budget), True, key=lambda some: edges(some)[-1] == end)
        return [int(edge) for edge in edges(best)]
