"""Scenarios that only vLLM can serve: what the fake engine refuses, and pictures. See `scenarios.py`."""

from pathlib import Path

import numpy as np
from both_arms import Scenario
from datasets import Dataset, Features, Image, Value
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


@scenario
def pictures(folder: Path) -> Scenario:
    """A picture of its own size in every prompt: TRL 1.16 scores no batch in which some have none with this processor.
    A sampled image token would want another picture, so none may be."""
    found = model_for("idefics3")
    found.processing_class.chat_template = TEMPLATE
    random = np.random.default_rng(0)
    images = [Picture.fromarray(random.integers(0, 256, (30 + i, 50, 3), dtype=np.uint8)) for i in range(32)]
    prompts = [[{"role": "user", "content": f"{i} is"}] for i in range(32)]
    columns = {"prompt": prompts, "image": images}
    features = {"prompt": [{"role": Value("string"), "content": Value("string")}], "image": Image()}
    settings = {"trust_remote_code": True, "generation_kwargs": {"allowed_token_ids": list(range(258))}}
    return Scenario(
        settings | {"vllm_importance_sampling_correction": False}, found.model, found.processing_class,
        dataset=Dataset.from_dict(columns, Features(features)),
    )  # fmt: skip
