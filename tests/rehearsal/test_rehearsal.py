"""A rehearsal runs the longest rows and leaves no trace: real trainers on forked gloo ranks, with and without it."""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forks import forked
from replays import make, on_ranks
from transformers import Trainer, TrainerCallback

from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from trl_multinode.errors import EngineDiedError, RehearsalError
from trl_multinode.rehearsal import rehearsal as rehearsal_module
from trl_multinode.rehearsal.rehearsal import Rehearsal
from trl_multinode.rehearsal.rows import Rows, batch_of
from trl_multinode.rehearsal.state_memory import reserve_state, state_bytes

# e2e/test_continued decides that a run is the same with a rehearsal, test_longest_rows which rows it has
pytestmark = pytest.mark.nightly

# ---- no trace


class Trace(TrainerCallback):
    """Random numbers, gradients and optimizer state before step 1, when a rehearsal has ended."""

    def __init__(self):
        self.seen: list = []

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **_):
        if state.global_step == 0:
            numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
            gradients = sum(parameter.grad is not None for parameter in model.parameters())
            self.seen += [numbers, gradients, len(optimizer.state), model.training]


def dropping_model(folder):
    """A forward pass of it draws random numbers."""
    model = tiny_qwen2(vocab_size=258, seed=1)
    model.config._name_or_path = str(folder / "reference")
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    return model


def trained(folder, rehearse: bool, **settings):
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    defaults = {"max_steps": 2, "optim": "adamw_torch", "rehearse_longest": rehearse}
    trainer = make(folder, model=dropping_model(folder), **(defaults | settings))
    trainer.trace = Trace()
    trainer.add_callback(trainer.trace)
    trainer.train()
    return trainer


def result(trainer) -> list:
    clock = ("time", "per_second", "lost_s")
    logs = [
        {name: value for name, value in entry.items() if not any(part in name for part in clock)}
        for entry in trainer.state.log_history
    ]
    sums = [
        float(part.detach().double().sum())
        for part in (*trainer.model.parameters(), *trainer.gradients)
    ]
    position = [trainer._step, trainer.accelerator.gradient_state.sync_gradients]
    return [trainer.trace.seen, logs, sums, position]


def fields(batch) -> dict:
    return {name: [str(value.dtype), value.ndim] for name, value in batch.items()}


CASES = {
    "correction, reference, checkpointing": (2, {
        "engine": "token_truncate", "beta": 0.05, "num_iterations": 2, "gradient_checkpointing": True,
    }),
    "balanced": (2, {"micro_batch_tokens": 200, "engine": "sequence_mask"}),
    "lora, entropy controller": (1, {
        "peft_config": "lora", "engine": "token_mask", "use_adaptive_entropy": True, "entropy_target": 1.0,
        "top_entropy_quantile": 0.5,
    }),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_with_and_without_bit_by_bit(case, tmp_path):
    ranks, settings = CASES[case]

    def body(rank: int) -> list:
        shapes: list = []
        step = Trainer.training_step

        def spy(trainer, model, batch):
            shapes.append([list(batch["prompt_ids"].shape), list(batch["completion_ids"].shape)])
            return step(trainer, model, batch)

        rehearsal_module.Trainer = SimpleNamespace(training_step=spy)
        runs = [trained(tmp_path, rehearse, **settings) for rehearse in (False, True)]
        real, made_up = (
            fields(runs[0]._buffered_inputs[0]),
            fields(batch_of(runs[0], Rows(4, 21, 64))),
        )
        return [*map(result, runs), shapes, real, made_up]

    for without, with_it, shapes, real, made_up in on_ranks(body, ranks, tmp_path):
        assert with_it == without
        assert without[0][0] and len(without[1]) > 1  # numbers were compared
        longest = (
            [[[2, 21], [2, 64]], [[3, 16], [3, 50]]] if case == "balanced" else [[[4, 21], [4, 64]]]
        )
        assert shapes == longest, "the longest prompt of the dataset, and `max_completion_length`"
        assert made_up == real


# ---- memory


def failing(message: str):
    def training_step(trainer, model, batch):
        raise RuntimeError(message)

    return SimpleNamespace(training_step=training_step)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, r"4 rows of 21 \+ 64 .*`per_device_train_batch_size` 4"),
        ({"micro_batch_tokens": 340}, "4 rows of 21 .*`micro_batch_tokens` 340"),
    ],
)
def test_too_little_memory_names_rows_setting_and_cure(settings, expected, tmp_path, monkeypatch):
    def body(rank: int) -> None:
        trainer = make(tmp_path, rehearse_longest=True, **settings)
        rehearsal_module.Trainer = failing("CUDA out of memory. Tried to allocate 64 GiB")
        with pytest.raises(RehearsalError, match=f"rank 0: .*{expected}"):
            trainer.train()
        rehearsal_module.Trainer = failing("another reason")
        with pytest.raises(RuntimeError, match="another reason") as error:
            trainer.train()
        assert not isinstance(error.value, RehearsalError)

    with forked(body, 1, tmp_path) as (one,):
        assert one.result is None


