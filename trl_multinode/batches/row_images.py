"""Images of the rows of balanced micro-batches: cut from TRL's batches, and joined again.

Some rows of a step may have images and others none, and the parts of a row's images have any size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from trl.trainer.utils import split_pixel_values_by_grid

TYPE_IDS = ("token_type_ids", "mm_token_type_ids")  # a value per token of prompt and completion
COUNTS = ("num_images", "num_tiles")  # lists with a number per row
# All fields that TRL's batches have only with images
FIELDS = (
    *TYPE_IDS, *COUNTS, "pixel_values", "pixel_attention_mask", "image_grid_thw", "image_position_ids",
    "spatial_shapes", "image_sizes",
)  # fmt: skip


def images_in(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of images that a batch has."""
    return {name: inputs[name] for name in FIELDS if inputs.get(name) is not None}


def cut_images(inputs: Mapping[str, Any], is_token: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Cut the images of one of TRL's batches into rows. Each part keeps the dimension along which rows are joined.

    Args:
        inputs (`Mapping[str, Any]`):
            Batch that TRL's `_prepare_inputs` returns.
        is_token (`torch.Tensor` of shape `(rows, prompt + completion)`):
            Boolean mask of the tokens.
    """
    fields, rows = images_in(inputs), []
    # With a mask alone, as of Idefics, TRL pads each row to the most images of any row. Its split would take such a
    # batch for one without padding if it has as many images as rows
    if "pixel_attention_mask" not in fields or "spatial_shapes" in fields:
        fields = split_pixel_values_by_grid(fields)
    for index, of_row in enumerate(is_token):
        row = {}
        for name, values in fields.items():
            part = values[index]
            if name in COUNTS:
                part = inputs["prompt_ids"].new_tensor(part)
            elif name in TYPE_IDS:
                part = part[of_row]
            elif isinstance(values, torch.Tensor):
                # an image has several tiles, and padding is empty
                tiles = inputs["pixel_attention_mask"][index].flatten(1).any(1).sum()
                part = part[None, :tiles]
            row[name] = part
        rows.append(row)
    return rows


def join_images(
    rows: Sequence[Mapping[str, torch.Tensor]], is_token: torch.Tensor
) -> dict[str, Any]:
    """Return the fields of images of a batch of rows: the inverse of [`cut_images`]."""
    batch: dict[str, Any] = {}
    for name in FIELDS:
        parts = [row[name] for row in rows if name in row]
        if name in COUNTS and parts:
            batch[name] = [int(row.get(name, 0)) for row in rows]
        elif name in TYPE_IDS and parts:
            ids = torch.zeros_like(is_token, dtype=parts[0].dtype)
            for index, row in enumerate(rows):
                ids[index, is_token[index]] = row.get(name, 0)
            batch[name] = ids
        # without any image, the model must not run its vision tower
        elif any(part.numel() for part in parts):
            batch[name] = _cat_padded(parts)
    return batch


def _cat_padded(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate parts along their first dimension, padded with zeros to the largest size in the others."""
    largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing: list[int] = []
        for size, most in zip(part.shape[1:], largest, strict=True):
            missing = [0, most - size, *missing]  # the last dimension first
        padded.append(pad(part, missing))
    return torch.cat(padded)
