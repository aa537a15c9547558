"""Calls of a session as rows: a call continues the row whose tokens its prompt begins with, or begins a row.

An agent sends its conversation as text, so every call has its whole prompt again. If the prompt begins with exactly
the tokens of a row, prompt and completions, then what follows is what the agent has added (a tool's answer, for
example), and the row goes on with it. Otherwise the conversation has forked. Each sampled token is in exactly one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.client import Rollout
from ..rollouts.seeds import begins_with


@dataclass
class SessionCall:
    """One call: the token ids of its prompt, and what was sampled."""

    prompt: list[int]
    rollout: Rollout


class SessionRow:
    """Consecutive calls of a session as one sequence.

    Args:
        prompt (`list[int]`):
            Token ids of the first call's prompt.

    Attributes:
        ids (`list[int]`):
            Token ids of the whole row.
        logprobs (`list[float]`), sampled (`list[int]`):
            Values of the tokens after the prompt: log-probs of the engines (0 for tokens of the agent), 1 if sampled.
    """

    def __init__(self, prompt: list[int]):
        self.num_prompt = len(prompt)
        self.ids = [*prompt]
        self.logprobs: list[float] = []
        self.sampled: list[int] = []

    def add(self, given: list[int], made: Rollout) -> None:
        """Append tokens of the agent, and what was sampled after them."""
        self.ids += [*given, *made.tokens.tolist()]
        self.logprobs += [*[0.0] * len(given), *made.logprobs.tolist()]
        self.sampled += [*[0] * len(given), *[1] * len(made.tokens)]


def rows_of(calls: Sequence[SessionCall]) -> list[SessionRow]:
    """Return the rows of a session's calls. A call continues the longest row that its prompt begins with."""
    rows: list[SessionRow] = []
    for call in calls:
        begun = [row for row in rows if begins_with(call.prompt, row.ids)]
        row = max(begun, key=lambda one: len(one.ids), default=None)
        if row is None:
            row = SessionRow(call.prompt)
            rows.append(row)
        row.add(call.prompt[len(row.ids) :], call.rollout)
    return rows


NAMES = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "session_part")


def as_output(sessions: Sequence[Sequence[SessionRow]], end_id: int) -> dict[str, list]:
    """
    Return the rows of sessions as the result of a `rollout_func`, in which each session is one row.

    Its completion is everything after the first row's prompt: completion of row 0, prompt and completion of row 1, and
    so on. `batches/session_rows.py` cuts it again.

    Args:
        sessions (`Sequence[Sequence[SessionRow]]`):
            Rows of each session; one without rows becomes two tokens that are not trained.
        end_id (`int`):
            Token of such a session.
    """
    output: dict[str, list] = {name: [] for name in NAMES}
    for rows in sessions:
        tokens: list[int] = []
        logprobs: list[float] = []
        sampled: list[int] = []
        parts: list[int] = []
        for number, row in enumerate(rows):
            # the prompt of the first row is that of the session
            given = row.num_prompt if number else 0
            made = row.ids[row.num_prompt - given :]
            tokens += made
            logprobs += [*[0.0] * given, *row.logprobs]
            sampled += [*[0] * given, *row.sampled]
            parts += [*[2 * number - 1] * given, *[2 * number] * len(row.sampled)]
        prompt = rows[0].ids[: rows[0].num_prompt] if rows else [end_id]
        values = (
            (prompt, tokens, logprobs, sampled, parts)
            if rows
            else (prompt, [end_id], [0.0], [0], [0])
        )
        for name, value in zip(NAMES, values, strict=True):
            output[name].append(value)
    return output
