"""Log-probs and token ids come back as rows that TRL reads like nested lists."""

import numpy as np
import pytest
from PIL import Image

from trl_multinode.rollouts.rows import ArrayRow, raw_image


@pytest.fixture
def row() -> ArrayRow:
    return ArrayRow(np.array([-0.5, np.nan, -0.25], dtype=np.float32))


def test_a_row_reads_like_a_list_of_lists_and_nan_as_none(row):
    as_list = [[-0.5], [None], [-0.25]]
    assert row == as_list and as_list == row and list(row) == as_list and len(row) == 3 and row
    assert row[0] == [-0.5] and row[1] == [None] and row[-1] == [-0.25]
    assert [-0.25] in row and row.index([None]) == 1 and list(reversed(row)) == as_list[::-1]
    assert row != as_list[:2] and row != 3 and not ArrayRow(np.array([], dtype=np.float32))
    assert all(type(lp[0]) is float for lp in row[::2])  # as TRL's own loop gets them
    with pytest.raises(IndexError):
        row[3]
    assert isinstance(row[1:], ArrayRow) and row[1:] == as_list[1:] and row[::-1][0] == [-0.25]
    assert row[1:].values.base is row.values  # a slice is no copy


def test_token_rows_hold_integers():
    tokens = ArrayRow(np.array([5, 6, 7], dtype=np.int32))
    assert (
        tokens == [[5], [6], [7]] and tokens[1:] == [[6], [7]] and isinstance(tokens[1:], ArrayRow)
    )
    assert all(type(value) is int for row in (tokens, [tokens[0]], tokens[:2]) for (value,) in row)


@pytest.mark.nightly  # e2e/test_sampling has images
@pytest.mark.parametrize("mode", ["RGB", "P", "PA", "L", "RGBA", "1"])
def test_a_picture_has_the_same_colours_at_the_other_end(mode):
    """A palette does not travel with the bytes."""
    picture = (
        Image.new("RGB", (3, 2), (200, 30, 30)).convert("P" if mode == "PA" else mode).convert(mode)
    )
    raw = raw_image(picture)
    there = Image.frombytes(raw.mode, raw.size, raw.data)
    assert list(there.convert("RGB").getdata()) == list(picture.convert("RGB").getdata())
