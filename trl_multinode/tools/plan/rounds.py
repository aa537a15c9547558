"""Seconds of a round of completions on a node's engines: a simulation of decoding, with assumed rates."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp
from statistics import NormalDist

from .engine_memory import WEIGHT_BYTES, EngineMemory
from .hardware import Gpu
from .measured import TAIL_ROWS
from .model_size import ModelSize
from .task import Rows

# Assumed shares of the data sheet's rates, about those of the simulation behind docs/operate/sizing.md
READ_SHARE, CACHE_SHARE, MATRIX_SHARE = 0.9, 0.78, 0.6
STEP_S = 1.5e-3  # assumed, per token step: launches and sampling
REDUCE_S = 10e-6  # assumed, per all-reduce between an engine's GPUs; two per layer
SPREAD = 1.0  # assumed, of the logarithm of the lengths


@dataclass(frozen=True)
class Round:
    """Seconds in which the engines of a node generate a round."""

    seconds: float
    tail_s: float  # part with fewer than 10 % of the rows
    full_s: float  # with as many rows as the cache holds all the time, as rounds in flight do


@cache
def lengths(rows: Rows) -> tuple[int, ...]:
    """Return the lengths of completions: quantiles of a log-normal distribution that is cut at the longest."""
    number, longest = rows.number, rows.longest
    shape = [exp(SPREAD * NormalDist().inv_cdf((i + 0.5) / number)) for i in range(number)]
    low, high = 0.0, float(longest)
    for _ in range(60):  # bisection of the median that gives the mean
        median = (low + high) / 2
        got = sum(min(longest, max(1.0, median * each)) for each in shape) / number
        low, high = (median, high) if got < rows.mean else (low, median)
    return tuple(int(min(longest, max(1, round(high * each)))) for each in shape)


@dataclass(frozen=True)
class Decoder:
    """Seconds of one token step of an engine.

    Args:
        model ([`ModelSize`]), gpu ([`Gpu`]):
            Model, and kind of GPU with known rates.
        tensor_parallel (`int`):
            GPUs of the engine.
    """

    model: ModelSize
    gpu: Gpu
    tensor_parallel: int

    def step_s(self, rows: int, context: float) -> float:
        """Return the seconds in which `rows` rows with `context` tokens in all get a token each."""
        model, parallel = self.model, self.tensor_parallel
        assert self.gpu.memory_rate is not None and self.gpu.peak is not None  # the caller checks
        # share of experts that no row needs
        unused = (1 - model.experts.routed / model.experts.number) ** rows
        weights = WEIGHT_BYTES * (model.parameters - unused * model.experts.parameters) / parallel
        read = weights / (READ_SHARE * self.gpu.memory_rate)
        kept = rows * WEIGHT_BYTES * model.cache.cache_elements(context / rows, parallel)
        keys = kept / (CACHE_SHARE * self.gpu.memory_rate)
        matrices = rows * 2 * model.active / (MATRIX_SHARE * self.gpu.peak * parallel)
        reduces = 2 * model.layers * REDUCE_S if parallel > 1 else 0.0
        return STEP_S + reduces + read + keys + matrices


def generate(rows: Rows, memory: EngineMemory, decoder: Decoder, open_rounds: int = 1) -> Round:
    """Simulate a round, whose rows the engines take in turn.

    Args:
        open_rounds (`int`, *optional*, defaults to 1):
            Rounds whose rows may run at once in flight.
    """
    every = lengths(rows)
    mine = every[:: memory.engines]  # quantiles: each engine gets as long ones
    mean = sum(every) / len(every)
    # a running row is a long one more often than not: its mean context is half of the length-weighted mean length
    context = rows.prompt + sum(each * each for each in every) / sum(every) / 2
    each = WEIGHT_BYTES * decoder.model.cache.cache_elements(context, decoder.tensor_parallel)
    most = max(1, min(1024, int(memory.cache / each)))
    seconds, tail = drained(mine, rows.prompt, most, decoder)
    steady = max(1, min(most, len(mine) * open_rounds))
    full = len(mine) * mean * decoder.step_s(steady, steady * context) / steady
    return Round(seconds, tail, min(full, seconds))


def drained(
    lengths: Sequence[int], prompt: int, most: int, decoder: Decoder
) -> tuple[float, float]:
    """Return the seconds until an engine has generated all rows, at most `most` at once, and those of the tail."""
    waiting = list(reversed(mixed(lengths)))
    running: list[tuple[int, int]] = []  # token steps at which a row ends and has begun
    now, begun, time, tail = 0, 0, 0.0, 0.0  # `begun`: sum over the running rows
    while waiting or running:
        while waiting and len(running) < most:
            heapq.heappush(running, (now + waiting.pop(), now))
            begun += now
        count, steps = len(running), running[0][0] - now
        spent = steps * decoder.step_s(count, count * (prompt + now + steps / 2) - begun)
        time += spent
        tail += spent if not waiting and count < TAIL_ROWS * min(most, len(lengths)) else 0.0
        now += steps
        while running and running[0][0] == now:
            begun -= heapq.heappop(running)[1]
    return time, tail


def mixed(lengths: Sequence[int]) -> list[int]:
    """Return the lengths in an order that is not sorted and always the same: by fractions of the golden ratio."""
    return [lengths[i] for i in sorted(range(len(lengths)), key=lambda i: i * 0.6180339887 % 1)]
