"""Staleness of a run's completions, the importance weights that correct it, and busy shares of engines and ranks.

The effective sample size of importance weights `w` over `n` tokens (or sequences) is `(sum w)^2 / (n sum w^2)`: 1 when
all are equal (Kong, 1992). The weights are `exp(trainer log-prob - sampler log-prob)` before any clipping.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch

from ..wire.messages import WeightVersion
from .rounds import Rounds

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
    nan_tokens: float = 0.0  # trained tokens whose log-prob is NaN, from the engine or from the trainer
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


class StalenessMeter:
    """Meter of the numbers that [`summarize_rounds`] reports. Its methods are not collectives.

    Args:
        args ([`~trl.GRPOConfig`]):
            Arguments with the limits of the importance-sampling correction, which only GRPO has.
    """

    def __init__(self, args: Any):
        self._per_sequence = getattr(args, "vllm_importance_sampling_mode", "").startswith("sequence")
        self._low = getattr(args, "vllm_importance_sampling_clip_min", None)
        self._high = getattr(args, "vllm_importance_sampling_clip_max", None)
        self._sums = RoundSums()
        self._since = time.monotonic()
        self._clocks: list[tuple[float, float, float, float]] = []

    def restart(self, engine_clocks: list[tuple[float, float, float, float]]) -> None:
        """Begin the shares of time anew, because a training begins: the time until now was that of its set-up."""
        self._since, self._clocks = time.monotonic(), engine_clocks

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
        sums.rounds += 1
        sums.lag_rounds += lag_rounds
        sums.lag_steps += lag_steps
        sums.lag_rounds_max = max(sums.lag_rounds_max, lag_rounds)
        sums.lag_steps_max = max(sums.lag_steps_max, lag_steps)

    def add_taken(self, rounds: Rounds, version: WeightVersion) -> None:
        """Add the groups in flight that a round trains with the weights of `version`, after `add_round`."""
        sums, rows, ages = (
            self._sums,
            [row for group in rounds.taken for row in group.rows],
            rounds.ages(version),
        )
        sums.lag_rounds_max = max(sums.lag_rounds_max, ages.rounds_max)
        sums.lag_steps_max = max(sums.lag_steps_max, ages.steps_max)
        sums.taken_rows += len(rows)
        sums.taken_tokens += sum(len(row.tokens) for row in rows)
        sums.mixed_rows += sum(len(row.versions) > 1 for row in rows)
        ended_rows, ended_tokens = rounds.groups.take_counts()
        sums.ended_rows, sums.ended_tokens = sums.ended_rows + ended_rows, sums.ended_tokens + ended_tokens
        swaps, swapped_rows = rounds.take_swaps()
        sums.swaps, sums.swapped_rows = sums.swaps + swaps, sums.swapped_rows + swapped_rows

    def add_sampled(self, groups: int, dropped: int, tokens: int, dropped_tokens: int) -> None:
        """Add the groups that `dynamic_sampling` sampled, those of them that it dropped, and the tokens of both."""
        sums = self._sums
        sums.sampled_groups, sums.dropped_groups = sums.sampled_groups + groups, sums.dropped_groups + dropped
        sums.sampled_tokens, sums.dropped_tokens = sums.sampled_tokens + tokens, sums.dropped_tokens + dropped_tokens

    def add_checked(self, trained_tokens: int, nan_tokens: int) -> None:
        """Add the tokens that the check of log-probs counted in a training round."""
        self._sums.trained_tokens += trained_tokens
        self._sums.nan_tokens += nan_tokens

    def add_weights(self, output: dict) -> None:
        """Add the importance weights in an output of TRL's `_generate_and_score_completions`."""
        if "old_per_token_logps" not in output or "sampling_per_token_logps" not in output:
            return
        mask = output["completion_mask"] * output.get("tool_mask", output["completion_mask"])
        difference = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).nan_to_num(nan=0.0) * mask
        # float64, because the square of a sequence's weight exceeds float32 from a summed difference of 44 on
        logs = difference.double().sum(-1)[mask.any(-1)] if self._per_sequence else difference.double()[mask.bool()]
        weights = logs.clamp(-MOST_LOG_WEIGHT, MOST_LOG_WEIGHT).exp()
        low = -1.0 if self._low is None else self._low
        high = float("inf") if self._high is None else self._high
        parts = [weights.sum(), weights.square().sum(), ((weights < low) | (weights > high)).sum()]
        total, squared, clipped = torch.stack([part.double() for part in parts]).tolist()
        sums = self._sums
        sums.weights, sums.weights_squared = sums.weights + total, sums.weights_squared + squared
        sums.clipped, sums.tokens = sums.clipped + clipped, sums.tokens + weights.numel()

    def take(
        self,
        ahead: tuple[float, float],
        engine_clocks: list[tuple[float, float, float, float]],
        kv_use: float = 0.0,
        restarts: int = 0,
    ) -> list[float]:
        """Return the `NUM_SUMS` numbers since the last call, for [`summarize_rounds`], and reset them.

        Args:
            ahead (`tuple[float, float]`):
                Seconds of generating ahead, and the part of them in which the rank waited.
            engine_clocks (`list[tuple[float, float, float, float]]`):
                Busy seconds, total seconds, row-seconds over slots and seconds with fewer than 10 % of the rows, of
                every engine of the node, since its start.
            kv_use (`float`, *optional*, defaults to 0):
                Greatest share of an engine's key-value cache that was in use on this node; 0: unknown.
            restarts (`int`, *optional*, defaults to 0):
                Restarts of the engines that this rank owns, since their start.
        """
        sums, self._sums = self._sums, RoundSums()
        sums.engine_kv_use, sums.engine_restarts = kv_use, restarts
        now, (sums.ahead_s, sums.waited_s) = time.monotonic(), ahead
        sums.wall_s, self._since = now - self._since, now
        before = self._clocks or [(0.0, 0.0, 0.0, 0.0)] * len(engine_clocks)
        for now_at, before_at in zip(engine_clocks, before, strict=True):
            busy, clock, slot, tail = (later - earlier for later, earlier in zip(now_at, before_at, strict=True))
            sums.engine_busy_s, sums.engine_clock_s = sums.engine_busy_s + busy, sums.engine_clock_s + clock
            sums.engine_slot_s, sums.engine_tail_s = sums.engine_slot_s + slot, sums.engine_tail_s + tail
        self._clocks = engine_clocks
        return list(astuple(sums))


