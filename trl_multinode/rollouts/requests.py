"""Requests to engines from rows, of which equal consecutive ones may become one request."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..engine.client import EngineClient
from ..engine.stream import Request
from ..errors import ConfigurationError, PromptTooLongError, RolloutError
from ..wire.sampling import truncating
from .rows import raw_image

Prompts = list[list[int]]  # token ids, one row per requested completion


def requests_of(
    prompts: Prompts, images: list[list | None] | None, seeds: list[int] | None, **fields: Any
) -> Iterator[Request]:
    """Yield a request for each row. All have `fields`, which are those of [`Request`].

    The requests are not a list, because [`merged`] drops most of their copies of the images.
    """
    nothing = [None] * len(prompts)
    rows = zip(prompts, images or nothing, seeds or nothing, strict=True)
    for row, (prompt, row_images, seed) in enumerate(rows):
        raw = tuple(map(raw_image, row_images or ()))
        yield Request(prompt, seed=seed, images=raw, row=row, **fields)


def merged(requests: Iterable[Request]) -> list[Request]:
    """Make one request of each run of equal rows with consecutive seeds. A fixed stride would fail: a group may
    straddle ranks and nodes."""
    found: list[Request] = []
    for request in requests:
        if found and _continues(found[-1], request):
            found[-1] = replace(found[-1], num_completions=found[-1].num_completions + 1)
        else:
            found.append(request)
    return found


def _continues(request: Request, following: Request) -> bool:
    """Return whether a request for one row can be the next completion of another request."""
    count = request.num_completions
    if (following.group, following.row) != (request.group, request.row + count):
        return False
    if (following.prompt, following.images) != (request.prompt, request.images):
        return False
    return request.seed is None or following.seed == request.seed + count


def check_lengths(generation: Any, prompts: Prompts, first_row: int = 0) -> None:
    """Check that every prompt has a token, and leaves room for a completion.

    Args:
        generation ([`NodeGeneration`]):
            Generation of this rank, with the engines whose context limits a prompt.
        prompts (`list[list[int]]`):
            Token ids, one row per requested completion.
        first_row (`int`, *optional*, defaults to 0):
            Place of the first prompt among the rows of this rank, for the message.

    Raises:
        `PromptTooLongError`: if one does not; the message names its row.
        `RolloutError`: if one has no token.
    """
    limit, rank = generation.engines.max_model_len, generation.accelerator.process_index
    for row, prompt in enumerate(prompts, first_row):
        if not len(prompt):
            raise RolloutError(
                f"Row {row} of rank {rank}: its prompt has no tokens, and a completion must follow one. "
                "Filter empty prompts out of the dataset, or add a chat template or a first token to them."
            )
        if len(prompt) >= limit:
            raise PromptTooLongError(
                f"Row {row} of rank {rank}: its prompt has {len(prompt)} tokens, the engine's context is "
                f"{limit} and must hold at least one more. Filter long prompts out of the dataset, or raise "
                "`vllm_max_model_length`."
            )


def check_logprobs(
    engines: Iterable[EngineClient], sampling: Mapping[str, Any], where: str
) -> None:
    """Raise `ConfigurationError` if the engines' log-probs cannot be compared with the trainer's."""
    for client in engines:
        if (reason := client.ready.truncated_logprobs) and (names := truncating(sampling.get)):
            raise ConfigurationError(
                f"{where}: {', '.join(names)} need log-probs over the whole vocabulary, and {client.name} has "
                f"those over the tokens that are left: {reason}.",
                setting="generation_kwargs",
                got=names,
                cure="Leave these settings out, or remove the reason.",
            )
