"""Balanced micro-batches of rows with images give TRL's gradient: real trainers, the same rollouts in both."""

from copy import deepcopy
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from forks import forked
from PIL import Image as Picture
from replays import ShortReplay, logged, make, on_ranks

from multinode_kit.vision_models import VISION_MODELS
from trl_multinode.batches.layouts import num_words, record_to_row, row_to_record
from trl_multinode.batches.microbatches import reason_against
from trl_multinode.batches.row_images import cut_images, join_images
from trl_multinode.images import without_empty_images

ROWS = 16
CAP = 250  # the longest row has 90 tokens
SETTINGS = {"engine": "token_truncate", "loss_type": "dapo", "num_iterations": 2, "max_steps": 2}


def illustrated(fewest: int) -> Dataset:
    """Rows with `fewest` to two images of different sizes and prompts of different lengths."""
    random = np.random.default_rng(0)
    images = [
        Picture.fromarray(random.integers(0, 256, (30 + i, 50, 3), dtype=np.uint8))
        for i in range(ROWS + 2)
    ]
    columns = {
        "prompt": [[{"role": "user", "content": f"{i} is " * (1 + i % 4)}] for i in range(ROWS)],
        "images": [images[i : i + fewest + i % (3 - fewest)] for i in range(ROWS)],
    }
    features = {
        "prompt": [{"role": Value("string"), "content": Value("string")}],
        "images": List(Image()),
    }
    return Dataset.from_dict(columns, Features(features))


class IllustratedReplay(ShortReplay):
    """TRL 1.16 has `None` for a prompt without images; node mode makes it an empty list, which processors accept."""

    def _tokenize_prompts(self, prompts):
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        return prompt_ids, images and [row or [] for row in images], fields


def compare(folder, built: tuple, dataset: Dataset) -> dict:
    """Run TRL's micro-batches, then balanced ones."""
    trained = []
    for cap in (None, CAP):
        model, processor = deepcopy(built)
        settings = SETTINGS | {
            "model": model, "processing_class": processor, "dataset": dataset, "kind": IllustratedReplay
        }  # fmt: skip
        trained.append(make(folder, micro_batch_tokens=cap, **settings))
        model.register_forward_pre_hook(without_empty_images, with_kwargs=True)
        trained[
            -1
        ].log_multimodal = False  # as in node mode: TRL gathers images on ranks that have some
        trained[-1].train()
    theirs, ours = trained
    return {
        "differences": [
            float((a - b).norm() / a.norm())
            for a, b in zip(theirs.gradients, ours.gradients, strict=True)
        ],
        "moved": logged(ours, "balance/moved_mib"),
    }


@pytest.mark.parametrize("name", VISION_MODELS)
@pytest.mark.parametrize("fewest", [0, 1])
def test_the_gradient_is_trls_and_rows_move_with_their_images(name, fewest, tmp_path):
    # here, because only rank 0 of a launch saves and loads a model
    built = VISION_MODELS[name]()
    for found in on_ranks(lambda rank: compare(tmp_path, built, illustrated(fewest)), 2, tmp_path):
        assert len(found["differences"]) == 2 and max(found["differences"]) < 1e-5
        # MiB of one block; its texts are a tenth of that
        assert min(found["moved"]) > (0.1 if fewest else 0)


@pytest.mark.parametrize(
    ("kind", "finds_unused", "fewest", "is_balanced"),
    [
        ("FSDP", True, 0, False),
        ("FSDP", True, 1, True),
        ("MULTI_GPU", False, 0, False),
        ("MULTI_GPU", True, 0, True),
    ],
)
def test_ranks_keep_trls_cut_if_a_row_has_no_image_and_all_must_run_the_vision_tower(
    kind, finds_unused, fewest, is_balanced, tmp_path
):
    """A rank that does not run it takes no part in the collectives of its weights, or of their gradients."""

    def body(_: int) -> str | None:
        model, processor = VISION_MODELS["qwen3_vl"]()
        dataset = illustrated(fewest)
        trainer = make(tmp_path, model=model, processing_class=processor, dataset=dataset)
        trainer.args.ddp_find_unused_parameters = finds_unused
        state = trainer.accelerator.state
        with mock.patch.multiple(state, distributed_type=kind, num_processes=2):
            return reason_against(trainer)

    with forked(body, 1, tmp_path) as (one,):
        assert (one.result is None) == is_balanced


def test_an_image_keeps_all_its_tiles():
    """Idefics cuts a large image into tiles, and TRL pads each row to the most tiles of any row."""
    tiles = torch.arange(2 * 5 * 3 * 4).float().view(2, 5, 3, 2, 2) + 1
    mask = torch.ones(2, 5, 2, 2, dtype=torch.bool)
    mask[1, 3:] = False
    batch = {
        "prompt_ids": torch.ones(2, 4, dtype=torch.int64),
        "num_images": [1, 1],
        "pixel_values": tiles * mask[:, :, None],
        "pixel_attention_mask": mask,
    }
    is_token = torch.ones(2, 4, dtype=torch.bool)
    rows = cut_images(batch, is_token)
    assert [row["pixel_values"].shape[1] for row in rows] == [5, 3]
    joined = join_images(rows, is_token)
    for name in ("pixel_values", "pixel_attention_mask"):
        assert torch.equal(joined[name], batch[name])


def test_a_record_holds_any_fields():
    row = {
        "prompt_ids": torch.tensor([5, 6]),
        "old_per_token_logps": torch.tensor([-1.5]),
        "num_images": torch.tensor(2),
        "pixel_values": torch.randn(2, 3, 4, dtype=torch.bfloat16),
        "pixel_attention_mask": torch.rand(1, 2, 5) > 0.5,
        "image_sizes": torch.zeros(0, 2),
    }
    record = row_to_record(row)
    assert record.dtype == torch.int32 and len(record) == num_words(row)
    found = record_to_row(record)
    assert found.keys() == row.keys()
    for name, value in row.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
