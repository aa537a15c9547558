"""Rows of a rank's batch in the forms that TRL and the engines use: log-probs without nested lists, seeds, images."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..wire.messages import Image


class FloatRow(Sequence):
    """Log-probs of one completion: a float32 array that behaves like `list[list[float | None]]` of shape `(T, 1)`.

    Real nested lists cost 0.48 s per million tokens. NaN reads as `None`, as in TRL.
    """

    def __init__(self, values: np.ndarray):
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int | slice) -> Sequence:
        if isinstance(index, slice):
            return FloatRow(self.values[index])
        return [_none_if_nan(float(self.values[index]))]

    def __iter__(self) -> Iterator:
        return ([_none_if_nan(value)] for value in self.values.tolist())

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented


def _none_if_nan(value: float) -> float | None:
    return None if value != value else value


class TokenRow(FloatRow):
    """Token ids of one completion: an int32 array that behaves like `list[list[int]]` of shape `(T, 1)`."""

    def __getitem__(self, index: int | slice) -> Sequence:
        return TokenRow(self.values[index]) if isinstance(index, slice) else [int(self.values[index])]


class RowSeeds:
    """Seeds that depend on the row, not on the rank or engine that generates it.

    seed(row) = hash(seed, mode, round, call of this rank in the round) + global row. The seed is affine in the row,
    because vLLM samples completion i of a request with seed + i.

    Args:
        seed (`int`, *optional*):
            Value of `rollout_seed`; with `None` the engines use their own random streams.
        rank (`int`):
            Rank of the caller. Its rows come after those of the lower ranks.
    """

    def __init__(self, seed: int | None, rank: int):
        self._seed = seed
        self._rank = rank
        self.begin_round("train", 0)

    def begin_round(self, mode: str, number: int) -> None:
        """Start the seeds of a new batch of prompts. Every rank calls it with the same arguments."""
        self._round = (mode, number)
        self._call = 0
        self._rows_per_rank: int | None = None

    def of_call(self, num_rows: int) -> int | None:
        """Return the seed of this rank's first row in the next `generate` call, and count that call."""
        if self._rows_per_rank is None:
            self._rows_per_rank = num_rows  # a tool loop's later calls have fewer rows; seeds of two ranks must differ
        call, self._call = self._call, self._call + 1
        return self._first(self._round, call, self._rows_per_rank)

    def of_round(self, mode: str, number: int, num_rows: int) -> int | None:
        """Return the seed that `of_call` returns in the first call of that round."""
        return self._first((mode, number), 0, num_rows)

    def _first(self, round_: tuple[str, int], call: int, rows_per_rank: int) -> int | None:
        if self._seed is None:
            return None
        digest = hashlib.blake2b(f"{self._seed}/{round_}/{call}".encode(), digest_size=5).digest()
        return int.from_bytes(digest, "little") + self._rank * rows_per_rank


def raw_image(image: Any) -> Image:
    """Convert a PIL image to raw bytes. A palette image becomes RGB or RGBA: its bytes alone would lose the colors."""
    if image.mode in ("P", "PA"):
        image = image.convert("RGBA" if "transparency" in image.info or image.mode == "PA" else "RGB")
    return Image(data=image.tobytes(), mode=image.mode, size=image.size)
