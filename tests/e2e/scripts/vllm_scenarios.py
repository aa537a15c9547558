"""Scenarios that only vLLM can serve: what the fake engine refuses, and pictures. See `scenarios.py`."""

from pathlib import Path

import numpy as np
import torch
import trl
from both_arms import Scenario, Weights
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Picture
from scenarios import scenario
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from trl_multinode.testing.architectures import model_for
from trl_multinode.testing.models import tiny_qwen2


@scenario
def structured_outputs(folder: Path) -> Scenario:
    """Only digits, in rows of different lengths. TRL's correction is on, and must leave every row its whole weight."""
    made = Scenario({
        "vllm_structured_outputs_regex": "[0-9]{3,60}", "top_p": 0.8, "temperature": TEMPERATURE,
        "max_completion_length": 64, "log_completions": True,
    })  # fmt: skip
    made.run, made.observe = with_first_batch_kept, compared_with_autograd
    return made


TEMPERATURE = 0.7


def with_first_batch_kept(trainer) -> None:
    make, trainer.batches = trainer._generate_and_score_completions, []

    def kept(inputs):
        trainer.batches.append(make(inputs))
        return dict(trainer.batches[-1])

    trainer._generate_and_score_completions = kept
    trainer.train()


def compared_with_autograd(trainer) -> dict:
    """The first step against log-probs over the whole vocabulary, differentiated; on all ranks."""
    first, (before, after) = trainer.batches[0], weights_of(trainer)[:2]
    error = (reference_gradient(first) - (before - after) / trainer.args.learning_rate).abs().max().item()
    ratios = torch.cat([batch["importance_sampling_ratio"].flatten() for batch in trainer.batches])
    print(f"gradient off by {error:.1e}, ratios {ratios.min():.5f} to {ratios.max():.5f}", flush=True)
    lengths = {len(text) for text in trainer._logs["completion"]}
    return texts(trainer) | {
        "gradient_is_the_reference": error < 1e-5,
        "rows_have_their_weight": bool((ratios - 1).abs().max() < 1e-3),
        "lengths": sorted(lengths),
    }


def weights_of(trainer) -> list[torch.Tensor]:
    (kept,) = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Weights))
    return kept.steps


def reference_gradient(batch: dict) -> torch.Tensor:
    """Gradient of TRL's loss `dapo` on policy: - advantage x log-prob, over the number of tokens of all ranks."""
    unset_hf_deepspeed_config()  # under it the model would be sharded
    model, count = tiny_qwen2(), batch["completion_mask"].sum()
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    rows = zip(*(batch[name] for name in names), strict=True)
    for (prompt, known, completion, mask), advantage in zip(rows, batch["advantages"], strict=True):
        prompt, completion = prompt[known.bool()], completion[mask.bool()]
        logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        scores = (logits / TEMPERATURE).log_softmax(-1).gather(1, completion[:, None])
        (-advantage * scores.sum()).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.distributed.all_reduce(gradient)
    torch.distributed.all_reduce(count)
    return gradient / count


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
