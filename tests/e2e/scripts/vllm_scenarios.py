"""Scenarios that only vLLM can serve: what the fake engine refuses, and pictures. See `scenarios.py`."""

from pathlib import Path

import numpy as np
import trl
from both_arms import Scenario
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Picture
from scenarios import scenario

from trl_multinode.testing.architectures import model_for


@scenario
def structured_outputs(folder: Path) -> Scenario:
    """The engine's log-probs are those of digits only, so TRL's correction would leave next to nothing of the loss."""
    settings = {"vllm_structured_outputs_regex": "[0-9]{3}", "vllm_importance_sampling_correction": False}
    made = Scenario(settings | {"log_completions": True})
    made.observe = texts
    return made


STOPS = list("aeiou")


@scenario
def stop_strings(folder: Path) -> Scenario:
    """And every other setting of the sampler."""
    made = Scenario({
        "generation_kwargs": {"stop": STOPS, "include_stop_str_in_output": True, "bad_words": ["the"]},
        "top_k": 250, "top_p": 0.99, "min_p": 1e-4, "repetition_penalty": 1.05, "temperature": 1.1,
        "max_completion_length": 64, "log_completions": True,
    })  # fmt: skip
    made.observe = texts
    return made


def texts(trainer) -> dict:
    return {"completions": list(trainer._logs["completion"])}


TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
)


class EmptyForNone(trl.GRPOTrainer):
    """TRL 1.16 cannot score a batch in which some prompts have no picture: it hands the processor `None` for them."""

    def _tokenize_prompts(self, prompts):
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        return prompt_ids, images and [row or [] for row in images], fields


@scenario
def pictures(folder: Path) -> Scenario:
    """On every rank a prompt with two pictures, each of its own size, and one without, in every batch. A sampled image
    token would want another picture, so none may be."""
    found = model_for("idefics3")
    found.processing_class.chat_template = TEMPLATE
    random = np.random.default_rng(0)
    images = [Picture.fromarray(random.integers(0, 256, (30 + i, 50, 3), dtype=np.uint8)) for i in range(32)]
    columns = {
        "prompt": [[{"role": "user", "content": f"{i} is"}] for i in range(32)],
        "images": [images[i : i + 2] if i % 2 else [] for i in range(32)],
    }
    features = {"prompt": [{"role": Value("string"), "content": Value("string")}], "images": List(Image())}
    made = Scenario(
        {
            "trust_remote_code": True, "generation_kwargs": {"allowed_token_ids": list(range(258))},
            "vllm_importance_sampling_correction": False, "num_generations": 2, "shuffle_dataset": False,
        },
        found.model, found.processing_class, dataset=Dataset.from_dict(columns, Features(features)), trls=EmptyForNone,
    )  # fmt: skip
    made.run = with_pictures_counted
    made.observe = lambda trainer: {"pictures": trainer.pictures}
    return made


def with_pictures_counted(trainer) -> None:
    """Of every prompt that TRL asks completions for."""
    generate, trainer.pictures = trainer.vllm_generation.generate, []

    def counted(prompts, images, *args, **kwargs):
        trainer.pictures.append([len(row) for row in images])
        return generate(prompts, images, *args, **kwargs)

    trainer.vllm_generation.generate = counted
    trainer.train()
