"""Images ahead of training and in flight: TRL builds these prompts in the groups' threads. One process."""

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from agents import SETTINGS, ScriptedEngine, engines_here, keep_outputs
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Picture
from transformers import set_seed

import trl_multinode
from multinode_kit.vision_models import VISION_MODELS
from trl_multinode.engine.client import Rollout

GROUP, ROWS, TOKENS = 2, 12, 5
IMAGE_FIELDS = ("pixel", "image", "mm_token")  # beginnings of the names
AHEAD = {
    "one round": {"max_staleness": 1},
    "in flight, in the dataset's order": {"max_staleness": 2, "max_age": 2},
    "scored by group": {"score_groups": 0, "max_staleness": 1},
}


class PictureEngine(ScriptedEngine):
    """An engine whose completions depend on the prompt, the pixels and the seed, so a lost image shows."""

    def complete(self, request, seed: int, max_tokens: int) -> Rollout:
        pixels = b"".join(image.data for image in request.images)
        number = zlib.crc32(
            np.asarray(request.prompt, np.int32).tobytes() + pixels + str(seed).encode()
        )
        tokens = np.random.default_rng(number).integers(10, 200, TOKENS).astype(np.int32)
        return Rollout(tokens, np.full(TOKENS, -5.0, np.float32), self.version, 0)


def pictures(in_every_row: bool) -> Dataset:
    """Rows with two images, one, and (unless `in_every_row`) none; each image has its own size."""
    random = np.random.default_rng(0)
    images = [
        Picture.fromarray(random.integers(0, 256, (30 + i, 50, 3), dtype=np.uint8))
        for i in range(ROWS + 2)
    ]
    columns = {
        "prompt": [[{"role": "user", "content": f"{i} is"}] for i in range(ROWS)],
        "images": [images[i : i + (i % 2 + 1 if in_every_row else i % 3)] for i in range(ROWS)],
    }
    features = {
        "prompt": [{"role": Value("string"), "content": Value("string")}],
        "images": List(Image()),
    }
    return Dataset.from_dict(columns, Features(features))


def run(
    folder: Path,
    dataset: Dataset,
    checkpoint: Path | None = None,
    name: str = "idefics3",
    **settings,
) -> list[dict]:
    """Train to step 3 with weights that stay, and return what TRL made of each round."""
    set_seed(0)
    model, processor = VISION_MODELS[name]()
    fields = SETTINGS | {
        "num_generations": GROUP, "max_completion_length": TOKENS, "per_device_train_batch_size": 2 * GROUP,
        "learning_rate": 0.0, "shuffle_dataset": False, "rollout_seed": 5, "logprob_divergence_limit": 0.0,
    }  # fmt: skip
    with engines_here(lambda text, seed: "", kind=PictureEngine):
        trainer = trl_multinode.GRPOTrainer(
            model,
            lambda completion_ids, **_: [float(sum(ids) % 11) for ids in completion_ids],
            trl_multinode.GRPOConfig(str(folder), **(fields | settings)),
            dataset,
            processing_class=processor,
        )
        outputs = keep_outputs(trainer)
        try:
            trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        finally:
            trainer.close()
        trainer_log = [
            entry for entry in trainer.state.log_history if "staleness/rounds_mean" in entry
        ]
    assert (settings == {}) == (not any(entry["staleness/rounds_mean"] for entry in trainer_log))
    return outputs


def check_equal(these: list[dict], those: list[dict]) -> None:
    for one, other in zip(these, those, strict=True):
        assert one["num_images"] == other["num_images"] and any(one["num_images"])
        images = {name for name in one.keys() | other.keys() if name.startswith(IMAGE_FIELDS)}
        for name in ("prompt_ids", "completion_ids", "advantages", "pixel_values", *images):
            assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("name", VISION_MODELS)
@pytest.mark.parametrize("in_every_row", [True, False])
def test_rounds_with_images_are_those_of_the_synchronous_run(name, in_every_row, tmp_path):
    fresh = run(tmp_path / "fresh", pictures(in_every_row), name=name)
    for mode, settings in AHEAD.items():
        ahead = run(tmp_path / mode, pictures(in_every_row), name=name, **settings)
        check_equal(ahead, fresh)
    assert len(fresh) == 3


@pytest.mark.nightly  # test_agents resumes rollouts of text
@pytest.mark.parametrize("mode", AHEAD)
def test_rollouts_with_images_that_were_open_at_a_checkpoint_are_made_again(mode, tmp_path):
    settings = AHEAD[mode] | {"save_strategy": "steps", "save_steps": 1}
    whole = run(tmp_path / "run", pictures(True), **settings)
    resumed = run(tmp_path / "run", pictures(True), tmp_path / "run" / "checkpoint-1", **settings)
    check_equal(resumed, whole[1:])
