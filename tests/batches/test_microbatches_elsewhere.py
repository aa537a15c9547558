"""Balanced micro-batches with a `rollout_func` or one process, and what keeps TRL's cut."""

import ast
import inspect
import operator
import textwrap
from collections import Counter
from unittest import mock

import pytest
import torch
import trl
from forks import forked
from replays import PROMPTS, logged, make, on_ranks
from test_microbatches import CAP, SHORT_WINDOW, check, compare
from trl import GRPOTrainer

from trl_multinode.batches.layouts import MASKS, PER_TOKEN
from trl_multinode.batches.microbatches import reason_against
from trl_multinode.batches.row_images import FIELDS

# test_microbatches decides, and e2e/test_in_flight under ZeRO-3; a new TRL may change the fields of a row
pytestmark = pytest.mark.nightly


@pytest.mark.parametrize(
    ("settings", "number"),
    [({"loss_type": "dapo"}, int),
     ({"loss_type": "grpo"} | SHORT_WINDOW, int), ({"loss_type": "grpo"} | SHORT_WINDOW, float)],
)  # fmt: skip
def test_a_rollout_func_may_give_masks_on_some_ranks_and_in_some_rounds_only(
    settings, number, tmp_path
):
    """Rows that ranks exchange have the same fields, and tokens of tools are never trained."""

    def body(rank: int) -> dict:
        rounds: Counter = Counter()  # of each trainer

        def rollouts(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
            prompt_ids = trainer.processing_class(prompts)["input_ids"]
            ids, logprobs = trainer._generate_single_turn(prompt_ids, None, {}, 4)
            found = {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logprobs}
            masks = [[number(i % 3 > 0) for i in range(len(row))] for row in ids]
            rounds[id(trainer)] += 1
            some = rank if number is int else 0  # TRL itself fails if only some ranks have floats
            return found | ({"env_mask": masks} if (some + rounds[id(trainer)]) % 2 else {})

        return compare(tmp_path, settings | {"prompts": PROMPTS[:12], "rollout_func": rollouts})

    for result in on_ranks(body, 2, tmp_path):
        check(result)


def test_slices_of_a_step_that_was_interrupted_are_not_trained_later(tmp_path):
    def body(rank: int) -> bool:
        trainers = [make(tmp_path, micro_batch_tokens=CAP) for _ in range(2)]
        trainers[1]._balance.slices.append({})  # as Ctrl-C in a notebook leaves them
        for trainer in trainers:
            trainer.train()
        return torch.equal(*(trainer.gradients[0] for trainer in trainers))

    with forked(body, 1, tmp_path) as (one,):
        assert one.result


def test_only_tokens_of_completions_go_through_the_head(tmp_path):
    """On GPUs, TRL's head computes the vocabulary for each label; a row may have a longer prompt than another."""

    def body(rank: int) -> int:
        trainer, labels = make(tmp_path, micro_batch_tokens=CAP), []
        # prompts of 2 and 20 tokens
        mask = torch.tensor([[0] * 18 + [1] * 2 + [1] * 5, [1] * 20 + [1] * 3 + [0] * 2])
        trainer.model.train()

        def model(**inputs):
            labels.append(inputs["labels"])
            return trainer.model(**inputs)

        trainer._get_per_token_logps_and_entropies(model, mask * 7, mask, 5)
        return int((labels[0] != -100).sum())

    with forked(body, 1, tmp_path) as (one,):
        assert one.result == 5 + 3


def test_a_single_process_needs_no_process_group(tmp_path):
    with forked(
        lambda rank: compare(tmp_path, {"loss_type": "grpo", "beta": 0.0}), 1, tmp_path
    ) as (one,):
        check(one.result)
        assert one.result["world"] == 1 and one.result["moved"] == 0


def gpt2():
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(
        vocab_size=258, n_positions=256, n_embd=32, n_layer=1, n_head=2, eos_token_id=1
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def mixture_of_experts():
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1,
        head_dim=16, num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def test_a_loss_that_cannot_be_cut_anew_keeps_trls_cut_and_one_line_says_why(tmp_path):
    def body(rank: int) -> dict:
        trainer = make(tmp_path, micro_batch_tokens=CAP, loss_type="bnpo")
        trainer.train()
        return {
            "balanced": trainer._balance is not None,
            "micro_steps": logged(trainer, "balance/micro_steps"),
        }

    assert on_ranks(body, 2, tmp_path) == [{"balanced": False, "micro_steps": []}] * 2
    logs = "".join((tmp_path / f"rank{rank}.log").read_text() for rank in (0, 1))
    (line,) = [line for line in logs.splitlines() if "micro_batch_tokens" in line]
    assert "loss_type='bnpo'" in line


def test_the_fields_of_a_row_are_pinned():
    """A field that a new TRL adds is per token, per row or a scalar: layouts.py has to know."""
    tree = ast.parse(
        textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    )
    found = {
        n.slice.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Subscript) and ast.unparse(n.value) == "output"
    }
    (literal,) = [
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "output"
    ]
    found |= {key.value for key in literal.keys}
    # the latter are of `rollouts/loss_scores.py` and `batches/session_rows.py`
    assert found | {"present_logps", "session_part"} == {
        *PER_TOKEN,
        *MASKS,
        "prompt_ids",
        "advantages",
        "num_items_in_batch",
        *FIELDS,
    }, trl.__version__


REFUSED = [
    ({"model": mixture_of_experts, "router_aux_loss_coef": 0.01}, "router"),
    ({"entropy_coef": 0.01}, "entropy bonus"),
    ({"top_entropy_quantile": 0.2}, "top_entropy_quantile"),
    ({"model": gpt2}, "GPT2LMHeadModel"),
    (("model.config", "layer_types", ["chunked_attention"]), "chunked_attention"),
    (("model.config", "rope_parameters", {"rope_type": "dynamic", "factor": 2.0}), "dynamic"),
    (("accelerator.state", "parallelism_config", object()), "parallelism"),
]


def test_what_cannot_be_cut_anew_has_a_reason(tmp_path):
    """Losses, positions or layers for which it matters which rows share a batch or where one begins."""

    def body(rank: int) -> list[str | None]:
        plain = make(tmp_path, micro_batch_tokens=CAP)
        found = [reason_against(plain)]
        for what, _ in REFUSED:
            found.append(
                reason_of_changed(plain, *what)
                if isinstance(what, tuple)
                else reason_of_built(what)
            )
        return [*found, reason_against(plain)]

    def reason_of_changed(trainer, owner: str, name: str, value) -> str | None:
        with mock.patch.object(operator.attrgetter(owner)(trainer), name, value, create=True):
            return reason_against(trainer)

    def reason_of_built(settings: dict) -> str | None:
        model = {"model": settings["model"]()} if "model" in settings else {}
        trainer = make(tmp_path, micro_batch_tokens=CAP, **settings | model)
        assert trainer._balance is None
        return reason_against(trainer)

    with forked(body, 1, tmp_path) as (one,):
        before, *reasons, after = one.result
    assert before is None and after is None
    for reason, (_, word) in zip(reasons, REFUSED, strict=True):
        assert word in reason
