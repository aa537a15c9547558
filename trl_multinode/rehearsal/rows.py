"""Longest rows that the settings allow, and a batch of them with the fields that TRL's loss reads."""

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..node_settings import NodeSettings

CANDIDATES = (
    256  # prompts that are tokenized to find the longest; 100,000 prompts would take a minute
)
FULL = 0.95  # a micro-batch that fills so much of `micro_batch_tokens` is the largest one


@dataclass(frozen=True)
class Rows:
    """Number of equal rows, and the tokens of each one's prompt and completion."""

    count: int
    prompt: int
    completion: int

    @property
    def length(self) -> int:
        return self.prompt + self.completion

    def __str__(self) -> str:
        return f"{self.count} rows of {self.prompt} + {self.completion} tokens"


def longest_row(prompt: int | None, completion: int | None, limit: int) -> tuple[int, int]:
    """Return prompt and completion tokens of the longest row.

    Args:
        prompt (`int`, *optional*):
            Tokens of the longest prompt; `None` if it is unknown, and the row then takes the whole limit.
        completion (`int`, *optional*):
            Limit for a completion; `None` if only `limit` bounds it.
        limit (`int`):
            Limit for a row: the context, or `micro_batch_tokens` if that is smaller.
    """
    completion = min(completion or limit, limit - 1)
    prompt = min(limit - completion if prompt is None else prompt, limit - 1)
    return prompt, min(completion, limit - prompt)


def micro_batches(prompt: int, completion: int, cap: int, multiple: int, most: int) -> list[Rows]:
    """Return the micro-batches that need the most memory: as many of the longest rows as fit, and the fullest one.

    Args:
        prompt (`int`), completion (`int`):
            Tokens of the longest row.
        cap (`int`):
            Value of `micro_batch_tokens`.
        multiple (`int`):
            Divisor of a row's padded length (`pad_to_multiple_of`).
        most (`int`):
            Rows of an optimizer step in a pool of ranks.
    """
    length = -(-(prompt + completion) // multiple) * multiple
    fitting = max(1, cap // length)
    longest = Rows(min(fitting, most), prompt, completion)
    count = min(longest.count + 1, most)
    width = cap // count // multiple * multiple
    is_full = longest.count * length >= FULL * cap
    if is_full or width < 2 or count == longest.count:
        return [longest]
    part = max(1, width * prompt // (prompt + completion))
    return [longest, Rows(count, part, width - part)]


# ---- of a trainer ---------------------------------------------------------------------------------------------------


def row_limit(trainer: Any) -> int:
    """Return the limit for a row in tokens: the context, or `micro_batch_tokens` if that is smaller."""
    if trainer.host is not None:
        context = trainer.vllm_generation.engines.max_model_len
    else:
        context = trainer.model.config.get_text_config().max_position_embeddings
    return min(context, NodeSettings.of(trainer.args).micro_batch_tokens or context)


def longest_prompt(trainer: Any) -> int | None:
    """Return the tokens of the longest prompt in the dataset; `None` if prompts come from elsewhere.

    The prompts with the most bytes are tokenized with TRL's own method, which applies the chat template.
    """
    data = trainer.train_dataset
    makes_prompts = trainer.environment_factories is not None or trainer.rollout_func is not None
    if makes_prompts or not hasattr(data, "__len__"):
        return None
    columns = set(data.column_names)
    # TRL builds prompts with images only while it scores
    if "prompt" not in columns or columns & {"image", "images"}:
        return None
    largest = heapq.nlargest(
        CANDIDATES, data["prompt"], key=lambda prompt: len(str(prompt).encode())
    )
    prompt_ids = trainer._tokenize_prompts(largest)[0]
    return max(map(len, prompt_ids))


def training_rows(trainer: Any, prompt: int, completion: int) -> list[Rows]:
    """Return the batches of one forward and backward pass that need the most memory."""
    args, balance = trainer.args, trainer._balance
    cap = NodeSettings.of(args).micro_batch_tokens
    if cap is None or balance is None:
        return [Rows(args.per_device_train_batch_size, prompt, completion)]
    of_a_rank = args.per_device_train_batch_size * args.gradient_accumulation_steps
    most = of_a_rank * max(balance.dealer.exchange.groups)
    return micro_batches(prompt, completion, cap, trainer.pad_to_multiple_of or 1, most)


def plain_tokens(trainer: Any) -> np.ndarray:
    """Return the ids of tokens that are neither special nor added: an image token without an image is an error."""
    tokenizer = trainer._tokenizer
    size = min(len(tokenizer), trainer.model.config.get_text_config().vocab_size)
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return np.array([token for token in range(size) if token not in special] or range(size))


def made_up(trainer: Any, count: int, length: int) -> np.ndarray:
    """Return random rows `(count, length)`, other ones on every rank, so that no engine finds a row in its cache."""
    random = np.random.default_rng(trainer.accelerator.process_index)
    return random.choice(plain_tokens(trainer), (count, length))


def batch_of(trainer: Any, rows: Rows) -> dict[str, torch.Tensor]:
    """Build a batch with the fields, shapes and dtypes that TRL's `_prepare_inputs` would return for such rows."""
    args, device = trainer.args, trainer.accelerator.device
    ids = made_up(trainer, rows.count, rows.length)
    prompt_ids, completion_ids = (
        torch.from_numpy(ids).to(device).split([rows.prompt, rows.completion], dim=1)
    )
    per_token = torch.zeros(completion_ids.shape, device=device)
    batch = {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": torch.ones_like(completion_ids),
        "advantages": torch.ones(rows.count, device=device),
        "num_items_in_batch": torch.tensor(
            completion_ids.numel() * trainer.accelerator.num_processes, device=device
        ),
    }
    corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    if (
        corrected
        or args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations)
        != 0
    ):
        batch["old_per_token_logps"] = per_token
    if corrected:
        per_row = trainer.vllm_importance_sampling_mode.startswith("sequence_")
        batch["importance_sampling_ratio"] = torch.ones_like(
            per_token[:, :1] if per_row else per_token
        )
        batch["sampling_per_token_logps"] = per_token.clone()
    if trainer.beta != 0.0:
        batch["ref_per_token_logps"] = per_token.clone()
    if trainer.tools:
        batch["tool_mask"] = torch.ones_like(completion_ids)
    return batch
