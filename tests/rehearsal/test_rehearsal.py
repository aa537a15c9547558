"""A rehearsal runs the longest rows and leaves no trace: real trainers on forked gloo ranks, with and without it."""

import random
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forks import forked
from replays import ShortReplay, make, on_ranks
from transformers import TrainerCallback

from trl_multinode.errors import EngineDiedError, RehearsalError
from trl_multinode.rehearsal import rehearsal as rehearsal_module
from trl_multinode.rehearsal.rehearsal import Rehearsal
from trl_multinode.rehearsal.rows import Rows, batch_of, longest_row, micro_batches
from trl_multinode.rehearsal.state_memory import reserve_state, state_bytes
from trl_multinode.testing.models import tiny_qwen2

# ---- the longest rows


@pytest.mark.parametrize(
    ("prompt", "completion", "limit", "expected"),
    [
        (100, 50, 1000, (100, 50)),
        (100, None, 1000, (100, 900)),  # only the context bounds a completion
        (100, 950, 1000, (100, 900)),  # an engine ends a completion where its context ends
        (None, 200, 1000, (800, 200)),  # prompts of an environment: they may fill the context
        (None, None, 1000, (1, 999)),
        (1200, 50, 1000, (999, 1)),  # generation refuses this prompt; the rehearsal has no opinion
    ],
)
def test_the_longest_row_ends_where_the_first_limit_does(prompt, completion, limit, expected):
    assert longest_row(prompt, completion, limit) == expected


@pytest.mark.parametrize(
    ("cap", "multiple", "most", "expected"),
    [
        (400, 1, 64, [(4, 100)]),  # four rows fill it
        (390, 1, 64, [(3, 100), (4, 97)]),  # three rows leave a quarter: also four shorter ones
        (100, 1, 64, [(1, 100)]),
        (150, 1, 64, [(1, 100), (2, 75)]),
        (400, 64, 64, [(3, 100)]),  # padded to 128
        (1000, 1, 2, [(2, 100)]),  # an optimizer step has no more rows
    ],
)
def test_the_largest_micro_batches_fill_their_limit(cap, multiple, most, expected):
    found = micro_batches(60, 40, cap, multiple, most)
    assert [(rows.count, rows.length) for rows in found] == expected
    assert all(rows.prompt > 0 and rows.completion > 0 for rows in found)


# ---- no trace


class Trace(TrainerCallback):
    """Everything that a run without a rehearsal could tell from one with it."""

    def __init__(self):
        self.seen: list = []

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **_):
        if state.global_step == 0:
            numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
            gradients = sum(parameter.grad is not None for parameter in model.parameters())
            self.seen += [numbers, gradients, len(optimizer.state), model.training]


def trained(folder, rehearse: bool, **settings) -> list:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = tiny_qwen2(vocab_size=258, seed=1)
    model.config._name_or_path = str(folder / "reference")
    model.config.attention_dropout = 0.3  # a forward pass then draws random numbers
    defaults = {"max_steps": 3, "optim": "adamw_torch", "rehearse_longest": rehearse}
    trainer = make(folder, model=model, **(defaults | settings))
    for layer in trainer.accelerator.unwrap_model(trainer.model).modules():
        if hasattr(layer, "attention_dropout"):
            layer.attention_dropout = 0.3
    trace = Trace()
    trainer.add_callback(trace)
    trainer.train()
    logs = [
        {name: value for name, value in entry.items() if "time" not in name and "per_second" not in name
         and "runtime" not in name and "lost_s" not in name}
        for entry in trainer.state.log_history
    ]  # fmt: skip
    weights = [float(parameter.detach().double().sum()) for parameter in trainer.model.parameters()]
    gradients = [float(gradient.double().sum()) for gradient in trainer.gradients]
    return [trace.seen, logs, weights, gradients, trainer._step, dict(trainer.accelerator.gradient_state.__dict__)["sync_gradients"]]


CASES = {
    "plain": {},
    "balanced": {"micro_batch_tokens": 200},
    "reference, correction, iterations": {"beta": 0.05, "engine": "token_truncate", "num_iterations": 2},
    "entropy controller": {"use_adaptive_entropy": True, "entropy_target": 1.0, "top_entropy_quantile": 0.5},
    "lora, checkpointing": {"peft_config": "lora", "gradient_checkpointing": True},
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_with_and_without_bit_by_bit(case, tmp_path):
    def body(rank: int) -> list:
        shapes: list = []
        step = rehearsal_module.Trainer.training_step

        def spy(trainer, model, batch):
            shapes.append([list(batch["prompt_ids"].shape), list(batch["completion_ids"].shape)])
            return step(trainer, model, batch)

        rehearsal_module.Trainer = SimpleNamespace(training_step=spy)
        return [trained(tmp_path, rehearse, **CASES[case]) for rehearse in (False, True)] + [shapes]

    for without, with_it, shapes in on_ranks(body, 2, tmp_path):
        assert with_it == without
        assert without[0][0] and len(without[1]) > 3  # numbers were compared
        longest = [[[2, 21], [2, 64]], [[3, 16], [3, 50]]] if case == "balanced" else [[[4, 21], [4, 64]]]
        assert shapes == longest, "the longest prompt of the dataset, and `max_completion_length`"
