"""The versions of a completion's tokens: how an engine records them, and which ones a rank accepts."""

from types import SimpleNamespace

import pytest

from trl_multinode.engine.client import EngineClient, wrong_spans
from trl_multinode.engine_process.backend import CompletionBuffer
from trl_multinode.errors import WeightVersionError
from trl_multinode.wire.messages import (
    Completion,
    Completions,
    VersionSpan,
    WeightVersion,
    pack_ids,
)

FIRST, SECOND, THIRD = WeightVersion(3, 30), WeightVersion(4, 40), WeightVersion(5, 50)
SENT = {3: 30, 4: 40, 5: 50}


def spans(*ends: tuple[int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(update, 10 * update, end) for update, end in ends)


@pytest.mark.parametrize(
    ("swaps", "num_tokens", "expected"),
    [
        pytest.param([], 4, [(3, 4)], id="no-swap"),
        pytest.param([(2, SECOND)], 4, [(3, 2), (4, 4)], id="one"),
        pytest.param([(1, SECOND), (3, THIRD)], 4, [(3, 1), (4, 3), (5, 4)], id="two"),
        pytest.param([(2, SECOND), (2, THIRD)], 4, [(3, 2), (5, 4)], id="no-token-between"),
        pytest.param([(0, SECOND)], 4, [(4, 4)], id="before-the-first-token"),
        pytest.param([(4, SECOND)], 4, [(3, 4)], id="after-the-last-token"),
        pytest.param([(5, SECOND)], 4, [(3, 4)], id="beyond-a-stop-string"),
        pytest.param([], 0, [(3, 0)], id="no-token"),
    ],
)
def test_a_swap_divides_a_row_where_it_was_frozen(swaps, num_tokens, expected):
    row = CompletionBuffer(range(num_tokens), [0.0] * num_tokens)
    for at, version in swaps:
        row.swap(at, version)
    assert row.spans(FIRST) == spans(*expected)


@pytest.mark.parametrize(
    ("found", "num_tokens", "wrong"),
    [
        ([(3, 4)], 4, None),
        ([(3, 2), (5, 4)], 4, None),
        ([(3, 0)], 0, None),
        ([], 4, "do not cover"),
        ([(3, 3)], 4, "do not cover"),
        ([(3, 5)], 4, "do not cover"),
        ([(3, 2), (4, 2), (5, 4)], 4, "ends do not rise"),
        ([(3, 3), (4, 1), (5, 4)], 4, "ends do not rise"),
        ([(3, 0), (4, 4)], 4, "ends do not rise"),
        ([(4, 2), (3, 4)], 4, "updates do not rise"),
        ([(4, 2), (4, 4)], 4, "updates do not rise"),
        ([(3, 2), (6, 4)], 4, "no update 6 with that step was sent; the last one is 5"),
    ],
)
def test_only_spans_that_cover_the_tokens_with_rising_sent_versions_are_accepted(
    found, num_tokens, wrong
):
    reason = wrong_spans(spans(*found), num_tokens, SENT)
    assert (reason is None) if wrong is None else wrong in reason
    # another step than the one sent
    assert "no update 3" in wrong_spans((VersionSpan(3, 31, 4),), 4, SENT)


def completions(*rows: tuple[VersionSpan, ...], lengths: list[int]) -> Completions:
    pairs = zip(rows, lengths, strict=True)
    return Completions(
        rows=tuple(
            Completion(pack_ids(range(length)), bytes(4 * length), versions)
            for versions, length in pairs
        )
    )


def client() -> EngineClient:
    client = EngineClient.__new__(EngineClient)
    client._sent, client.index, client.name, client._where = (
        SENT,
        1,
        "engine 1 of node 0",
        "Rank 2 (node 0)",
    )
    client._connection = SimpleNamespace(log_path="logs/engine1.log")
    return client


def test_a_rank_gets_every_rows_spans_and_refuses_wrong_ones():
    good = spans((3, 1), (4, 3)), spans((4, 2))
    first, second = client().rows(completions(*good, lengths=[3, 2]))
    assert (first.version, first.versions, second.version, second.versions) == (
        FIRST,
        good[0],
        SECOND,
        good[1],
    )
    with pytest.raises(
        WeightVersionError, match=r"Rank 2 \(node 0\): engine 1 of node 0 .* 3 tokens "
    ):
        client().rows(completions(spans((3, 2)), lengths=[3]))
