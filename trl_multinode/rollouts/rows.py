"""Rows of a rank's batch as TRL and the engines see them: log-probs without nested lists, seeds, raw images."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from ..engine.protocol import Image


class FloatRow(Sequence):
    """Log-probs of one completion: behaves like `list[list[float | None]]` of shape `(T, 1)` over a float32 array.

    Real nested lists cost 0.48 s per million tokens. NaN reads as `None`, as in TRL.
    """

    def __init__(self, values: np.ndarray):
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index):
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
    """Token ids of one completion, shape `(T, 1)`, in the same manner."""

    def __getitem__(self, index):
        return TokenRow(self.values[index]) if isinstance(index, slice) else [int(self.values[index])]


class RowSeeds:
    """Seeds that depend on the row, not on where it is generated.

    seed(row) = hash(seed, mode, round, call of this rank in the round) + global row: affine in the row, because vLLM
    gives completion i of a request seed + i.

    Args:
        seed (`int`, *optional*):
            `rollout_seed`; `None` leaves the engines to their own random streams.
        rank (`int`):
            Its rows come after those of the lower ranks.
    """

    def __init__(self, seed: int | None, rank: int):
        self._seed = seed
        self._rank = rank
        self.begin_round("train", 0)

    def begin_round(self, mode: str, number: int) -> None:
        """A new batch of prompts; every rank calls it with the same arguments."""
        self._round = (mode, number)
        self._call = 0
        self._rows_per_rank: int | None = None

    def of_call(self, num_rows: int) -> int | None:
        """Seed of this rank's first row in the next `generate` call."""
        if self._rows_per_rank is None:
            self._rows_per_rank = num_rows  # later calls of a tool loop have fewer rows; keep the ranks apart
        call, self._call = self._call, self._call + 1
        return self._first(self._round, call, self._rows_per_rank)

    def of_round(self, mode: str, number: int, num_rows: int) -> int | None:
        """What `of_call` will say in the first call of that round."""
        return self._first((mode, number), 0, num_rows)

    def _first(self, round_: tuple[str, int], call: int, rows_per_rank: int) -> int | None:
        if self._seed is None:
            return None
        digest = hashlib.blake2b(f"{self._seed}/{round_}/{call}".encode(), digest_size=5).digest()
        return int.from_bytes(digest, "little") + self._rank * rows_per_rank


def raw_image(picture) -> Image:
    """A PIL image as the protocol carries it: its bytes, which without their palette would be another picture."""
    if picture.mode in ("P", "PA"):
        picture = picture.convert("RGBA" if "transparency" in picture.info or picture.mode == "PA" else "RGB")
    return Image(data=picture.tobytes(), mode=picture.mode, size=picture.size)
