"""Reward functions for tests, in a module that another process can import."""

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path


def letters(completions, log_extra=None, log_metric=None, **_):
    """Rewards by the completion alone; nothing for an empty one."""
    rewards = [float(len(set(text))) if text else None for text in completions]
    if log_extra is not None:
        log_extra("longest_word", [max(text.split() or [""], key=len) for text in completions])
        log_extra("parts", [text.split() for text in completions])
    if log_metric is not None:
        log_metric("letters/mean", sum(reward or 0.0 for reward in rewards) / len(rewards))
    return rewards


def by_step(answer, completion_ids, trainer_state, **_):
    return [
        value * trainer_state.global_step + len(ids)
        for value, ids in zip(answer, completion_ids, strict=True)
    ]


def by_factor(completions, factor, **_):
    return [factor * len(text) for text in completions]


def slow_letters(completions, **_):
    found = []
    for text in completions:
        time.sleep(0.5)
        found.append(float(len(set(text))) if text else None)
    return found


async def judged(prompts, completions, answer, log_extra, **_):
    await asyncio.sleep(0.001)
    log_extra("verdict", [prompt + text for prompt, text in zip(prompts, completions, strict=True)])
    return [
        None if len(text) % 3 == 0 else value
        for text, value in zip(completions, answer, strict=True)
    ]


def no_log(completion_ids, **_):
    return [float(ids[0] % 7) for ids in completion_ids]


def ranked(completions, **_):
    """Rewards by all rows of the rank: the place of a completion among them."""
    return [float(sorted(completions).index(text)) for text in completions]


def same_place(environments, **_):
    return [environment["start"] for environment in environments]


def diary(completions, log_extra, **_):
    """Logs what msgpack does not know."""
    log_extra("path", [Path(text) for text in completions])
    return [1.0] * len(completions)


def in_main_thread(completions, **_):
    """Stops itself by a signal, as TRL's `accuracy_reward` limits its time: only a main thread can."""
    if threading.current_thread() is not threading.main_thread():
        return [0.0] * len(completions)
    stopped = []
    before = signal.signal(signal.SIGALRM, lambda *_: stopped.append(1.0))
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    while not stopped:
        time.sleep(0.001)
    signal.signal(signal.SIGALRM, before)
    return stopped * len(completions)


def surroundings(completions, **_):
    """A reward for everything that a process has, and has not."""
    print("a line on standard output")
    print("a line on standard error", file=sys.stderr)
    told = [
        os.environ.get(name)
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    ]
    as_expected = (
        told == [None] * 4
        and os.environ["CUDA_VISIBLE_DEVICES"] == ""
        and os.environ["A_JUDGES_KEY"] == "k"
    )
    return [float(as_expected and sys.stdin.read() == "")] * len(completions)


def raises(completions, **_):
    for text in completions:
        if text == "bad":
            raise ValueError("cannot parse it")
    return [1.0] * len(completions)


async def raises_later(completions, **_):
    await asyncio.sleep(0)
    return raises(completions)


def too_few(completions, **_):
    return [1.0] * (len(completions) - 1)


def no_rewards(completions, **_):
    return [{"reward": 1.0}] * len(completions)


REACHED = threading.Event()  # a function hangs in a thread
RELEASED = threading.Event()  # it goes on


def hangs(completions, **_):
    for text in completions:
        while text == "bad" and not RELEASED.is_set():
            REACHED.set()
            time.sleep(0.01)
    return [1.0] * len(completions)


async def hangs_later(completions, **_):
    for text in completions:
        while text == "bad" and not RELEASED.is_set():
            REACHED.set()
            await asyncio.sleep(0.01)
    return [1.0] * len(completions)


def touches(completions, **_):
    """Says by a file that it runs, and then does not return."""
    Path(completions[0]).touch()
    time.sleep(600)


def dies(completions, **_):
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(completions, **_):
    os._exit(7)
