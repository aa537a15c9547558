"""Requests to the engines from the prompts of a `generate` call."""

from itertools import groupby

from ..engine.dispatch import PromptRequest
from .rows import raw_image


def requests_of(
    prompts: list[list[int]], images: list[list | None] | None, seeds: list[int] | None
) -> list[PromptRequest]:
    """Build one request per run of equal rows with consecutive seeds. A fixed stride would fail: a group may
    straddle ranks and nodes."""
    bases = [None] * len(prompts) if seeds is None else [seed - row for row, seed in enumerate(seeds)]
    rows = list(zip(prompts, images or [None] * len(prompts), bases, strict=True))
    requests, start = [], 0
    for (prompt, row_images, base), run in groupby(rows):
        count = len(list(run))
        first = None if base is None else base + start
        requests.append(PromptRequest(prompt, count, first, tuple(map(raw_image, row_images or ()))))
        start += count
    return requests
