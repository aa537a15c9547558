"""Calls of a session become rows: continued, forked, interleaved; each sampled token is in exactly one row."""

import random

import numpy as np

from trl_multinode.engine.client import Rollout
from trl_multinode.sessions.chaining import SessionCall, as_output, rows_of
from trl_multinode.wire.messages import WeightVersion


def call(prompt: list[int], *made: int) -> SessionCall:
    logprobs = -np.asarray(made, np.float32) / 8
    return SessionCall(
        prompt, Rollout(np.asarray(made, np.int32), logprobs, WeightVersion(1, 0), 0)
    )


def parts_of(output: dict, session: int = 0) -> list[tuple[list[int], list[int], list[int]]]:
    """Cut a session of an output into prompts, completions and masks again, by the definition of its parts."""
    prompt, parts = output["prompt_ids"][session], output["session_part"][session]
    tokens, mask = output["completion_ids"][session], output["env_mask"][session]
    found = []
    for number in range(max(parts) // 2 + 1):
        given = [token for token, part in zip(tokens, parts, strict=True) if part == 2 * number - 1]
        own = [place for place, part in enumerate(parts) if part == 2 * number]
        found.append(
            (given if number else prompt, [tokens[one] for one in own], [mask[one] for one in own])
        )
    return found


def test_a_prompt_that_begins_with_the_row_continues_it() -> None:
    rows = rows_of([call([1, 2], 3, 4), call([1, 2, 3, 4, 5], 6)])
    assert [row.ids for row in rows] == [[1, 2, 3, 4, 5, 6]]
    assert rows[0].sampled == [1, 1, 0, 1]
    assert rows[0].logprobs == [-3 / 8, -4 / 8, 0.0, -6 / 8]


def test_a_prompt_that_differs_in_one_token_forks() -> None:
    rows = rows_of([call([1, 2], 3, 4), call([1, 2, 3, 9, 5], 6)])
    assert [row.ids for row in rows] == [[1, 2, 3, 4], [1, 2, 3, 9, 5, 6]]


def test_a_second_branch_from_an_earlier_turn_forks() -> None:
    first = call([1], 2)
    rows = rows_of([first, call([1, 2, 3], 4), call([1, 2, 5], 6)])
    assert [row.ids for row in rows] == [[1, 2, 3, 4], [1, 2, 5, 6]]
    assert rows[1].sampled == [1]  # the 2 is trained in the first row only


def test_branches_that_interleave_continue_their_own_rows() -> None:
    calls = [call([1], 2), call([7], 8), call([1, 2, 3], 4), call([7, 8, 9], 1)]
    assert [row.ids for row in rows_of(calls)] == [[1, 2, 3, 4], [7, 8, 9, 1]]


def test_the_longest_of_several_beginnings_is_continued() -> None:
    calls = [call([1], 2), call([1], 2, 3), call([1, 2, 3, 4], 5)]
    assert [row.ids for row in rows_of(calls)] == [[1, 2], [1, 2, 3, 4, 5]]


def test_a_prompt_that_is_the_row_itself_continues_it() -> None:
    rows = rows_of([call([1], 2), call([1, 2], 3)])
    assert [row.ids for row in rows] == [[1, 2, 3]]


def test_each_sampled_token_is_in_exactly_one_row_of_any_session() -> None:
    draw = random.Random(0)
    for _ in range(200):
        calls: list[SessionCall] = []
        for number in range(draw.randrange(12)):
            before = draw.choice(
                [[], *[[*one.prompt, *one.rollout.tokens.tolist()] for one in calls]]
            )
            prompt = [*before, *(draw.randrange(3) for _ in range(draw.randrange(1, 3)))]
            calls.append(call(prompt, *[100 + number] * draw.randrange(1, 4)))
        rows = rows_of(calls)
        sampled = [
            token
            for row in rows
            for token, mark in zip(row.ids[row.num_prompt :], row.sampled, strict=True)
            if mark
        ]
        expected = [token for one in calls for token in one.rollout.tokens.tolist()]
        assert sorted(sampled) == sorted(expected)
        # every row is exactly what an engine has seen and made
        seen = [[*one.prompt, *one.rollout.tokens.tolist()] for one in calls]
        assert all(row.ids in seen for row in rows)


def test_an_output_has_all_rows_of_a_session_as_one() -> None:
    rows = rows_of([call([1, 2], 3), call([5], 6, 7), call([5, 6, 7, 8], 9)])
    output = as_output([rows, []], end_id=99)
    assert parts_of(output) == [([1, 2], [3], [1]), ([5], [6, 7, 8, 9], [1, 1, 0, 1])]
    assert parts_of(output, 1) == [([99], [99], [0])]
    lengths = {
        len(output[name][0]) for name in ("completion_ids", "logprobs", "env_mask", "session_part")
    }
    assert len(lengths) == 1
