"""What users of TRL do with its GRPO trainer, one function each; `features.py` runs them under both trainers."""

import asyncio
import json
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
from both_arms import STEPS, Scenario, distinct
from common import RANK
from datasets import Dataset, load_dataset
from peft import LoraConfig
from tensorboardX.proto.event_pb2 import Event
from trackio.sqlite_storage import SQLiteStorage
from transformers import Qwen2Config, Qwen2ForSequenceClassification, TrainerCallback

from trl_multinode.testing.models import tiny_qwen2
from trl_multinode.testing.tool_model import tool_model, tool_tokenizer

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
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i} + {i + 1}"}] for i in range(rows)]})


@scenario
def plain(folder: Path) -> Scenario:
    return Scenario()


@scenario
def losses(folder: Path) -> Scenario:
    """A loss per step."""
    callback = AtSteps(lambda trainer, step: setattr(trainer, "loss_type", LOSSES[step]))
    settings = {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate", "max_steps": len(LOSSES)}
    return Scenario(settings, keywords={"callbacks": [callback]}, run=train_with(callback))


@scenario
def loss_options(folder: Path) -> Scenario:
    """What changes a loss besides its name."""
    return Scenario({
        "importance_sampling_level": "sequence", "loss_type": "grpo", "scale_rewards": "batch", "epsilon_high": 0.3,
        "mask_truncated_completions": True, "top_entropy_quantile": 0.5, "entropy_coef": 0.01, "temperature": 0.9,
        "num_iterations": 2, "off_policy_mask_threshold": 5.0, "max_completion_length": 100,
    })  # fmt: skip


@scenario
def reference_model(folder: Path) -> Scenario:
    """`beta > 0`, and the reference follows the policy at every step."""
    model = tiny_qwen2()
    model.config._name_or_path = str(folder.parent / "reference")  # from where TRL loads the reference
    settings = {"beta": 0.1, "sync_ref_model": True, "ref_model_mixup_alpha": 0.5, "ref_model_sync_steps": 1}
    return Scenario(settings, model=model)


async def slow_to_answer(completion_ids, **_):
    await asyncio.sleep(0.01)
    return [float(len(ids)) for ids in completion_ids]


def none_for_every_third(completion_ids, **_):
    return [None if i % 3 == 0 else float(ids[0] % 5) for i, ids in enumerate(completion_ids)]


def reward_model():
    config = Qwen2Config(
        vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Qwen2ForSequenceClassification(config)


@scenario
def rewards(folder: Path) -> Scenario:
    """Several reward functions with weights: plain, async, one that does not apply to every row, and a model."""
    made = Scenario({"reward_weights": [1.0, 0.5, 2.0, 0.25], "multi_objective_aggregation": "normalize_then_sum"})
    made.reward_funcs = [distinct, slow_to_answer, none_for_every_third, reward_model()]
    made.keywords = {"reward_processing_classes": [None, None, None, made.tokenizer]}
    return made


def remainder(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


class Counter(TrainerCallback):
    """A user's callback."""

    def __init__(self):
        self.seen: list[str] = []

    def on_step_end(self, args, state, control, **_):
        self.seen.append(f"step {state.global_step}")

    def on_log(self, args, state, control, logs=None, **_):
        self.seen.append(f"log {sorted(key for key in logs if key in ('loss', 'reward'))}")


@scenario
def conversations(folder: Path) -> Scenario:
    """Chats through a template, completions in the log, a user's callback."""
    counter = Counter()
    made = Scenario(
        {"log_completions": True, "num_completions_to_print": 1}, tool_model(), tool_tokenizer(), remainder
    )
    made.dataset = chats()
    made.keywords = {"callbacks": [counter]}
    made.observe = lambda trainer: {
        "callback": counter.seen,
        "texts": [list(trainer._logs[column]) for column in ("prompt", "completion")],
    }
    return made


@scenario
def trackers(folder: Path) -> Scenario:
    """TensorBoard and trackio get TRL's numbers."""
    project = f"arm-{uuid.uuid4().hex}"  # forked launches share trackio's folder
    made = Scenario({"report_to": ["tensorboard", "trackio"], "project": project, "trackio_space_id": None})
    made.observe = lambda trainer: tracked(Path(trainer.args.output_dir), project) if RANK == 0 else {}
    return made


def tracked(output_dir: Path, project: str) -> dict:
    """The rewards that both have written."""
    [run] = SQLiteStorage.get_runs(project)
    logs = SQLiteStorage.get_logs(project, run)
    return {
        "tensorboard": [value.simple_value for value in scalars(output_dir) if value.tag == "train/reward"],
        "trackio": [log["train/reward"] for log in logs if "train/reward" in log],
    }


def scalars(output_dir: Path):
    """Of TensorBoard's files: records of length (8 bytes), its checksum (4), an event, its checksum (4)."""
    for path in output_dir.rglob("events.out.tfevents*"):
        data = path.read_bytes()
        while data:
            end = 12 + int.from_bytes(data[:8], "little")
            yield from Event.FromString(data[12:end]).summary.value
            data = data[end + 4 :]


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


TOOL_SETTINGS = {"max_completion_length": 300, "max_tool_calling_iterations": 3, "learning_rate": 1e-3}


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


@scenario
def environments(folder: Path) -> Scenario:
    made = Scenario(TOOL_SETTINGS, tool_model(), tool_tokenizer(), [], chats(), {"environment_factory": Adder})
    made.observe = lambda trainer: {"sums": [environment.sum for environment in trainer.environments]}
    return made


def two_turns(prompts, trainer) -> dict:
    """A user's rollout: generate, append a word that does not count, generate again; rank 1 a third time."""
    ids = trainer.processing_class(text=prompts)["input_ids"]
    word = trainer.processing_class(text=" then")["input_ids"]
    generate = trainer.vllm_generation.generate
    seeds = getattr(trainer.vllm_generation, "seeds", None)  # TRL's arm has none
    assert seeds is None or seeds.num_rows == len(prompts)
    _, completions, logprobs, _ = generate(prompts=ids, images=None, num_generations=trainer.num_generations)
    completions, logprobs = [list(c) for c in completions], [[top[0] for top in row] for row in logprobs]
    masks = [[1] * len(completion) for completion in completions]
    for _ in range(1 + RANK):
        longer = [prompt + completion + word for prompt, completion in zip(ids, completions, strict=True)]
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
    return Scenario({"generation_batch_size": 16, "max_steps": 4, "num_generations": 8})


@scenario
def iterable_dataset(folder: Path) -> Scenario:
    made = Scenario()
    made.dataset = made.dataset.to_iterable_dataset()
    return made


@scenario
def streamed_dataset(folder: Path) -> Scenario:
    """From a file on disk, row by row, with columns that the reward gets."""
    path = folder / f"rows{RANK}.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} =", "answer": i}) + "\n" for i in range(64)))
    stream = load_dataset("json", data_files=str(path), split="train", streaming=True)
    return Scenario(reward_funcs=near_the_answer, dataset=stream)


