"""Further scenarios, see `scenarios.py`: what users do besides, FSDP of CPUs, and what only vLLM can serve."""

import asyncio
import json
import uuid
from pathlib import Path

import numpy as np
import torch
import trl
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from both_arms import Scenario, Weights, distinct
from common import RANK
from datasets import Dataset, Features, Image, List, Value, load_dataset
from PIL import Image as Picture
from scenarios import TOOL_SETTINGS, Adder, chats, scenario, with_adapter
from tensorboardX.proto.event_pb2 import Event
from trackio.sqlite_storage import SQLiteStorage
from transformers import Qwen2Config, Qwen2ForSequenceClassification, TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from multinode_kit.architectures import model_for
from multinode_kit.models import tiny_qwen2
from multinode_kit.tool_model import tool_model, tool_tokenizer

# ---- accelerate 1.15 makes FSDP of several GPUs only; with this of several CPUs too, by the same plugin

of_accelerate = AcceleratorState.__init__


def with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
    of_accelerate(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.device.type == "cpu":
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        PartialState._shared_state["distributed_type"] = self.distributed_type  # as for GPUs


AcceleratorState.__init__ = with_fsdp


@scenario
def plain(folder: Path) -> Scenario:
    return Scenario()


@scenario
def balanced(folder: Path) -> Scenario:
    """Rows move between all ranks, and between those of a node."""
    return Scenario(node_settings={"micro_batch_tokens": 64, "balance_across": "world"})


@scenario
def loss_options(folder: Path) -> Scenario:
    """What changes a loss besides its name."""
    return Scenario({
        "importance_sampling_level": "sequence", "loss_type": "grpo", "scale_rewards": "batch", "epsilon_high": 0.3,
        "mask_truncated_completions": True, "top_entropy_quantile": 0.5, "entropy_coef": 0.01, "temperature": 0.9,
        "num_iterations": 2, "off_policy_mask_threshold": 5.0, "max_completion_length": 100,
    })  # fmt: skip


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
    made = Scenario(
        {
            "reward_weights": [1.0, 0.5, 2.0, 0.25],
            "multi_objective_aggregation": "normalize_then_sum",
        }
    )
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
        {"log_completions": True, "num_completions_to_print": 1},
        tool_model(),
        tool_tokenizer(),
        remainder,
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
    made = Scenario(
        {"report_to": ["tensorboard", "trackio"], "project": project, "trackio_space_id": None}
    )
    made.observe = lambda trainer: (
        tracked(Path(trainer.args.output_dir), project) if RANK == 0 else {}
    )
    return made


def tracked(output_dir: Path, project: str) -> dict:
    """The rewards that both have written."""
    [run] = SQLiteStorage.get_runs(project)
    logs = SQLiteStorage.get_logs(project, run)
    return {
        "tensorboard": [
            value.simple_value for value in scalars(output_dir) if value.tag == "train/reward"
        ],
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


@scenario
def environments(folder: Path) -> Scenario:
    made = Scenario(
        TOOL_SETTINGS, tool_model(), tool_tokenizer(), [], chats(), {"environment_factory": Adder}
    )
    made.observe = lambda trainer: {
        "sums": [environment.sum for environment in trainer.environments]
    }
    return made


@scenario
def iterable_dataset(folder: Path) -> Scenario:
    made = Scenario()
    made.dataset = made.dataset.to_iterable_dataset()
    return made


@scenario
def streamed_dataset(folder: Path) -> Scenario:
    """From a file on disk, row by row, with columns that the reward gets."""
    path = folder / f"rows{RANK}.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{i} =", "answer": i}) + "\n" for i in range(64))
    )
    stream = load_dataset("json", data_files=str(path), split="train", streaming=True)
    return Scenario(reward_funcs=near_the_answer, dataset=stream)


def near_the_answer(completion_ids, answer, **_):
    return [
        -abs(len(ids) - number % 10) * 1.0
        for ids, number in zip(completion_ids, answer, strict=True)
    ]


@scenario
def gradient_checkpointing(folder: Path) -> Scenario:
    return Scenario({"gradient_checkpointing": True})


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


# ---- vLLM


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
    if (scores := getattr(trainer, "_loss_scores", None)) is not None:
        add, trainer.ratios = scores.add, []

        def added(logps):
            add(logps)
            trainer.ratios.append(scores._batch["importance_sampling_ratio"].flatten())

        scores.add = added
    trainer.train()


def compared_with_autograd(trainer) -> dict:
    """The first step against log-probs over the whole vocabulary, differentiated; on all ranks."""
    first, (before, after) = trainer.batches[0], weights_of(trainer)[:2]
    error = (
        (reference_gradient(first) - (before - after) / trainer.args.learning_rate)
        .abs()
        .max()
        .item()
    )
    # TRL's arm has them in its rounds
    of_rounds = [batch.get("importance_sampling_ratio") for batch in trainer.batches]
    ratios = torch.cat(getattr(trainer, "ratios", None) or [one.flatten() for one in of_rounds])
    print(
        f"gradient off by {error:.1e}, ratios {ratios.min():.5f} to {ratios.max():.5f}", flush=True
    )
    lengths = {len(text) for text in trainer._logs["completion"]}
    return texts(trainer) | {
        "gradient_is_the_reference": error < 1e-5,
        "rows_have_their_weight": bool((ratios - 1).abs().max() < 1e-3),
        "lengths": sorted(lengths),
    }


def weights_of(trainer) -> list[torch.Tensor]:
    (kept,) = (
        callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Weights)
    )
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
    images = [
        Picture.fromarray(random.integers(0, 256, (30 + i, 50, 3), dtype=np.uint8))
        for i in range(32)
    ]
    columns = {
        "prompt": [[{"role": "user", "content": f"{i} is"}] for i in range(32)],
        "images": [images[i : i + 2] if i % 2 else [] for i in range(32)],
    }
    features = {
        "prompt": [{"role": Value("string"), "content": Value("string")}],
        "images": List(Image()),
    }
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
