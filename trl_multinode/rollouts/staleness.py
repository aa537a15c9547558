"""Staleness of a run's completions, the importance weights that correct it, and busy shares of engines and ranks.

The effective sample size of importance weights `w` over `n` tokens (or sequences) is `(sum w)^2 / (n sum w^2)`: 1 when
all are equal (Kong, 1992). The weights are `exp(trainer log-prob - sampler log-prob)` before any clipping.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch

from ..wire.messages import WeightVersion
from .monitor import trained_mask
from .rounds import Rounds

T = TypeVar("T")
MOST_LOG_WEIGHT = 300.0  # the sum of squares of 10^9 weights stays a number in float64


@dataclass
class RoundSums:
    """Sums and maxima of one rank between two logs."""

    rounds: float = 0.0  # generation rounds whose completions were used
    lag_rounds: float = 0.0  # summed over rounds
    lag_rounds_max: float = 0.0
    lag_steps: float = 0.0  # optimizer steps, summed over rounds
    lag_steps_max: float = 0.0
    weights: float = 0.0  # sum over tokens (or sequences)
    weights_squared: float = 0.0
    clipped: float = 0.0  # tokens (or sequences) that the correction clips or masks
    tokens: float = 0.0
    trained_tokens: float = 0.0
    nan_tokens: float = (
        0.0  # trained tokens whose log-prob is NaN, from the engine or from the trainer
    )
    # rounds in flight
    taken_rows: float = 0.0  # rows that were trained
    taken_tokens: float = 0.0
    mixed_rows: float = 0.0  # trained rows with tokens of several updates
    ended_rows: float = 0.0  # rows that ended, trained or not
    ended_tokens: float = 0.0
    swaps: float = 0.0
    swapped_rows: float = 0.0  # rows under way at a swap, summed over swaps
    sampled_groups: float = 0.0  # with `dynamic_sampling`
    sampled_tokens: float = 0.0
    dropped_groups: float = 0.0  # part of `sampled_groups` that was sampled again
    dropped_tokens: float = 0.0
    ahead_s: float = 0.0  # seconds of generating ahead
    waited_s: float = 0.0  # part of `ahead_s` in which the rank waited
    wall_s: float = 0.0
    engine_busy_s: float = 0.0  # sum over the node's engines, by their own clocks
    engine_clock_s: float = 0.0
    engine_kv_use: float = 0.0  # greatest share of an engine's key-value cache in use
    engine_slot_s: float = 0.0  # row-seconds over the engine's slots
    engine_tail_s: float = 0.0  # part of `engine_busy_s` with fewer than 10 % of the rows running
    engine_restarts: float = 0.0  # of the node's engines, since their start


NUM_SUMS = len(fields(RoundSums))
# Metrics that are a share or a mean: one sum of all ranks over another, left out where the latter is 0
RATIOS = {
    "engine/busy": ("engine_busy_s", "engine_clock_s"),
    "engine/filled": ("engine_slot_s", "engine_clock_s"),
    "engine/tail_share": ("engine_tail_s", "engine_clock_s"),
    "logprobs/nan_share": ("nan_tokens", "trained_tokens"),
    "staleness/rounds_mean": ("lag_rounds", "rounds"),
    "staleness/steps_mean": ("lag_steps", "rounds"),
    "in_flight/mixed_rows": ("mixed_rows", "taken_rows"),
    "in_flight/trained_length": ("taken_tokens", "taken_rows"),
    "in_flight/ended_length": ("ended_tokens", "ended_rows"),
    "dynamic_sampling/dropped_share": ("dropped_groups", "sampled_groups"),
}


class StalenessMeter:
    """Meter of the numbers that [`summarize_rounds`] reports. Its methods are not collectives.

    Args:
        args ([`~trl.GRPOConfig`]):
            Arguments with the limits of the importance-sampling correction, which only GRPO has.
    """

    def __init__(self, args: Any):
        self._per_sequence = getattr(args, "vllm_importance_sampling_mode", "").startswith(
            "sequence"
        )
        self._low = getattr(args, "vllm_importance_sampling_clip_min", None)
        self._high = getattr(args, "vllm_importance_sampling_clip_max", None)
        self._sums = RoundSums()
        self._since = time.monotonic()
        self._clocks = np.zeros(4)  # sums over the node's engines

    def restart(self, engine_clocks: np.ndarray) -> None:
        """Begin the shares of time anew, because a training begins: the time until now was that of its set-up."""
        self._since = time.monotonic()
        self._clocks = engine_clocks.sum(axis=0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep an evaluation out of the shares of time, because the waits in it are not counted either."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - start

    def add_round(self, lag_rounds: float, lag_steps: float) -> None:
        """Add a training round whose completions are `lag_rounds` rounds and `lag_steps` optimizer steps old."""
        sums = self._sums
        self.add(rounds=1, lag_rounds=lag_rounds, lag_steps=lag_steps)
        sums.lag_rounds_max = max(sums.lag_rounds_max, lag_rounds)
        sums.lag_steps_max = max(sums.lag_steps_max, lag_steps)

    def add_taken(self, rounds: Rounds, version: WeightVersion) -> None:
        """Add the groups in flight that a round trains with the weights of `version`, after `add_round`."""
        sums = self._sums
        ages = rounds.ages(version)
        sums.lag_rounds_max = max(sums.lag_rounds_max, ages.rounds_max)
        sums.lag_steps_max = max(sums.lag_steps_max, ages.steps_max)
        for group in rounds.taken:
            for row in group.rows:
                is_mixed = len(row.versions) > 1
                self.add(taken_rows=1, taken_tokens=len(row.tokens), mixed_rows=is_mixed)
        self.add(**rounds.groups.take_counts())

    def add(self, **counts: float) -> None:
        """Add counts to the sums that have their names in [`RoundSums`]."""
        for name, count in counts.items():
            setattr(self._sums, name, getattr(self._sums, name) + count)

    def add_weights(self, output: dict) -> None:
        """Add the importance weights in an output of TRL's `_generate_and_score_completions`."""
        if "old_per_token_logps" in output and "sampling_per_token_logps" in output:
            self.add_weight_sums(self.weight_sums(output))

    def weight_sums(self, output: dict) -> torch.Tensor:
        """Return the sums of these weights, on their device: of the weights, of their squares, of the clipped ones,
        and of all of them."""
        mask = trained_mask(output)
        difference = (
            output["old_per_token_logps"] - output["sampling_per_token_logps"]
        ).nan_to_num(nan=0.0) * mask
        # float64, because the square of a sequence's weight exceeds float32 from a summed difference of 44 on
        difference = difference.double()
        logs = difference.sum(-1)[mask.any(-1)] if self._per_sequence else difference[mask.bool()]
        weights = logs.clamp(-MOST_LOG_WEIGHT, MOST_LOG_WEIGHT).exp()
        low = -1.0 if self._low is None else self._low
        high = float("inf") if self._high is None else self._high
        is_clipped = (weights < low) | (weights > high)
        every = torch.ones_like(weights)
        return torch.stack(
            [each.double().sum() for each in (weights, weights.square(), is_clipped, every)]
        )

    def add_weight_sums(self, sums: torch.Tensor) -> None:
        """Add results of `weight_sums`."""
        # once, because it makes the host wait for the device
        total, squared, clipped, count = sums.tolist()
        self.add(weights=total, weights_squared=squared, clipped=clipped, tokens=count)

    def take(
        self,
        ahead: tuple[float, float],
        engine_clocks: np.ndarray,
        kv_use: float = 0.0,
        restarts: int = 0,
    ) -> RoundSums:
        """Return the sums since the last call, for [`summarize_rounds`], and reset them.

        Args:
            ahead (`tuple[float, float]`):
                Seconds of generating ahead, and the part of them in which the rank waited.
            engine_clocks (`np.ndarray` of shape `(engines, 4)`):
                Busy seconds, total seconds, row-seconds over slots and seconds with fewer than 10 % of the rows, of
                every engine of the node, since its start.
            kv_use (`float`, *optional*, defaults to 0):
                Greatest share of an engine's key-value cache that was in use on this node; 0: unknown.
            restarts (`int`, *optional*, defaults to 0):
                Restarts of the engines that this rank owns, since their start.
        """
        sums, self._sums = self._sums, RoundSums()
        sums.ahead_s, sums.waited_s = ahead
        sums.engine_kv_use = kv_use
        sums.engine_restarts = restarts
        now, clocks = time.monotonic(), engine_clocks.sum(axis=0)
        sums.wall_s = now - self._since
        sums.engine_busy_s, sums.engine_clock_s, sums.engine_slot_s, sums.engine_tail_s = (
            clocks - self._clocks
        ).tolist()
        self._since, self._clocks = now, clocks
        return sums


