"""Rows without padding, and the two padded layouts: TRL's (prompt | completion), and the model's (rows from column 0).

TRL pads prompts left and completions right, each to its longest, so a batch is as wide as the longest prompt plus the
longest completion. The model gets rows that all begin in column 0, so its batch is as wide as the longest row.
Attention with relative positions gives the same result in both layouts.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from .row_images import FIELDS, cut_images, join_images

# prompt_ids (prompt,), per-token fields (completion,), images of any shape, others () or (1,)
Row = dict[str, torch.Tensor]

# Fields with one value per completion token, and TRL's padding value. The importance sampling ratio is among them only
# in token modes; its padding is 1, because VESPO also sums its logarithm over the padding.
PER_TOKEN = {
    "completion_ids": 0,
    "tool_mask": 1,
    "old_per_token_logps": 0,
    "ref_per_token_logps": 0,
    "sampling_per_token_logps": 0,
    "present_logps": 0,  # of `rollouts/loss_scores.py`
    "importance_sampling_ratio": 1,
    "session_part": 0,  # of `session_rows.py`
}
MASKS = ("prompt_mask", "completion_mask")  # rows omit them, because the lengths determine them


def lengths(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Count the tokens of prompt and completion, shape `(rows, 2)`. A completion masked as truncated counts 0."""
    return torch.stack([inputs[name].sum(1) for name in MASKS], dim=1)


