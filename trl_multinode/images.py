"""Batches in which some prompts have images and others have none."""

from typing import Any

import torch

from .errors import ConfigurationError

NOT_IN_FLIGHT = (
    "From `max_staleness=2` on completions are generated from token ids, and TRL builds prompts with images only "
    "while it scores them. Use `max_staleness=1`."
)


def images_of(row: dict) -> list:
    """Return the images of a dataset row, from its column `images` or `image`."""
    if "images" in row:
        return row["images"] or []
    return [row["image"]] if row.get("image") is not None else []


def has_images(row: dict) -> bool:
    """Return whether a dataset row has images, in a column or in the messages of its prompt."""
    messages = row["prompt"] if isinstance(row.get("prompt"), list) else []
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return bool(images_of(row)) or any(part.get("type") == "image" for content in contents for part in content)


def with_lists_of_images(inputs: list[dict]) -> list[dict]:
    """Add a column `images`, which TRL reads first, if any row has `image=None`: processors reject `None`."""
    if "image" not in inputs[0] or "images" in inputs[0] or all(row["image"] is not None for row in inputs):
        return inputs
    return [{**row, "images": images_of(row)} for row in inputs]


def check_images(accelerator: Any, inputs: list[dict]) -> None:
    """
    Check, if weights are sharded (ZeRO-3, FSDP), that either all ranks have images in their batch or none has.

    A rank without images never gathers the vision tower's shards, and the other ranks would wait for it. The check is
    one gather of a flag per round, on all training ranks.

    Raises:
        `ConfigurationError`: on every rank, if only some ranks have images.
    """
    if not is_sharded(accelerator.state):
        return
    some = torch.tensor([any(map(has_images, inputs))], device=accelerator.device)
    flags = accelerator.gather(some).tolist()
    if any(flags) and not all(flags):
        without = [rank for rank, flag in enumerate(flags) if not flag]
        raise ConfigurationError(
            f"The batches of ranks {without} have no image and those of the others have: with sharded weights "
            "every rank must run the vision tower.",
            setting="train_dataset",
            got=without,
            cure="Use ZeRO-2 or DDP; or larger batches, or a blank image, so that every rank has one.",
        )


def is_sharded(state: Any) -> bool:
    """Return whether parameters are sharded: under ZeRO-3 or FSDP."""
    plugin = getattr(state, "deepspeed_plugin", None)
    return getattr(state, "fsdp_plugin", None) is not None or (plugin is not None and plugin.zero_stage == 3)