def summarize_rounds(per_rank: list[list[float]], idle_s: list[float]) -> dict[str, float]:
    """Compute the metrics for `Trainer.log`.

    Args:
        per_rank (`list[list[float]]` of shape `(world_size, NUM_SUMS)`):
            Results of [`StalenessMeter.take`].
        idle_s (`list[float]` of shape `(world_size,)`):
            Seconds in which a rank waited for completions or for other ranks before a sync.
    """
    ranks = [RoundSums(*row) for row in per_rank]
    total = RoundSums(*map(sum, zip(*per_rank, strict=True)))
    wall = total.wall_s or 1.0
    metrics = {
        "perf/hidden_share": max(0.0, total.ahead_s - total.waited_s) / wall,
        "perf/rank_busy_share": max(0.0, 1.0 - sum(idle_s) / wall),
    }
    if total.engine_clock_s:
        metrics["engine/busy"] = total.engine_slot_s / total.engine_clock_s
        metrics["engine/tail_share"] = total.engine_tail_s / total.engine_clock_s
        metrics["engine/restarts"] = total.engine_restarts
    if kv_use := max(rank.engine_kv_use for rank in ranks):
        metrics["engine/kv_use"] = kv_use
    if total.trained_tokens:
        metrics["logprobs/nan_share"] = total.nan_tokens / total.trained_tokens
    if total.rounds:
        metrics |= {
            "staleness/rounds_mean": total.lag_rounds / total.rounds,
            "staleness/rounds_max": max(rank.lag_rounds_max for rank in ranks),
            "staleness/steps_mean": total.lag_steps / total.rounds,
            "staleness/steps_max": max(rank.lag_steps_max for rank in ranks),
        }
    if total.taken_rows:
        metrics |= {
            "in_flight/mixed_rows": total.mixed_rows / total.taken_rows,
            "in_flight/trained_length": total.taken_tokens / total.taken_rows,
        }
    if total.ended_rows:
        metrics["in_flight/ended_length"] = total.ended_tokens / total.ended_rows
    if total.swaps:  # every rank counts every swap
        metrics["in_flight/swapped_rows"] = total.swapped_rows / max(rank.swaps for rank in ranks)
    if total.sampled_groups:
        metrics["dynamic_sampling/dropped_share"] = total.dropped_groups / total.sampled_groups
        metrics["dynamic_sampling/extra_tokens"] = total.dropped_tokens / max(total.sampled_tokens, 1.0)
    if total.tokens and total.weights_squared:
        metrics["staleness/effective_sample_size"] = total.weights**2 / (total.tokens * total.weights_squared)
        metrics["staleness/clipped_share"] = total.clipped / total.tokens
    return metrics