def tokens_of(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the boolean mask of the tokens of a batch, shape `(rows, prompt + completion)`."""
    return torch.cat([inputs[name] for name in MASKS], dim=1).bool()


def cut_rows(inputs: Mapping[str, torch.Tensor], per_token: frozenset[str]) -> list[Row]:
    """Cut one of TRL's batches into rows, which are views. Scalars and masks are left out.

    Args:
        inputs (`Mapping[str, torch.Tensor]`):
            Batch that TRL's `_prepare_inputs` returns.
        per_token (`frozenset[str]`):
            Fields of shape `(rows, completion)`; all others have one value per row.

    Raises:
        `ValueError`: if a field has neither shape.
    """
    sizes = lengths(inputs).tolist()
    width = inputs["prompt_ids"].shape[1]
    rows: list[Row] = []
    for ids, (prompt, _) in zip(inputs["prompt_ids"], sizes, strict=True):
        rows.append({"prompt_ids": ids[width - prompt :]})
    for name, values in inputs.items():
        if name in ("prompt_ids", *MASKS, *FIELDS) or values is None or values.ndim == 0:
            continue
        if name not in per_token and values[0].numel() != 1:
            raise ValueError(
                f"`micro_batch_tokens` cannot cut the field {name!r} of shape {tuple(values.shape)} into rows: "
                f"expected one value per row, or one of {sorted(per_token)}. Unset `micro_batch_tokens`."
            )
        for row, value, (_, completion) in zip(rows, values, sizes, strict=True):
            row[name] = value[:completion] if name in per_token else value
    images = cut_images(inputs, tokens_of(inputs))
    return [row | of_row for row, of_row in zip(rows, images, strict=True)]


def join_rows(
    rows: Sequence[Row], per_token: frozenset[str], pad_token_id: int
) -> dict[str, torch.Tensor]:
    """Join rows into a batch in TRL's layout, only as wide as these rows need: the inverse of [`cut_rows`].

    The batch has at least two completion columns: TRL's slice `[:, -0:]` would select all columns, and its metrics
    take values in a single column for those of sequences.

    Raises:
        `ValueError`: if the rows have different fields.
    """
    different = {name for row in rows for name in row.keys() ^ rows[0].keys()}.difference(FIELDS)
    if different:
        raise ValueError(
            f"Rows of a micro-batch differ in {sorted(different)}. Unset `micro_batch_tokens`."
        )
    prompts = [row["prompt_ids"] for row in rows]
    masks = list(map(torch.ones_like, prompts))
    batch = {
        "prompt_ids": pad_sequence(prompts, True, pad_token_id, padding_side="left"),
        "prompt_mask": pad_sequence(masks, True, 0, padding_side="left"),
    }
    for name in rows[0]:
        if name in ("prompt_ids", *FIELDS):
            continue
        values = [row[name] for row in rows]
        if name in per_token:
            fill = pad_token_id if name == "completion_ids" else PER_TOKEN.get(name, 0)
            batch[name] = _two_columns(values, fill)
        else:
            batch[name] = torch.stack(values)
    batch["completion_mask"] = _two_columns(
        [torch.ones_like(row["completion_ids"]) for row in rows], 0
    )
    return batch | join_images(rows, tokens_of(batch))


def _two_columns(values: list[torch.Tensor], fill: float) -> torch.Tensor:
    """Pad values on the right, to two columns at least."""
    padded = pad_sequence(values, True, fill)
    missing = max(0, 2 - padded.shape[1])
    return nn.functional.pad(padded, (0, missing), value=fill)


def num_words(row: Row) -> int:
    """Return the length of a row's record."""
    return 1 + len(_described(row)) // 4 + sum(value.numel() for value in row.values())


def _described(row: Row) -> str:
    """Return JSON with type and shape of each field. Spaces at its end make it whole words of 4 bytes."""
    fields = {name: [str(value.dtype)[6:], *value.shape] for name, value in row.items()}
    text = json.dumps(fields)
    return text + " " * (-len(text) % 4)


def row_to_record(row: Row) -> torch.Tensor:
    """Pack a row into one int32 vector: length of its description in words, description, values in order."""
    text = torch.frombuffer(bytearray(_described(row).encode()), dtype=torch.int32)
    parts = [text.new_tensor([len(text)]), text, *row.values()]
    device = row["prompt_ids"].device
    return torch.cat([to_words(part).to(device) for part in parts])


def record_to_row(record: torch.Tensor) -> Row:
    """Unpack a row: the inverse of [`row_to_record`]."""
    start = 1 + int(record[0])
    row = {}
    for name, (dtype, *shape) in json.loads(record[1:start].cpu().numpy().tobytes()).items():
        end = start + prod(shape)
        part = record[start:end]
        kind = getattr(torch, dtype)
        if kind.is_floating_point:
            part = part.view(torch.float32)
        row[name] = part.to(kind).reshape(shape)
        start = end
    return row


def to_words(values: torch.Tensor) -> torch.Tensor:
    """Return values as an int32 vector; floats keep their float32 bits."""
    flat = values.reshape(-1)
    return flat.float().view(torch.int32) if flat.is_floating_point() else flat.to(torch.int32)


class Compact:
    """Layout of one of TRL's batches for the model, with every row from column 0; `restore` moves its outputs back.

    Args:
        attention_mask (`torch.Tensor` of shape `(rows, prompt + completion)`):
            Mask of the batch, with contiguous ones in every row.
        logits_to_keep (`int`):
            Number of completion columns.
        multiple (`int`):
            Divisor of the width, which is rounded up to fit (`pad_to_multiple_of`).
    """

    def __init__(self, attention_mask: torch.Tensor, logits_to_keep: int, multiple: int):
        self._prompts = attention_mask[:, :-logits_to_keep].sum(1)
        ends = attention_mask.sum(1)
        longest = max(int(ends.max()), 2)
        width = -(-longest // multiple) * multiple
        columns = torch.arange(width, device=attention_mask.device)
        starts = attention_mask.argmax(1)
        source = columns + starts[:, None]
        self._source = source.clamp(max=attention_mask.shape[1] - 1)
        self.attention_mask = (columns < ends[:, None]).to(attention_mask.dtype)
        shortest_prompt = max(1, int(self._prompts.min()))
        self.logits_to_keep = max(1, width - shortest_prompt)
        self._first = width - self.logits_to_keep  # column of the first kept logit
        self._columns = torch.arange(logits_to_keep, device=attention_mask.device)
        self._real = self._columns < (ends - self._prompts)[:, None]

    def ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Move token ids to column 0, shape `(rows, width)`. `attention_mask` hides the columns after a row's end."""
        return input_ids.gather(1, self._source)

    def call(self, model: Callable[..., Any], *, labels: torch.Tensor, **inputs: Any) -> Any:
        """Call a model with the labels of completion tokens only, shape `(rows, width)`.

        TRL masks the columns before the first kept logit, that is up to the end of the shortest prompt. On GPUs its
        head computes the vocabulary for each label that is left.
        """
        columns = torch.arange(labels.shape[1], device=labels.device)
        labels = labels.masked_fill(columns < self._prompts[:, None], -100)
        return model(**inputs, labels=labels)

    def restore(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """Move values from `(rows, self.logits_to_keep)` to `(rows, completion)`; zero after the end, as in TRL."""
        if values is None:
            return None
        first = self._prompts - self._first
        index = first[:, None] + self._columns
        index = index.clamp(0, values.shape[1] - 1)
        return values.gather(1, index).masked_fill(~self._real, 0.0)
