"""The `rollout_func` of a trainer with a harness: a session for each row, whose calls become the row."""

from collections import Counter
from typing import Any

from ..engine.client import Rollout
from ..rollouts.recorded import Turn
from .chaining import as_output, rows_of
from .harness import Harness
from .running import Finished, Sessions

# what a trainer takes out of the result before reward functions see it
TEXTS, COUNTS = "harness_text", "harness_counts"
LOGGED = (
    "calls",
    "rows",
    "continued",
    "forked",
    "replaced",
    "refused",
    "cancelled",
    "failed",
    "timed_out",
    "again",
)


class HarnessRollout:
    """
    Function that TRL calls for the completions of a group or, in an evaluation, of a batch.

    Args:
        harness ([`Harness`]):
            Agent and limits.
        returns_text (`bool`):
            `True` if the harness returns texts for reward functions, `False` if it returns rewards.

    Attributes:
        sessions ([`Sessions`]):
            Sessions of the rank; the trainer sets it when it has engines.
    """

    sessions: Sessions

    def __init__(self, harness: Harness, returns_text: bool):
        self.harness = harness
        self.returns_text = returns_text
        self.__name__ = harness.name  # by which ranks compare it, and errors name it

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        generation, rows = trainer.vllm_generation, trainer.session_inputs
        seeds = generation.begin_sessions(len(rows))
        finished = self.sessions.run(rows, seeds, generation.look)
        generation.end_sessions(turn_of(finished))
        chained = [rows_of(one.calls) for one in finished]
        values = [one.value for one in finished]
        counts = [
            one.counts
            + Counter(
                rows=len(of_session),
                continued=len(one.calls) - len(of_session),
                forked=max(0, len(of_session) - 1),
            )
            for one, of_session in zip(finished, chained, strict=True)
        ]
        return as_output(chained, trainer._tokenizer.eos_token_id) | {
            TEXTS if self.returns_text else "harness_reward": values,
            COUNTS: counts,
        }


def left_out(counts: list[Counter[str]]) -> list[bool]:
    """Return which sessions are left out of training, from their counts."""
    return [one["failed"] > 0 for one in counts]


def turn_of(finished: list[Finished]) -> Turn:
    """Return all calls of some sessions, as the versions and ages of their tokens are read."""
    calls = [call for one in finished for call in one.calls]
    rollouts: list[Rollout] = [call.rollout for call in calls]
    return Turn([call.prompt for call in calls], rollouts)
