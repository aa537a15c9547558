"""Images ahead of training and in flight: TRL builds these prompts in the groups' threads. One process."""

import zlib
from importlib import resources
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from agents import SETTINGS, ScriptedEngine, engines_here, keep_outputs
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Picture
from transformers import set_seed

import trl_multinode
from multinode_kit.models import tiny_tokenizer
from multinode_kit.vision_models import VISION_MODELS
from trl_multinode.engine.client import Rollout

GROUP, ROWS, TOKENS = 2, 12, 5
IMAGE_FIELDS = ("pixel", "image", "mm_token")  # beginnings of the names
AHEAD = {
    "one round": {"max_staleness": 1},
    "in flight, in the dataset's order": {"max_staleness": 2, "max_age": 2},
    "scored by group": {"score_groups": 0, "max_staleness": 1},
}


# Qwen3.5 has the processor of Qwen3-VL
NAMES = ["idefics3", "qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.nightly)]
TOOL_TEMPLATES = {
    "qwen3_vl": "qwen3_vl",
    "qwen3_5": "qwen3_5_nothink",
}  # of TRL, which parses their calls


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
    keywords: dict | None = None,
    engine: type[PictureEngine] = PictureEngine,
    **settings,
) -> list[dict]:
    """Train to step 3 with weights that stay, and return what TRL made of each round."""
    set_seed(0)
    model, processor = VISION_MODELS[name]()
    if engine is LookingEngine:
        file = resources.files("trl").joinpath(f"chat_templates/{TOOL_TEMPLATES[name]}.jinja")
        processor.chat_template = file.read_text()
        processor.tokenizer.eos_token = "<|im_end|>"
    fields = SETTINGS | {
        "num_generations": GROUP, "max_completion_length": TOKENS, "per_device_train_batch_size": 2 * GROUP,
        "learning_rate": 0.0, "shuffle_dataset": False, "rollout_seed": 5, "logprob_divergence_limit": 0.0,
        "engine_kwargs": {"dtype": "bfloat16"} if name == "qwen3_5" else {},  # an engine on a CPU has no other kernel
    }  # fmt: skip
    with engines_here(lambda text, seed: "", kind=engine):
        trainer = trl_multinode.GRPOTrainer(
            model,
            reward,
            trl_multinode.GRPOConfig(str(folder), **(fields | settings)),
            dataset,
            processing_class=processor,
            **(keywords or {}),
        )
        outputs = keep_outputs(trainer)
        try:
            trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        finally:
            trainer.close()
        log = trainer.state.log_history
    ages = [entry["staleness/rounds_mean"] for entry in log if "staleness/rounds_mean" in entry]
    assert any(ages) == bool(settings.get("max_staleness"))
    if "dynamic_sampling" in settings:
        assert any(entry.get("dynamic_sampling/dropped_share") for entry in log)
    return outputs


def reward(completion_ids, flat=None, **_) -> list[float]:
    """Differ within a group, unless a column of the dataset says that the group is flat."""
    rewards = [float(sum(ids) % 11) for ids in completion_ids]
    return rewards if flat is None else [r * (not f) for r, f in zip(rewards, flat, strict=True)]


def check_equal(these: list[dict], those: list[dict]) -> None:
    for one, other in zip(these, those, strict=True):
        assert one.get("num_images") == other.get("num_images")
        images = {name for name in one.keys() | other.keys() if name.startswith(IMAGE_FIELDS)}
        for name in ("prompt_ids", "completion_ids", "advantages", *images):
            assert torch.equal(one[name], other[name]), name
    assert any("pixel_values" in one for one in these)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("in_every_row", [True, False])
def test_rounds_with_images_are_those_of_the_synchronous_run(name, in_every_row, tmp_path):
    fresh = run(tmp_path / "fresh", pictures(in_every_row), name=name)
    for mode, settings in AHEAD.items():
        ahead = run(tmp_path / mode, pictures(in_every_row), name=name, **settings)
        check_equal(ahead, fresh)
    assert len(fresh) == 3


@pytest.mark.parametrize("name", NAMES)
def test_groups_with_images_are_sampled_again_as_in_the_synchronous_run(name, tmp_path):
    dataset = pictures(True)
    dataset = dataset.add_column("flat", [i % 2 == 0 for i in range(ROWS)])
    again = {"dynamic_sampling": 4, "score_groups": 0, "name": name}
    fresh = run(tmp_path / "fresh", dataset, **again)
    assert len(fresh) == 3
    for mode, settings in AHEAD.items():
        check_equal(run(tmp_path / mode, dataset, **(settings | again)), fresh)


