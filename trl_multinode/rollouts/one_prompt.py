"""The rows of a group must be rows of one prompt, wherever they lie: TRL compares their rewards with each other."""

from typing import Any

import torch

from ..errors import ConfigurationError
from ..run.values import digest_of, shown, text_of
from .upcoming import Batch


def check_one_prompt(accelerator: Any, inputs: Batch, group_size: int) -> None:
    """
    Check the groups of a training round before it generates. A collective of all ranks if groups straddle ranks.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the trainer.
        inputs (`list[dict]`):
            Rows of the dataset that this rank has in the round. All ranks have the same number.
        group_size (`int`):
            Completions per prompt; TRL's groups are so many consecutive rows of all ranks.

    Raises:
        `ConfigurationError`: if a group has rows of different prompts. On every rank if groups straddle ranks.
    """
    prompts = [text_of(row.get("prompt")) for row in inputs]
    digests = torch.tensor([int(digest_of(prompt)[:15], 16) for prompt in prompts])
    first = 0
    if len(inputs) % group_size:
        first = accelerator.process_index * len(inputs)
        digests = accelerator.gather(digests.to(accelerator.device)).cpu()
    groups = digests[: len(digests) // group_size * group_size].view(-1, group_size)
    odd = (groups != groups[:, :1]).nonzero()
    if not len(odd):
        return
    group, place = odd[0].tolist()
    one, other = group * group_size, group * group_size + place
    of_rank = dict(enumerate(prompts, first))
    found = [
        repr(shown(of_rank[row])) if row in of_rank else "another rank's prompt"
        for row in (one, other)
    ]
    raise ConfigurationError(
        f"The rows of a group must have one prompt, but in this round row {one} has {found[0]} and row "
        f"{other} has {found[1]}. The ranks have different data, or another order of it: shuffle with a seed, "
        "and let the sampler of a subclass repeat every prompt `num_generations` times in a row.",
        setting="num_generations",
    )
