"""Staleness of a run's completions, the importance weights that correct it, and busy shares of engines and ranks.

The effective sample size of importance weights `w` over `n` tokens (or sequences) is `(sum w)^2 / (n sum w^2)`: 1 when
all are equal (Kong, 1992). The weights are `exp(trainer log-prob - sampler log-prob)` before any clipping.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .monitor import trained_mask
from .rounds import Rounds
from .token_ages import TokenAges

MOST_LOG_WEIGHT = 300.0  # the sum of squares of 10^9 weights stays a number in float64
# Sums over the node's engines, by their own clocks, in the order of `EngineClocks.seconds`
ENGINE_SUMS = (
    "engine_busy_s",
    "engine_clock_s",
    "engine_slot_s",  # row-seconds over the engine's slots
    "engine_tail_s",  # part of `engine_busy_s` with fewer than 10 % of the rows running
)
# Weights of the importance-sampling correction, summed over tokens (or sequences)
WEIGHT_SUMS = (
    "weights",
    "weights_squared",
    "clipped",  # tokens (or sequences) that the correction clips or masks
    "tokens",  # number of them
)
# Names of the sums and maxima that one rank has between two logs
SUMS = (
    "rounds",  # generation rounds whose completions were used
    "lag_rounds",  # summed over rounds
    "lag_rounds_max",
    "lag_steps",  # optimizer steps, summed over rounds
    "lag_steps_max",
    *WEIGHT_SUMS,
    "trained_tokens",
    "nan_tokens",  # trained tokens whose log-prob is NaN, from the engine or from the trainer
    # rounds in flight
    "taken_rows",  # rows that were trained
    "taken_tokens",
    "mixed_rows",  # trained rows with tokens of several updates
    "ended_rows",  # rows that ended, trained or not
    "ended_tokens",
    "swaps",
    "swapped_rows",  # rows under way at a swap, summed over swaps
    "sampled_groups",  # with `dynamic_sampling`
    "sampled_tokens",
    "dropped_groups",  # part of `sampled_groups` that was sampled again
    "dropped_tokens",
    "ahead_s",  # seconds of generating ahead
    "waited_s",  # part of `ahead_s` in which the rank waited
    "wall_s",
    *ENGINE_SUMS,
    "engine_kv_use",  # greatest share of an engine's key-value cache in use
    "engine_restarts",  # of the node's engines, since their start
)
# Metrics that are a share or a mean: one sum of all ranks over another, left out where the latter is 0
RATIOS = {
    "engine/busy": ("engine_busy_s", "engine_clock_s"),
    "engine/filled": ("engine_slot_s", "engine_clock_s"),
    "engine/tail_share": ("engine_tail_s", "engine_clock_s"),
    "logprobs/nan_share": ("nan_tokens", "trained_tokens"),
    "staleness/rounds_mean": ("lag_rounds", "rounds"),
    "staleness/steps_mean": ("lag_steps", "rounds"),
    "staleness/clipped_share": ("clipped", "tokens"),
    "in_flight/mixed_rows": ("mixed_rows", "taken_rows"),
    "in_flight/trained_length": ("taken_tokens", "taken_rows"),
    "in_flight/ended_length": ("ended_tokens", "ended_rows"),
    "dynamic_sampling/dropped_share": ("dropped_groups", "sampled_groups"),
    "dynamic_sampling/extra_tokens": ("dropped_tokens", "sampled_tokens"),
}

# Metrics that are the greatest number of any rank, left out where the sum of the other one is 0
GREATEST = {
    "engine/kv_use": ("engine_kv_use", "engine_kv_use"),
    "staleness/rounds_max": ("lag_rounds_max", "rounds"),
    "staleness/steps_max": ("lag_steps_max", "rounds"),
}

RoundSums = dict[str, float]  # by the names of `SUMS`


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
        self._sums: RoundSums = dict.fromkeys(SUMS, 0.0)
        self._lock = threading.Lock()  # of the sums
        self._since = time.monotonic()
        self._clocks = np.zeros(len(ENGINE_SUMS))

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

    def add_round(self, ages: TokenAges) -> None:
        """Add a training round whose tokens have these ages."""
        self.add(rounds=1, lag_rounds=ages.rounds_mean, lag_steps=ages.steps_mean)
        largest = {"lag_rounds_max": ages.rounds_max, "lag_steps_max": ages.steps_max}
        for name, age in largest.items():
            self._sums[name] = max(self._sums[name], age)

    def add_taken(self, rounds: Rounds) -> None:
        """Add the groups in flight that a round trains."""
        for group in rounds.taken:
            for row in group.rows:
                is_mixed = len(row.versions) > 1
                self.add(taken_rows=1, taken_tokens=len(row.tokens), mixed_rows=is_mixed)
        self.add(**rounds.groups.take_counts())

    def add(self, **counts: float) -> None:
        """Add counts to the sums of these names. Any thread may call it."""
        with self._lock:
            for name, count in counts.items():
                self._sums[name] += count

    def add_weights(self, output: dict) -> None:
        """Add the importance weights in an output of TRL's `_generate_and_score_completions`."""
        if "old_per_token_logps" in output and "sampling_per_token_logps" in output:
            # once, because it makes the host wait for the device
            self.add_weight_sums(self.weight_sums(output).sum(0).tolist())

    def weight_sums(self, output: dict) -> torch.Tensor:
        """Return the sums `WEIGHT_SUMS` of each row, on their device, shape `(rows, 4)`."""
        mask = trained_mask(output).bool()
        difference = output["old_per_token_logps"] - output["sampling_per_token_logps"]
        # float64, because the square of a sequence's weight exceeds float32 from a summed difference of 44 on
        logs = (difference.nan_to_num(nan=0.0) * mask).double()
        if self._per_sequence:
            logs, mask = logs.sum(-1, keepdim=True), mask.any(-1, keepdim=True)
        weights = logs.clamp(-MOST_LOG_WEIGHT, MOST_LOG_WEIGHT).exp()
        low = -1.0 if self._low is None else self._low
        high = float("inf") if self._high is None else self._high
        is_clipped = (weights < low) | (weights > high)
        columns = weights, weights.square(), is_clipped, mask
        return torch.stack([(column.double() * mask).sum(-1) for column in columns], dim=-1)

    def add_weight_sums(self, sums: list[float]) -> None:
        """Add results of `weight_sums`, summed over rows."""
        self.add(**dict(zip(WEIGHT_SUMS, sums, strict=True)))

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
        now, clocks = time.monotonic(), engine_clocks.sum(axis=0)
        self.add(
            **dict(zip(ENGINE_SUMS, (clocks - self._clocks).tolist(), strict=True)),
            ahead_s=ahead[0],
            waited_s=ahead[1],
            wall_s=now - self._since,
            engine_kv_use=kv_use,
            engine_restarts=restarts,
        )
        self._since, self._clocks = now, clocks
        with self._lock:
            sums, self._sums = self._sums, dict.fromkeys(SUMS, 0.0)
        return sums


