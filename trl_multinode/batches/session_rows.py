"""Sessions of agents: TRL has one row for each, which is cut into the rows that the model reads.

An agent sends a conversation anew with every call. A call that continues the row before it makes that row longer; any
other one begins a new row. TRL's completion of a session is the completion of its first row, and then prompt and
completion of each further row, so that TRL computes one reward, one advantage and one length per session.
"""

from bisect import bisect_left
from typing import Any

import torch

from ..errors import ConfigurationError
from .layouts import Row

# Field with the part of its session that a completion token belongs to, shape `(rows, completion)`: 2 k for the
# completion of row k, counted from 0, and 2 k - 1 for its prompt, if that is not the session's
PART = "session_part"
# Losses that are a mean over the tokens of a row, and those that are a sum over tokens
MEANS = ("grpo", "sapo")
SUMS = ("dapo", "cispo", "dr_grpo", "luspo")


def parts_of(sessions: list[list[int]], completion_ids: torch.Tensor) -> torch.Tensor:
    """Return the field `PART` of a batch of TRL's, shape `(rows, completion)`, from the parts of each row's tokens."""
    parts = torch.zeros_like(completion_ids, dtype=torch.int32)
    for row, session in zip(parts, sessions, strict=True):
        row[: len(session)] = row.new_tensor(session)
    return parts


def cut_session(session: Row, per_token: frozenset[str], has_share: bool) -> list[Row]:
    """Cut a session into its rows, which are views.

    Args:
        session ([`Row`]):
            Row of `cut_rows`, with the field `PART`, which the result lacks.
        per_token (`frozenset[str]`):
            Fields with one value per completion token. All rows have the session's values of the others.
        has_share (`bool`):
            True to multiply the advantage of each row with its share of the session's trained tokens.
    """
    parts = session[PART].tolist()
    rows = []
    for part in range(0, max(parts, default=0) + 1, 2):
        prompt, start, end = (bisect_left(parts, one) for one in (part - 1, part, part + 1))
        row = {
            name: value[start:end] if name in per_token else value
            for name, value in session.items()
            if name != PART
        }
        if part:
            row["prompt_ids"] = session["completion_ids"][prompt:start]
        # the passes without gradients have no advantages
        if has_share and "advantages" in row:
            trained = session["tool_mask"].sum().clamp(min=1)
            row["advantages"] = row["advantages"] * row["tool_mask"].sum() / trained
        rows.append(row)
    return rows


def empty_row(like: Row, per_token: frozenset[str]) -> Row:
    """Return a row that trains nothing, with the fields of another one: one prompt token and no completion."""
    row = {name: value[:0] if name in per_token else value for name, value in like.items()}
    return row | {"prompt_ids": like["prompt_ids"][:1]}


def check_session_loss(args: Any) -> None:
    """
    Check that the loss of a session is the sum of the losses of its rows.

    Args:
        args ([`~trl.GRPOConfig`]):
            Training arguments.

    Raises:
        `ConfigurationError`: if it is not.
    """
    whole = "it weighs the tokens of a row, or of a batch, by one another"
    mode = args.vllm_importance_sampling_mode
    rules = {
        "micro_batch_tokens": (
            getattr(args, "micro_batch_tokens", None) is None,
            "only balanced micro-batches can have ranks with unequal numbers of rows",
            "Set it to four times the longest row.",
        ),
        "loss_type": (
            args.loss_type not in MEANS + SUMS,
            whole,
            f"Use one of {MEANS + SUMS}.",
        ),
        "importance_sampling_level": (
            args.importance_sampling_level != "token",
            whole,
            'Use "token".',
        ),
        "vllm_importance_sampling_mode": (
            mode.startswith("sequence_"),
            whole,
            f'Use "{mode.replace("sequence", "token")}".',
        ),
        "mask_truncated_completions": (
            args.mask_truncated_completions,
            "the end of one call would decide for the whole session",
            "Leave it out.",
        ),
        "off_policy_mask_threshold": (
            args.off_policy_mask_threshold is not None,
            whole,
            "Leave it out.",
        ),
        "beta": (
            args.beta > 0 and args.loss_type in MEANS,
            f'`loss_type="{args.loss_type}"` is a mean over the tokens of a row, so the share of a row in its session '
            "is a factor of its advantage, which the KL term does not have",
            f"Leave it out, or use one of {SUMS} as `loss_type`.",
        ),
    }
    for setting, (is_refused, reason, cure) in rules.items():
        if is_refused:
            got = getattr(args, setting, None)
            raise ConfigurationError(
                f"`harness` makes sessions of several rows, with which `{setting}={got!r}` cannot be used: {reason}.",
                setting=setting,
                got=got,
                cure=cure,
            )