def rollouts(prompts: list, trainer) -> dict[str, list]:
    """Generate once with the images of the messages, as a `rollout_func` of a user."""
    ids = trainer.processing_class.apply_chat_template(prompts, tokenize=True, return_dict=True)
    parts = [[part for message in prompt for part in message["content"]] for prompt in prompts]
    images = [[part["image"] for part in row if part["type"] == "image"] for row in parts]
    prompt_ids, completion_ids, logprobs, _ = trainer.vllm_generation.generate(
        ids["input_ids"], images, GROUP
    )
    logprobs = [[token[0] for token in row] for row in logprobs]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}


@pytest.mark.parametrize("name", NAMES)
def test_a_rollout_func_gets_images_ahead_as_in_the_synchronous_run(name, tmp_path):
    own = {"name": name, "keywords": {"rollout_func": rollouts}}
    fresh = run(tmp_path / "fresh", pictures(True), **own)
    assert len(fresh) == 3
    for mode, settings in AHEAD.items():
        check_equal(run(tmp_path / mode, pictures(True), **own, **settings), fresh)


END_OF_TURN = 263  # <|im_end|>
CALLS = {
    "qwen3_vl": '<tool_call>\n{"name": "look", "arguments": {"angle": ANGLE}}\n</tool_call>',
    "qwen3_5": "<tool_call>\n<function=look>\n<parameter=angle>\nANGLE\n</parameter>\n</function>\n</tool_call>",
}


def look(angle: int) -> list:
    """Look in a direction.

    Args:
        angle: Direction in degrees.
    """
    picture = Picture.fromarray(np.full((40, 50 + 10 * angle, 3), 25 * angle, np.uint8))
    return [{"type": "image", "image": picture}, {"type": "text", "text": "seen"}]


class LookingEngine(PictureEngine):
    """Calls the tool in most turns, in a direction that depends on prompt, pixels and seed."""

    def complete(self, request, seed: int, max_tokens: int) -> Rollout:
        first, second, *_ = super().complete(request, seed, max_tokens).tokens.tolist()
        call = CALLS[self._model.config.model_type].replace("ANGLE", str(second % 10))
        text = call if first % 3 else "ok"
        tokens = tiny_tokenizer().encode(text) + [END_OF_TURN]
        tokens = np.array(tokens[:max_tokens], np.int32)
        return Rollout(tokens, np.full(len(tokens), -5.0, np.float32), self.version, 0)


class Room:
    """An environment that shows an image before the first turn, and has a tool that shows others."""

    def reset(self, prompt, **_) -> list:
        return look(len(prompt[0]["content"]))

    def look(self, angle: int) -> list:
        """Look in a direction.

        Args:
            angle: Direction in degrees.
        """
        return look(angle)


LOOKS = {
    "tool": ({"tools": [look]}, False),
    "tool, images in the dataset": ({"tools": [look]}, True),
    "environment": ({"environment_factory": Room}, False),
}


@pytest.mark.parametrize("name", ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("source", LOOKS)
def test_images_of_tools_ahead_are_those_of_the_synchronous_run(name, source, tmp_path):
    keywords, in_dataset = LOOKS[source]
    dataset = pictures(True) if in_dataset else pictures(True).remove_columns("images")
    own = {
        "name": name, "keywords": keywords, "engine": LookingEngine, "max_completion_length": 600
    }  # fmt: skip
    with mock.patch("trl_multinode.trainer.check_images") as checked:
        fresh = run(tmp_path / "fresh", dataset, **own)
    # with sharded weights, the images of tools count too
    rows = [row for call in checked.call_args_list for row in call.args[1]]
    assert len(fresh) == 3 and any(row.get("images") for row in rows)
    for mode, settings in AHEAD.items():
        check_equal(run(tmp_path / mode, dataset, **own, **settings), fresh)


def test_a_slice_without_images_is_trained(tmp_path):
    """TRL passes empty images to the model, whose vision tower fails with them."""
    slices = {"per_device_train_batch_size": GROUP, "gradient_accumulation_steps": 2}
    outputs = run(tmp_path, pictures(False), name="qwen3_vl", **slices)
    assert any(0 in output["num_images"] for output in outputs)


@pytest.mark.nightly  # test_agents resumes rollouts of text
@pytest.mark.parametrize("mode", AHEAD)
def test_rollouts_with_images_that_were_open_at_a_checkpoint_are_made_again(mode, tmp_path):
    settings = AHEAD[mode] | {"save_strategy": "steps", "save_steps": 1}
    whole = run(tmp_path / "run", pictures(True), **settings)
    resumed = run(tmp_path / "run", pictures(True), tmp_path / "run" / "checkpoint-1", **settings)
    check_equal(resumed, whole[1:])
