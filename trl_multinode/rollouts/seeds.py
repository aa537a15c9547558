"""Seeds of a round's rows: a function of the round, the turn and the global row, whatever the layout of the run."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import chain


class RowSeeds:
    """Seeds that depend on the row, not on the rank or engine that generates it.

    seed(row) = hash(seed, mode, round, turn) + global row. The turn counts the earlier requests of this row in the
    round. The seed is affine in the row, because vLLM samples completion i of a request with seed + i.

    Later `generate` calls recognize rows by their tokens: a tool loop generates again for the rows that still run, and
    passes nothing but token ids: a row's prompt, its completion and the tool's result. So a prompt that begins with
    all tokens of a row continues that row. If rows have equal tokens, they are taken in order. Any other prompt is a
    new request, and new requests go through the rows in order: a `rollout_func` may ask for its rows one by one, or
    for all of them twice.

    Args:
        seed (`int`, *optional*):
            Value of `rollout_seed`; with `None` the engines use their own random streams.
        rank (`int`):
            Rank of the caller. Its rows come after those of the lower ranks.

    Attributes:
        num_rows (`int`):
            Number of rows of each rank in the following rounds; with 0, the rows of the round's first call.
    """

    def __init__(self, seed: int | None, rank: int):
        self.num_rows = 0
        self._seed = seed
        self._rank = rank
        self._first_row = self._rank_rows = 0  # of one group: its place, and the rows of the rank
        self.begin_round("train", 0)

    def begin_round(self, mode: str, number: int) -> None:
        """Start the seeds of a new batch of prompts. Every rank calls it with the same arguments."""
        self._round = (mode, number)
        self._round_rows = self.num_rows
        self._tokens: dict[int, list[int]] = {}  # per row: its last prompt and completion
        self._turns = Counter[int]()  # requests per row
        self._num_new = 0
        self._asked: list[tuple[int, list[int]]] = []  # row and prompt, of the last call

    def of_group(
        self, mode: str, number: int, first_row: int, size: int, num_rows: int
    ) -> "RowSeeds":
        """Return the seeds of one group of that round, for calls with its rows only; the seeds of its rows are those
        that `of_call` returns in calls with all rows.

        Args:
            mode (`str`), number (`int`):
                Round of the group, as in `begin_round`.
            first_row (`int`), size (`int`):
                Place of the group's first row among the rows of this rank, and its rows.
            num_rows (`int`):
                Rows of this rank in the round.
        """
        found = RowSeeds(self._seed, self._rank)
        found.num_rows = size  # a `rollout_func` may generate fewer in its first call
        found.begin_round(mode, number)
        found._first_row, found._rank_rows = first_row, num_rows
        return found

    def of_call(self, prompts: Sequence[list[int]]) -> list[int] | None:
        """Return the seed of each row in this rank's next `generate` call, and count that call in its rows."""
        if self._seed is None:
            return None
        self._round_rows = self._round_rows or len(prompts)
        num_rows = self._rank_rows or self._round_rows
        rows: list[int] = []
        seeds = []
        for prompt in prompts:
            row = self._row_of(prompt, rows)
            rows.append(row)
            first = self._first(self._turns[row]) + self._rank * num_rows
            seeds.append(first + self._first_row + row)
            self._turns[row] += 1
        self._asked = list(zip(rows, prompts, strict=True))
        return seeds

    def add_completions(self, completions: Sequence[list[int]]) -> None:
        """Record the completions of the last `of_call`; later calls recognize their rows by them."""
        if self._seed is None:
            return
        for (row, prompt), completion in zip(self._asked, completions, strict=True):
            self._tokens[row] = [*prompt, *completion]

    def _row_of(self, prompt: list[int], asked: list[int]) -> int:
        """Return the row of a prompt; the rows in `asked` are those of the call's prompts before it."""
        after = asked[-1] + 1 if asked else 0
        for row in chain(range(after, self._round_rows), range(after)) if self._tokens else ():
            if row in self._tokens and begins_with(prompt, self._tokens[row]) and row not in asked:
                return row
        self._num_new += 1
        return (self._num_new - 1) % self._round_rows

    def _first(self, turn: int) -> int:
        """Return the seed of row 0 of rank 0."""
        text = f"{self._seed}/{self._round}/{turn}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "little")


def begins_with(tokens: list[int], start: list[int]) -> bool:
    """Return whether `tokens` begins with `start`. One token differs in most cases, so compare that one first."""
    end = len(start)
    may_begin = end <= len(tokens) and tokens[end - 1] == start[-1]
    return may_begin and list(tokens[:end]) == start