def near_the_answer(completion_ids, answer, **_):
    return [-abs(len(ids) - number % 10) * 1.0 for ids, number in zip(completion_ids, answer, strict=True)]


@scenario
def evaluation(folder: Path) -> Scenario:
    """After every second step, with fewer completions per prompt than in training."""
    made = Scenario({
        "eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2, "per_device_eval_batch_size": 4,
        "max_steps": 4,
    })  # fmt: skip
    made.keywords = {"eval_dataset": Dataset.from_dict({"prompt": [f"{i} - 1 =" for i in range(8)]})}
    return made


@scenario
def gradient_checkpointing(folder: Path) -> Scenario:
    return Scenario({"gradient_checkpointing": True})


def with_adapter(**settings) -> Scenario:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR, task_type="CAUSAL_LM", **settings)
    return Scenario({"max_steps": STEPS, "beta": 0.1}, keywords={"peft_config": config})


@scenario
def lora(folder: Path) -> Scenario:
    return with_adapter()


@scenario
def rslora(folder: Path) -> Scenario:
    return with_adapter(use_rslora=True)


@scenario
def dora(folder: Path) -> Scenario:
    return with_adapter(use_dora=True)


@scenario
def server_mode(folder: Path) -> Scenario:
    return Scenario({"use_vllm": True, "vllm_mode": "server"}, made_up=True)


@scenario
def colocate_mode(folder: Path) -> Scenario:
    return Scenario({"use_vllm": True, "vllm_mode": "colocate"}, made_up=True)


@scenario
def without_vllm(folder: Path) -> Scenario:
    return Scenario({"use_vllm": False}, made_up=True)
