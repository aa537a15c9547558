"""Batches in which some prompts have pictures and others have none."""

import torch

from .errors import ConfigurationError


def pictures_of(row: dict) -> list:
    """Of a row of the dataset: its column `images`, or the one of `image`."""
    if "images" in row:
        return row["images"] or []
    return [row["image"]] if row.get("image") is not None else []


def with_lists_of_pictures(inputs: list[dict]) -> list[dict]:
    """Rows with `image=None` get a column `images` too, which TRL reads first: a processor refuses `None`."""
    if "image" not in inputs[0] or "images" in inputs[0] or all(row["image"] is not None for row in inputs):
        return inputs
    return [{**row, "images": pictures_of(row)} for row in inputs]


def check_pictures(accelerator, inputs: list[dict]) -> None:
    """
    Under ZeRO-3 and FSDP a rank whose batch has no picture never gathers the vision tower's shards, and the others
    wait for it. One gather of a flag per round, on all training ranks.

    Raises:
        `ConfigurationError`: on every rank.
    """
    if not is_sharded(accelerator.state):
        return
    some = torch.tensor([any(map(pictures_of, inputs))], device=accelerator.device)
    flags = accelerator.gather(some).tolist()
    if any(flags) and not all(flags):
        without = [rank for rank, flag in enumerate(flags) if not flag]
        raise ConfigurationError(
            f"The batches of ranks {without} have no picture and those of the others have: with sharded weights every "
            "rank must run the vision tower. Use ZeRO-2 or DDP; or larger batches, or a blank picture, so that every "
            "rank has one."
        )


def is_sharded(state) -> bool:
    plugin = getattr(state, "deepspeed_plugin", None)
    return getattr(state, "fsdp_plugin", None) is not None or (plugin is not None and plugin.zero_stage == 3)