def column(ranks: list[RoundSums], name: str) -> list[float]:
    """Return one number of every rank."""
    return [rank[name] for rank in ranks]


def summarize_rounds(ranks: list[RoundSums], idle_s: list[float]) -> dict[str, float]:
    """Compute the metrics for `Trainer.log`.

    Args:
        ranks (`list[RoundSums]` of length `world_size`):
            Results of [`StalenessMeter.take`].
        idle_s (`list[float]` of shape `(world_size,)`):
            Seconds in which a rank waited for completions or for other ranks before a sync.
    """
    total = {name: sum(column(ranks, name)) for name in SUMS}
    wall = total["wall_s"] or 1.0
    metrics = {
        "perf/hidden_share": max(0.0, total["ahead_s"] - total["waited_s"]) / wall,
        "perf/rank_busy_share": max(0.0, 1.0 - sum(idle_s) / wall),
    }
    for name, (part, whole) in RATIOS.items():
        if total[whole]:
            metrics[name] = total[part] / total[whole]
    for name, (greatest, needed) in GREATEST.items():
        if total[needed]:
            metrics[name] = max(column(ranks, greatest))
    if total["engine_clock_s"]:
        metrics["engine/restarts"] = total["engine_restarts"]
    if total["weights_squared"]:  # gathered in float32, in which small squares are 0
        metrics["staleness/effective_sample_size"] = total["weights"] ** 2 / (
            total["tokens"] * total["weights_squared"]
        )
    if total["swaps"]:  # every rank counts every swap
        metrics["in_flight/swapped_rows"] = total["swapped_rows"] / ranks[0]["swaps"]
    return metrics
