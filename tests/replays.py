"""Short GRPO runs on forked ranks with made-up completions, and the gradients of their optimizer steps."""

import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from forks import on_gloo_ranks
from peft import LoraConfig
from transformers import TrainerCallback

from multinode_kit.launch_files import free_port
from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from multinode_kit.replay import ReplayTrainer, seeded
from trl_multinode import GRPOConfig

PROMPTS = [f"{i} " * (1 + i % 7) for i in range(64)]  # 2 to 21 tokens


class Gradients(TrainerCallback):
    """The whole gradient of every optimizer step, averaged over ranks, as the optimizer gets it."""

    def __init__(self):
        self.steps: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        trained = [p for p in model.parameters() if p.requires_grad]
        # without an image a vision tower has no gradient
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        self.steps.append(torch.cat([gradient.flatten() for gradient in gradients]))


class ShortReplay(ReplayTrainer):
    """Completions of 1 to 63 tokens; with `tool_tokens` a third of them count as a tool's."""

    tool_tokens = False

    @staticmethod
    def length_of(prompt: list[int], generation: int) -> int:
        return int(seeded("length", *prompt, generation).integers(1, 64))

    def _generate(self, prompts):
        prompt_ids, completion_ids, mask, *others = super()._generate(prompts)
        masks = [[int((i + len(ids)) % 3 > 0) for i in range(len(ids))] for ids in completion_ids]
        return prompt_ids, completion_ids, masks if self.tool_tokens else mask, *others


def reward(completion_ids, **_):
    return [float(len(set(ids))) for ids in completion_ids]


def make(
    folder: Path, model=None, engine=None, tool_tokens=False, prompts=PROMPTS, peft_config=None, rollout_func=None,
    kind=ShortReplay, dataset=None, processing_class=None, **settings,
):  # fmt: skip
    """A trainer with SGD and no clipping, so that gradients of later steps can be compared too.

    Args:
        engine (`str`, *optional*):
            A `vllm_importance_sampling_mode`: the trainer corrects as if an engine had sampled.
        peft_config (`str`, *optional*):
            `"lora"`.
    """
    defaults = {
        "use_cpu": True, "bf16": False, "use_vllm": False, "num_generations": 4, "max_completion_length": 64,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "gradient_checkpointing": False,
        "disable_tqdm": True, "optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 1e-2, "max_steps": 1,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "output_dir": str(folder),
    }  # fmt: skip
    dataset = dataset or Dataset.from_dict({"prompt": prompts})
    if model is None:
        model = tiny_qwen2(vocab_size=258, seed=1)
        # from where TRL loads the reference model
        model.config._name_or_path = str(folder / "reference")
    args = GRPOConfig(**(defaults | settings))
    gradients = Gradients()
    lora = (
        LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        if peft_config
        else None
    )
    trainer = kind(
        model,
        reward,
        args,
        dataset,
        processing_class=processing_class or tiny_tokenizer(),
        callbacks=[gradients],
        peft_config=lora,
    )
    trainer.gradients, trainer.tool_tokens = gradients.steps, tool_tokens
    trainer.rollout_func = rollout_func  # here, because TRL's constructor requires vLLM with one
    if engine:
        trainer.use_vllm, trainer.vllm_importance_sampling_mode = True, engine
        if trainer._balance is not None:
            trainer._balance = type(trainer._balance)(trainer)  # it read the mode
    return trainer


def logged(trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def on_ranks(body, count: int, folder: Path, ranks_per_node: int | None = None) -> list[Any]:
    """What `body(rank)` returned on each rank of a gloo world that looks like a launch of one or more nodes."""
    port, per_node = free_port(), ranks_per_node or count
    # Other weights than the trained model's, or the KL term of a first step would be zero
    # here: the ranks would race
    tiny_qwen2(vocab_size=258, seed=0).save_pretrained(folder / "reference")

    def launched(rank: int) -> Any:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank % per_node), LOCAL_WORLD_SIZE=str(per_node),
            GROUP_RANK=str(rank // per_node), GROUP_WORLD_SIZE=str(count // per_node),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        return body(rank)

    return on_gloo_ranks(launched, count, folder)
