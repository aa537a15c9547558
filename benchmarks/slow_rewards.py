"""Reward functions of `scoring.py`, which a process can import. The column `reward_s` has their seconds per group."""

import asyncio
import time

GROUP = 4


def seconds_of(reward_s: list[float]) -> float:
    """Return the seconds for these rows, which are a group or all groups of a rank."""
    return sum(reward_s[::GROUP])


def finish(completions: list[str], log_metric, since: float) -> list[float]:
    log_metric("reward_seconds", time.perf_counter() - since)
    return [float(len(set(text))) for text in completions]


def waits(completions, reward_s, log_metric, **_):
    """Wait, as for a judge or a sandbox."""
    since = time.perf_counter()
    time.sleep(seconds_of(reward_s))
    return finish(completions, log_metric, since)


async def awaits(completions, reward_s, log_metric, **_):
    """Wait on the trainer's event loop."""
    since = time.perf_counter()
    await asyncio.sleep(seconds_of(reward_s))
    return finish(completions, log_metric, since)


def computes(completions, reward_s, log_metric, **_):
    """Compute in pure Python, which holds the interpreter of its process."""
    since, total = time.perf_counter(), 0
    end = since + seconds_of(reward_s)
    while time.perf_counter() < end:
        total += sum(range(100))
    return finish(completions, log_metric, since)
