"""Batches in which some prompts have images and others have none."""

from collections.abc import Iterator
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import IterableDataset

from .errors import ConfigurationError
from .node_settings import uses_fsdp, zero_stage


def images_of(row: dict) -> list:
    """Return the images of a dataset row, from its column `images` or `image`."""
    if "images" in row:
        return row["images"] or []
    return [row["image"]] if row.get("image") is not None else []


def has_images(row: dict) -> bool:
    """Return whether a dataset row has images, in a column or in the messages of its prompt."""
    if images_of(row):
        return True
    messages = row["prompt"] if isinstance(row.get("prompt"), list) else []
    contents = [
        message["content"] for message in messages if isinstance(message.get("content"), list)
    ]
    return any(part.get("type") == "image" for content in contents for part in content)


def image_flags(dataset: Any) -> Iterator[bool]:
    """Yield for each row of a dataset with an index whether it has images. Images of a `Dataset` are not decoded."""
    if not isinstance(dataset, Dataset):
        yield from (has_images(dataset[index]) for index in range(len(dataset)))
        return
    columns = {"prompt", "image", "images"}.intersection(dataset.column_names)
    for table in dataset.select_columns(sorted(columns)).with_format("arrow").iter(1000):
        yield from _flags_of(table, columns)


def _flags_of(table: Any, columns: set[str]) -> Iterator[bool]:
    found = [False] * table.num_rows
    if "image" in columns:
        found = table["image"].is_valid().to_pylist()
    if "images" in columns:
        # only their numbers are read, because an encoded image is large
        counts = table["images"].combine_chunks().value_lengths()
        found = list(map(bool, counts.to_pylist()))
    prompts = table["prompt"].to_pylist() if "prompt" in columns else [None] * table.num_rows
    for flag, prompt in zip(found, prompts, strict=True):
        yield flag or has_images({"prompt": prompt})


def has_index(dataset: Any) -> bool:
    """Return whether a dataset gives a row by its index; a stream does not."""
    return not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__")


def may_have_images(dataset: Any, is_vlm: bool) -> bool:
    """Return whether a dataset has a column of images, or prompts with images for a model that reads them.

    It returns `False` for a stream without named columns, whose rows nobody has seen yet.
    """
    if {"image", "images"}.intersection(getattr(dataset, "column_names", None) or ()):
        return True
    if not is_vlm or not has_index(dataset) or not len(dataset):
        return False
    # the first row has what a transform adds
    return has_images(dataset[0]) or any(image_flags(dataset))


def every_row_has_images(dataset: Any) -> bool:
    """Return whether every row of a `Dataset` has images; `False` for others, whose rows would have to be read."""
    return isinstance(dataset, Dataset) and all(image_flags(dataset))


def may_skip_vision_tower(args: Any, accelerator: Any) -> bool:
    """Return whether a rank may train on rows without images while others run the vision tower.

    DDP waits for the gradients of all parameters, unless it looks for those that were not used.
    """
    # TRL sets it for models with images, but not with reentrant checkpointing
    is_found = args.ddp_find_unused_parameters
    is_ddp = accelerator.distributed_type in ("MULTI_GPU", "MULTI_CPU")
    return accelerator.num_processes == 1 or bool(is_ddp and is_found)


def with_lists_of_images(inputs: list[dict]) -> list[dict]:
    """Add a column `images`, which TRL reads first, if any row has `image=None`: processors reject `None`."""
    lacks_some = any("image" in row and row["image"] is None for row in inputs)
    if "images" in inputs[0] or not lacks_some:
        return inputs
    return [{**row, "images": images_of(row)} for row in inputs]


def without_empty_images(_: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Drop the images of a forward pass whose rows have none, as a hook of the model: TRL 1.16 passes empty tensors,
    with which vision towers fail."""
    pixels, mask = kwargs.get("pixel_values"), kwargs.get("pixel_attention_mask")
    # with a mask, each row is padded to the same number of images
    is_padding = mask is not None and not mask.any()
    if pixels is not None and (is_padding or not pixels.numel()):
        kwargs = {
            name: value
            for name, value in kwargs.items()
            if not name.startswith(("pixel_", "image_", "spatial_"))
        }
    return args, kwargs


def check_images(accelerator: Any, inputs: list[dict]) -> None:
    """
    Check, if weights are sharded (ZeRO-3, FSDP), that either all ranks have images in their batch or none has.

    A rank without images never gathers the vision tower's shards, and the other ranks would wait for it. The check is
    one gather of a flag per round, on all training ranks.

    Args:
        inputs (`list[dict]`):
            Rows of this rank, with images in a column or in the messages of the prompt.

    Raises:
        `ConfigurationError`: on every rank, if only some ranks have images.
    """
    if not shards_weights(accelerator.state):
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


def shards_weights(args: Any) -> bool:
    """Return whether a launch shards the weights, before its accelerator exists."""
    return uses_fsdp() or zero_stage(args) == 3
