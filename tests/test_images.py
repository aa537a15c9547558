"""Batches of which only some prompts have images: what TRL gets, and what ranks must agree on."""

from types import SimpleNamespace

import pytest
import torch
from refusals import refused

from trl_multinode.images import check_images, with_lists_of_images, without_empty_images

CAT = object()


def accelerator(flags: list[bool], stage: int | None = 3):
    plugin = stage and SimpleNamespace(zero_stage=stage)
    state = SimpleNamespace(deepspeed_plugin=plugin, fsdp_plugin=None)
    return SimpleNamespace(
        state=state, device="cpu", gather=lambda mine: torch.tensor([bool(mine), *flags])
    )


def test_prompts_without_a_picture_get_empty_lists_and_keep_their_columns():
    rows = [{"prompt": "a", "image": CAT}, {"prompt": "b", "image": None}]
    assert [row["images"] for row in with_lists_of_images(rows)] == [[CAT], []]
    assert [row["image"] for row in with_lists_of_images(rows)] == [CAT, None]


@pytest.mark.parametrize(
    "rows", [[{"prompt": "a"}], [{"image": CAT}], [{"images": [CAT]}, {"images": []}]]
)
def test_other_rows_are_left_as_they_are(rows):
    assert with_lists_of_images(rows) is rows


def test_a_rank_without_any_picture_is_refused_while_others_have_some_and_weights_are_sharded():
    with refused("train_dataset", "ZeRO-2 or DDP", got=[0, 2]):
        check_images(accelerator([True, False]), [{"images": []}, {"images": None}])
    check_images(accelerator([True, False], stage=2), [{"images": []}])
    check_images(accelerator([False]), [{"image": None}])
    check_images(accelerator([True]), [{"image": None}, {"image": CAT}])


def test_a_forward_pass_keeps_its_images_unless_all_are_empty_or_padding():
    ids, some, none = torch.ones(2, 3), torch.zeros(2, 4), torch.zeros(0, 4)
    grid = {"image_grid_thw": torch.ones(1, 3)}
    kept = {"input_ids": ids, "mm_token_type_ids": ids}
    for dropped in (
        {"pixel_values": none} | grid,
        {"pixel_values": some, "pixel_attention_mask": torch.zeros(2, 4)},
    ):
        assert without_empty_images(None, (), kept | dropped) == ((), kept)
    for images in (
        {},
        {"pixel_values": some} | grid,
        {"pixel_values": some, "pixel_attention_mask": torch.eye(2)},
    ):
        assert (
            without_empty_images(None, (), kept | images)[1].keys() == kept.keys() | images.keys()
        )