def merged(rows: Sequence[T], merge: Callable[[Any], float]) -> T:
    """Return one row of numbers: each is merged from those of all rows, dataclasses of one kind."""
    return type(rows[0])(*map(merge, zip(*(vars(row).values() for row in rows), strict=True)))


def summarize_rounds(ranks: list[RoundSums], idle_s: list[float]) -> dict[str, float]:
    """Compute the metrics for `Trainer.log`.

    Args:
        ranks (`list[RoundSums]` of length `world_size`):
            Results of [`StalenessMeter.take`].
        idle_s (`list[float]` of shape `(world_size,)`):
            Seconds in which a rank waited for completions or for other ranks before a sync.
    """
    total = merged(ranks, sum)
    metrics = _time_shares(total, idle_s)
    for name, (part, whole) in RATIOS.items():
        if getattr(total, whole):
            metrics[name] = getattr(total, part) / getattr(total, whole)
    largest = merged(ranks, max)
    if largest.engine_kv_use:
        metrics["engine/kv_use"] = largest.engine_kv_use
    if total.rounds:
        metrics["staleness/rounds_max"] = largest.lag_rounds_max
        metrics["staleness/steps_max"] = largest.lag_steps_max
    if total.swaps:  # every rank counts every swap
        metrics["in_flight/swapped_rows"] = total.swapped_rows / largest.swaps
    if total.sampled_groups:
        metrics["dynamic_sampling/extra_tokens"] = total.dropped_tokens / max(
            total.sampled_tokens, 1.0
        )
    if total.tokens and total.weights_squared:  # gathered in float32, in which small squares are 0
        metrics["staleness/clipped_share"] = total.clipped / total.tokens
        metrics["staleness/effective_sample_size"] = total.weights**2 / (
            total.tokens * total.weights_squared
        )
    return metrics


def _time_shares(total: RoundSums, idle_s: list[float]) -> dict[str, float]:
    wall = total.wall_s or 1.0
    metrics = {
        "perf/hidden_share": max(0.0, total.ahead_s - total.waited_s) / wall,
        "perf/rank_busy_share": max(0.0, 1.0 - sum(idle_s) / wall),
    }
    if total.engine_clock_s:
        metrics["engine/restarts"] = total.engine_restarts
    return metrics
