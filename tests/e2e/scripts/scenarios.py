"""What users of TRL do with its GRPO trainer, one function each; `features.py` runs them under both trainers."""

from collections.abc import Callable
from pathlib import Path

from both_arms import STEPS, Scenario
from common import RANK
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from multinode_kit.models import tiny_qwen2
from multinode_kit.tool_model import tool_model, tool_tokenizer

SCENARIOS: dict[str, Callable[[Path], Scenario]] = {}
LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]


def scenario(make: Callable[[Path], Scenario]):
    SCENARIOS[make.__name__] = make
    return make


class AtSteps(TrainerCallback):
    """Calls `act(trainer, step)` before every step; the trainer is filled in later."""

    trainer = None

    def __init__(self, act: Callable):
        self.act = act

    def on_step_begin(self, args, state, control, **_):
        self.act(self.trainer, state.global_step)


def train_with(callback: AtSteps):
    def run(trainer):
        callback.trainer = trainer
        trainer.train()

    return run


def chats(rows: int = 32) -> Dataset:
    return Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": f"{i} + {i + 1}"}] for i in range(rows)]}
    )


@scenario
def losses(folder: Path) -> Scenario:
    """A loss per step."""
    callback = AtSteps(lambda trainer, step: setattr(trainer, "loss_type", LOSSES[step]))
    settings = {
        "loss_type": "vespo",
        "vllm_importance_sampling_mode": "token_truncate",
        "max_steps": len(LOSSES),
    }
    return Scenario(settings, keywords={"callbacks": [callback]}, run=train_with(callback))


@scenario
def reference_model(folder: Path) -> Scenario:
    """`beta > 0`, and the reference follows the policy at every step."""
    model = tiny_qwen2()
    # from where TRL loads the reference
    model.config._name_or_path = str(folder.parent / "reference")
    settings = {
        "beta": 0.1,
        "sync_ref_model": True,
        "ref_model_mixup_alpha": 0.5,
        "ref_model_sync_steps": 1,
    }
    return Scenario(settings, model=model)


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The sum.
    """
    return a + b


def turns(completions, **_):
    return [float(len(completion)) for completion in completions]


TOOL_SETTINGS = {
    "max_completion_length": 300,
    "max_tool_calling_iterations": 3,
    "learning_rate": 1e-3,
}


@scenario
def tools(folder: Path) -> Scenario:
    return Scenario(TOOL_SETTINGS, tool_model(), tool_tokenizer(), turns, chats(), {"tools": [add]})


class Adder:
    """An environment with a tool, a prompt of its own and a reward of its own."""

    def reset(self, **_) -> str:
        self.sum = 0
        return " Add!"

    def add(self, a: int, b: int) -> str:
        """
        Adds two numbers.

        Args:
            a: The first number.
            b: The second number.

        Returns:
            The sum so far.
        """
        self.sum += a + b
        return str(self.sum)

    def get_reward(self) -> float:
        return float(self.sum)


def two_turns(prompts, trainer) -> dict:
    """A user's rollout: generate, append a word that does not count, generate again; rank 1 a third time."""
    ids = trainer.processing_class(text=prompts)["input_ids"]
    word = trainer.processing_class(text=" then")["input_ids"]
    generate = trainer.vllm_generation.generate
    seeds = getattr(trainer.vllm_generation, "seeds", None)  # TRL's arm has none
    assert seeds is None or seeds.num_rows == len(prompts)
    _, completions, logprobs, _ = generate(
        prompts=ids, images=None, num_generations=trainer.num_generations
    )
    completions, logprobs = (
        [list(c) for c in completions],
        [[top[0] for top in row] for row in logprobs],
    )
    masks = [[1] * len(completion) for completion in completions]
    for _ in range(1 + RANK):
        longer = [
            prompt + completion + word for prompt, completion in zip(ids, completions, strict=True)
        ]
        _, more, their_logprobs, _ = generate(prompts=longer, images=None, num_generations=1)
        for row, new in enumerate(more):
            completions[row] += word + list(new)
            logprobs[row] += [0.0] * len(word) + [top[0] for top in their_logprobs[row]]
            masks[row] += [0] * len(word) + [1] * len(new)
    return {
        "prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs, "env_mask": masks,
        "num_turns": [2 + RANK] * len(ids),
    }  # fmt: skip


def by_turns(completion_ids, num_turns, **_):
    return [len(set(ids)) / count for ids, count in zip(completion_ids, num_turns, strict=True)]


@scenario
def rollout_func(folder: Path) -> Scenario:
    settings = {"max_completion_length": 12}
    return Scenario(settings, reward_funcs=by_turns, keywords={"rollout_func": two_turns})


@scenario
def schedule(folder: Path) -> Scenario:
    """Two generation batches of four micro-batches, each trained twice, two micro-batches an optimizer step."""
    return Scenario({
        "num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 8,
        "per_device_train_batch_size": 2,
    })  # fmt: skip


@scenario
def generation_batch_size(folder: Path) -> Scenario:
    """Groups straddle ranks and nodes."""
    return Scenario({"generation_batch_size": 16, "max_steps": 4, "num_generations": 8})


@scenario
def evaluation(folder: Path) -> Scenario:
    """After every second step, with fewer completions per prompt than in training."""
    made = Scenario({
        "eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2, "per_device_eval_batch_size": 4,
        "max_steps": 4,
    })  # fmt: skip
    made.keywords = {
        "eval_dataset": Dataset.from_dict({"prompt": [f"{i} - 1 =" for i in range(8)]})
    }
    return made


def with_adapter(**settings) -> Scenario:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR, task_type="CAUSAL_LM", **settings)
    return Scenario({"max_steps": STEPS, "beta": 0.1}, keywords={"peft_config": config})


@scenario
def lora(folder: Path) -> Scenario:
    return with_adapter()


@scenario
def without_vllm(folder: Path) -> Scenario:
    return Scenario({"use_vllm": False}, made_up=True)
