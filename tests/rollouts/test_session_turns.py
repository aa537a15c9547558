"""First completions of sessions: with them, rounds ahead know which weights took part in which row."""

import numpy as np

from trl_multinode.engine.client import Rollout
from trl_multinode.rollouts.recorded import Recorded, Turn
from trl_multinode.wire.messages import WeightVersion


def group(calls: list[Turn], parts: list[list[int]]) -> Recorded:
    """Group of sessions, with the tokens 0, 1, ... behind the prompt of each."""
    ids = [list(range(len(of_row))) for of_row in parts]
    output = {"prompt_ids": [[7]] * len(parts), "completion_ids": ids, "session_part": parts}
    return Recorded([{} for _ in parts], [], [], ids, calls, output=output)


def call(update: int) -> Turn:
    return Turn([[7]], [Rollout(np.arange(2), np.zeros(2), WeightVersion(update), 0)])


def test_the_first_completion_of_a_session_ends_where_it_forks():
    turn = group([call(3), call(2)], [[0, 0, 1, 2, 2]]).first_turn
    assert turn.prompts == [[7]]
    assert [row.tokens.tolist() for row in turn.rows] == [[0, 1]]
    assert turn.rows[0].version.update == 2  # the oldest of the group


def test_a_group_without_calls_has_its_rows_in_the_round_but_no_token():
    turn = group([Turn([], [])], [[0], [0]]).first_turn
    assert turn.prompts == [[7], [7]]
    assert [len(row.tokens) for row in turn.rows] == [0, 0]
    assert turn.rows[0].version > WeightVersion(10**9)  # no weights took part
