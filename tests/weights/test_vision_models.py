"""Rows with images on a real engine: log-probs agree with the trainer's after each sync, for Qwen3-VL and Qwen3.5."""

import cv2  # noqa: F401  (transformers imports it with the first image, and it changes LD_LIBRARY_PATH)
import numpy as np
import pytest
import torch
from PIL import Image

from multinode_kit.engines import FORKED, SyncDriver, running_engines
from multinode_kit.vision_models import QWEN_IMAGE, VISION_MODELS
from trl_multinode.rollouts.requests import merged, requests_of
from trl_multinode.rollouts.rows import raw_image

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
TEXTS = [
    f"what is {QWEN_IMAGE} ?",
    "no image",
    f"what is {QWEN_IMAGE} ?",
    f"{QWEN_IMAGE} or {QWEN_IMAGE}",
]
# a sampled image token would want an image, and token 1 would end a row
SAMPLING = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
    "allowed_token_ids": list(range(2, 258)),
}  # fmt: skip


class Illustrated(SyncDriver):
    """Four prompts, with an image, without, with another one, with both, as a rank's rows: two of each."""

    def __init__(self, model, processor, engines):
        super().__init__(model, engines)
        random = np.random.default_rng(0)
        first, second = (
            Image.fromarray(random.integers(0, 256, size, dtype=np.uint8))
            for size in ((40, 50, 3), (50, 40, 3))
        )
        self.images = [[first], None, [second], [first, second]]
        # with all the tokens of an image, as TRL sends them
        self.inputs = [
            processor(text=[text], images=images and [images], return_tensors="pt")
            for text, images in zip(TEXTS, self.images, strict=True)
        ]

    def rows(self):
        prompts = [inputs["input_ids"][0].tolist() for inputs in self.inputs for _ in range(2)]
        images = [images for images in self.images for _ in range(2)]
        requests = merged(requests_of(prompts, images, [*range(11, 11 + len(prompts))]))
        assert [len(request.images) for request in requests] == [1, 0, 1, 2]
        return self.engines.generate(requests, 12, SAMPLING, self.version.update)

    @torch.no_grad()
    def logprobs_with(self, inputs, completion) -> torch.Tensor:
        ids = torch.tensor([completion])
        longer = {
            name: torch.cat([value, fill], dim=1)
            for name, value, fill in (
                ("input_ids", inputs["input_ids"], ids),
                ("mm_token_type_ids", inputs["mm_token_type_ids"], torch.zeros_like(ids)),
            )
        }
        images = {
            name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs
        }
        logits = self.model(**longer, **images).logits[0, -len(completion) - 1 : -1].float()
        return logits.log_softmax(-1).gather(1, ids[0, :, None])[:, 0]

    def differences(self, inputs=None) -> np.ndarray:
        """Return |engine - trainer| of each token of the rows of each prompt."""
        return np.array(
            [
                [
                    np.abs(self.logprobs_with(given, row.tokens.tolist()).numpy() - row.logprobs)
                    for row in rows
                ]
                for given, rows in zip(inputs or self.inputs, self.rows(), strict=True)
            ]
        )

    def scored_and_sampled(self) -> tuple[np.ndarray, np.ndarray]:
        """Return log-probs of the engine's score, which the check of stale rows requests, and those of the rows."""
        (engine,), scored, sampled = self.engines, [], []
        for inputs, images, (row, _) in zip(self.inputs, self.images, self.rows(), strict=True):
            tokens = [*inputs["input_ids"][0].tolist(), *row.tokens.tolist()]
            request_id = engine.post_score(tokens, 1.0, tuple(map(raw_image, images or ())))
            scored.append(engine.scored(request_id).logprobs[-len(row.tokens) :])
            sampled.append(row.logprobs)
        return np.array(scored), np.array(sampled)


# name, dtype of the engine, largest difference for 95 % of the tokens after a sync. vLLM's CPU build computes the
# convolution of Qwen3.5 in bfloat16 only
CASES = [("qwen3_vl", "float32", 1e-3), ("qwen3_5", "bfloat16", 0.3)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0])
def running(request, tmp_path_factory):
    name, dtype, limit = request.param
    model, processor = VISION_MODELS[name]()
    model.to(getattr(torch, dtype))
    folder = tmp_path_factory.mktemp("log")
    with running_engines(model, folder, FORKED, processing_class=processor, dtype=dtype) as engines:
        driver = Illustrated(model, processor, engines)
        driver.limit = limit
        driver.send()
        yield driver


def most(differences: np.ndarray) -> np.ndarray:
    """Return what 95 % of the tokens of each prompt stay below."""
    return np.quantile(differences.reshape(len(TEXTS), -1), 0.95, axis=1)


@pytest.mark.parametrize("in_flight", [False, True])
def test_rows_with_no_one_and_two_images_agree_after_each_sync_and_disagree_before(
    running, in_flight, monkeypatch
):
    monkeypatch.setattr(running.sync, "in_flight", in_flight)
    for _ in range(3):
        running.perturb()
        stale = most(running.differences())
        running.send()
        fresh = most(running.differences())
        print(f"[images] {fresh.max():.1e} after a sync, {stale.min():.1f} before")
        assert fresh.max() < running.limit and stale.min() > 1


def test_only_rows_with_images_disagree_with_those_of_other_images(running):
    one, none, other, both = running.inputs
    assert one["input_ids"].equal(other["input_ids"])  # they differ in their images alone
    found = most(running.differences([other, none, one, both]))
    assert found[[0, 2]].min() > 0.5 and found[[1, 3]].max() < running.limit


def test_a_row_with_images_has_the_score_that_it_was_sampled_with(running):
    scored, sampled = running.scored_and_sampled()
    assert most(np.abs(scored - sampled)).max() < running.limit
