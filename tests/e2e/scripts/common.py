"""What the launched scripts share."""

import json
import os
from pathlib import Path

import deepspeed
import torch
from datasets import Dataset

from multinode_kit.models import tiny_tokenizer
from trl_multinode import GRPOConfig, GRPOTrainer

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])


class Recorder:
    """A reward function that keeps what it saw. Reward: distinct tokens of the completion."""

    __name__ = "recorder"

    def __init__(self):
        self.rows: list[list] = []

    def __call__(self, prompts, completion_ids, **_):
        self.rows += [
            [prompt, list(ids)] for prompt, ids in zip(prompts, completion_ids, strict=True)
        ]
        return [float(len(set(ids))) for ids in completion_ids]


def make_trainer(
    model, reward, folder: str, prompts: list, eval_prompts: list[str] | None = None, iterable: bool = False,
    **settings,
) -> GRPOTrainer:  # fmt: skip
    peft_config = settings.pop("peft_config", None)
    loops = ("tools", "environment_factory", "harness")
    keywords = {name: settings.pop(name) for name in loops if name in settings}
    tokenizer = settings.pop("processing_class", None) or tiny_tokenizer()
    dataset = settings.pop("dataset", None) or Dataset.from_dict({"prompt": prompts})
    eval_dataset = settings.pop("eval_dataset", None)
    if eval_prompts:
        eval_dataset = Dataset.from_dict({"prompt": eval_prompts})
    args = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=settings.pop("bf16", False),
        num_generations=4,
        max_completion_length=settings.pop("max_completion_length", 16),
        logging_steps=1,
        report_to=[],
        save_strategy=settings.pop("save_strategy", "no"),
        gradient_checkpointing=False,
        disable_tqdm=True,
        **settings,
    )
    if "ENGINES_OF_NODES" in os.environ:
        remote = os.environ.get("REMOTE_ENGINES")
        args.min_engines = int(remote) if remote else None
        args.num_engines = int(os.environ["ENGINES_OF_NODES"][int(os.environ["GROUP_RANK"])])
    return GRPOTrainer(
        model, reward, args, dataset.to_iterable_dataset() if iterable else dataset,
        eval_dataset=eval_dataset, processing_class=tokenizer,
        peft_config=peft_config, **keywords,
    )  # fmt: skip


@torch.no_grad()
def perturb(model) -> None:
    """Every parameter moves by noise of 0.05, the same on all ranks."""
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        if RANK == 0:
            for parameter in parameters:
                parameter.add_(torch.randn_like(parameter) * 0.05)


def write_result(folder: str, name: str = "result", /, **values) -> None:
    """Into a file of its own per rank; whole or not at all."""
    path = Path(folder) / f"{name}_rank{RANK}.json"
    path.with_suffix(".part").write_text(json.dumps(values))
    path.with_suffix(".part").rename(path)