def optimizers(model):
    parameters = list(model.parameters())
    return {
        "adam": (torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95)), 8.0),
        "sgd": (torch.optim.SGD(parameters, lr=1e-3), 0.0),
        "momentum": (torch.optim.SGD(parameters, lr=1e-3, momentum=0.9), 4.0),
    }


@pytest.mark.parametrize("name", ["adam", "sgd", "momentum"])
def test_the_reserved_memory_is_that_of_the_optimizers_state(name):
    model = torch.nn.Linear(1000, 10)
    optimizer, each = optimizers(model)[name]
    trainer = SimpleNamespace(model_wrapped=model, optimizer=optimizer)
    assert state_bytes(optimizer, model.weight) == each
    held, reason = reserve_state(trainer)
    assert not optimizer.state and reason == ""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tensors = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    assert sum(part.nbytes for part in held) == sum(
        value.nbytes for value in tensors if value.numel() > 1
    )
    if tensors:
        assert reserve_state(trainer) == ([], "it is allocated already")


def test_an_optimizer_that_cannot_be_tried_is_named():
    class Special(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("a parameter must have a name")

    model = torch.nn.Linear(10, 10)
    held, reason = reserve_state(
        SimpleNamespace(model_wrapped=model, optimizer=Special(model.parameters(), lr=0.1))
    )
    assert held == [] and "Special" in reason and "ValueError: a parameter must" in reason


# ---- generation


class Generation:
    """The engines of a rank: what they are sent, and an end on request."""

    def __init__(self, dies: bool):
        self.calls: list = []
        self._dies = dies

    def sync_weights(self):
        self.calls.append("sync")

    def rehearse(self, prompts, num_tokens):
        self.calls.append(
            (len(prompts), len(prompts[0]), num_tokens, len({tuple(p) for p in prompts}))
        )
        if self._dies:
            raise EngineDiedError("engine 0 of node 1 ended: CUDA out of memory")


class Host:
    """The part of `NodeHost` that a rehearsal uses; `notes` has what a failure would carry."""

    topology = "node 1, rank 2"

    def __init__(self):
        self.notes: list[str] = []
        self.aligned = 0
        self.watch = self.updates = self
        self.phases = lambda name: nullcontext()

    def noting(self, note: str):
        self.notes.append(note)
        return nullcontext()

    def align(self):
        self.aligned += 1


def trainer_on(generation: Generation) -> SimpleNamespace:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=258))
    return SimpleNamespace(
        host=Host(), vllm_generation=generation, model=SimpleNamespace(config=config), _tokenizer=tiny_tokenizer(),
        accelerator=SimpleNamespace(process_index=2, device=torch.device("cpu")),
        args=SimpleNamespace(per_device_train_batch_size=4, steps_per_generation=8),
    )  # fmt: skip


def test_a_round_of_different_rows_fills_the_engines_cache():
    trainer = trainer_on(Generation(dies=False))
    Rehearsal(trainer)._generate(500)
    assert (
        trainer.vllm_generation.calls == ["sync", (32, 484, 16, 32)] and trainer.host.aligned == 1
    )


def test_an_engine_that_ends_names_rows_setting_and_cure():
    trainer = trainer_on(Generation(dies=True))
    with pytest.raises(RehearsalError) as error:
        Rehearsal(trainer)._generate(500)
    text = str(error.value)
    assert text.startswith("node 1, rank 2: ") and "engine 0 of node 1 ended: CUDA" in text
    assert "32 rows of 500 tokens" in text and "`vllm_gpu_memory_utilization`" in text
    assert trainer.host.notes[0] in text, "the watch thread, which may be first, adds the same"
