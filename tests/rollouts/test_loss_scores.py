"""Scores of the loss pass in the place of TRL's scoring pass: the same gradients and metrics, and the alarm in time.

The other arm is this trainer with TRL's pass. `e2e/test_in_flight.py` compares all losses with TRL's own trainer under
ZeRO-3.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from agent_kinds import KINDS, SPEAKER
from agents import ScriptedEngine, Seen, agent_model, chats, engines_here, numbers, ours
from peft import LoraConfig
from torch import nn

from trl_multinode.errors import LogprobDivergenceError
from trl_multinode.rollouts.loss_scores import importance_ratio, moves_the_generator

BALANCED = {"micro_batch_tokens": 2048}
SEQUENCE = {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0}  # fmt: skip
FOUR = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
TWO_ROUNDS = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
TWICE = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 2}
LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
CLOCKED = ("perf/", "memory/", "engine/", "sync/", "balance/lost_s", "balance/moved")
# The engine of this process runs beside training, so when it gets new weights is not the same in two runs
AHEAD = {"max_staleness": 1, "learning_rate": 0.0}
ARMS = {
    "plain": {},
    "accumulated": FOUR,
    "two rounds a step": TWO_ROUNDS,
    "iterations": TWICE,
    "sequence": SEQUENCE,
    "truncated": {"mask_truncated_completions": True, "max_completion_length": 4},
    "reference": {"beta": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
    "off-policy mask": {"off_policy_mask_threshold": 0.01},
    "ahead": AHEAD,
    "balanced": BALANCED | FOUR,
    "balanced, two rounds a step": BALANCED | TWO_ROUNDS,
    "balanced sequence": BALANCED | SEQUENCE,
    "balanced ahead": BALANCED | AHEAD,
}


class NoisyEngine(ScriptedEngine):
    """Log-probs are off by noise."""

    noise = 0.1

    def row(self, prompt, seed: int, max_tokens: int):
        rollout = super().row(prompt, seed, max_tokens)
        random = np.random.default_rng([seed, *prompt])
        noise = random.normal(0.0, self.noise, len(rollout.logprobs))
        found = (rollout.logprobs + noise).astype(np.float32)
        return replace(rollout, logprobs=found)


def _named(name: str, seed: int = 0):
    model = agent_model(seed)
    model.config._name_or_path = name
    return model


class Run:
    """A short training: its gradients, logs and the number of TRL's scoring passes."""

    def __init__(self, folder: Path, passes: bool, kind: str = "none", engine=NoisyEngine, **settings):  # fmt: skip
        self.passes, columns, keywords = 0, {}, {}
        if kind != "none":
            columns = {name: values[:12] for name, values in KINDS[kind].columns.items()}
            keywords = KINDS[kind].keywords
        peft = {"peft_config": settings.pop("peft_config")} if "peft_config" in settings else {}
        with ExitStack() as stack:
            stack.enter_context(engines_here(SPEAKER, kind=engine))
            if passes:
                stack.enter_context(
                    mock.patch("trl_multinode.trainer.reason_to_score", return_value="a test")
                )
            if "beta" in settings and not peft:  # TRL loads the reference by the name of the model
                agent_model().save_pretrained(folder / "reference")
                named = partial(_named, str(folder / "reference"))
                stack.enter_context(mock.patch("agents.agent_model", named))
            settings = {"logprob_divergence_limit": 5.0, "learning_rate": 0.01} | settings
            self.trainer = ours(folder, Seen(), chats(12, **columns), keywords | peft, **settings)
            self._count()
            self.before = self._weights()
            self.error = None
            try:
                self.trainer.train()
            except LogprobDivergenceError as error:
                self.error = error
            finally:
                self.trainer.close()
        self.gradients = self.trainer.gradients
        self.logs = numbers(self.trainer.state.log_history)

    def _weights(self) -> list[torch.Tensor]:
        # as bits, because NaN is not equal to itself
        return [one.detach().clone().view(torch.int32) for one in self.trainer.model.parameters()]

    def unchanged(self) -> bool:
        same = (one.equal(other) for one, other in zip(self.before, self._weights(), strict=True))
        return all(same)

    def _count(self) -> None:
        score = self.trainer._get_per_token_logps_and_entropies

        def counted(*args, **kwargs):
            self.passes += not torch.is_grad_enabled()
            return score(*args, **kwargs)

        self.trainer._get_per_token_logps_and_entropies = counted


def check_equal(mine: Run, its: Run, rounds: int, references: int = 0) -> None:
    assert (mine.passes, its.passes) == (references, rounds + references)
    assert mine.error is its.error is None and len(mine.gradients) == len(its.gradients) > 0
    for one, other in zip(mine.gradients, its.gradients, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
    for one, other in zip(mine.logs, its.logs, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys():
            if not name.startswith(CLOCKED):
                assert one[name] == pytest.approx(other[name], rel=1e-4, abs=2e-6), name


@pytest.mark.parametrize("name", ARMS)
def test_gradients_and_metrics_are_those_with_the_pass(name, tmp_path):
    settings = ARMS[name]
    mine, its = (Run(tmp_path / str(one), one, **settings) for one in (False, True))
    rounds = 6 if name.endswith("two rounds a step") else 3
    check_equal(mine, its, rounds, references=rounds if "beta" in settings else 0)
    ratios = [log["sampling/importance_sampling_ratio/max"] for log in mine.logs[:3]]
    assert max(ratios) > 1.01 and mine.logs[0]["sampling/sampling_logp_difference/mean"] > 0.05


@pytest.mark.parametrize("kind", ["tools", "rollout_func"])
def test_rows_of_agents_are_corrected_alike(kind, tmp_path):
    mine, its = (Run(tmp_path / str(one), one, kind) for one in (False, True))
    check_equal(mine, its, rounds=3)


def test_the_reference_of_a_lora_run_is_scored_still(tmp_path):
    """The pass of the reference is one of the same model without gradients, too."""
    mine, its = (Run(tmp_path / str(one), one, beta=0.1, **LORA) for one in (False, True))
    check_equal(mine, its, rounds=3, references=3)
    assert mine.logs[-2]["kl"] < 0.01


@pytest.mark.parametrize("steps", [{}, FOUR], ids=["one micro-step", "four"])
@pytest.mark.parametrize("batches", [{}, BALANCED], ids=["plain", "balanced"])
def test_wrong_engine_weights_are_told_before_the_step(steps, batches, tmp_path):
    class Wrong(NoisyEngine):
        noise = 3.0

    run = Run(tmp_path, False, engine=Wrong, logprob_divergence_limit=1.0, **steps, **batches)
    assert "differ by" in str(run.error) and run.passes == 0
    assert run.gradients == [] and run.unchanged()


@pytest.mark.parametrize("batches", [{}, BALANCED], ids=["plain", "balanced"])
def test_rows_of_older_weights_are_judged_by_the_score_of_the_present_ones(batches, tmp_path):
    """Those of the first round are not older, so its step is made; the second one's is not."""

    class Wrong(NoisyEngine):
        def row_of(self, tokens):
            found = super().row_of(tokens)
            return replace(found, logprobs=found.logprobs - 9.0)

    run = Run(tmp_path, False, engine=Wrong, logprob_divergence_limit=1.0, **AHEAD, **batches)
    assert "differ by" in str(run.error) and len(run.gradients) == 1 and run.passes == 0


def test_nan_of_the_trainer_is_told_before_the_step(tmp_path):
    def broken(seed: int = 0):
        model = agent_model(seed)
        model.lm_head.weight.data[7] = torch.nan
        return model

    class Constant(ScriptedEngine):
        def row(self, prompt, seed: int, max_tokens: int):
            rollout = super().row(prompt, seed, max_tokens)
            return replace(rollout, logprobs=np.full(len(rollout.tokens), -5.0, np.float32))

    with mock.patch("agents.agent_model", broken):
        run = Run(tmp_path, False, engine=Constant)
    assert "NaN log-prob" in str(run.error) and "from the trainer" in str(run.error)
    assert run.unchanged() and run.gradients == []


def test_a_run_without_the_correction_is_trls(tmp_path):
    """VESPO reads any ratio that a batch has."""
    run = Run(tmp_path, False, vllm_importance_sampling_correction=False, loss_type="vespo",
              vllm_importance_sampling_mode="token_truncate")  # fmt: skip
    assert run.passes == 0 and run.error is None
    assert not any("importance_sampling_ratio" in name for log in run.logs for name in log)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 1}, "no multiple"),
        ({"num_iterations": 2}, "no multiple"),
        ({"peft_config": LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1)}, "dropout"),
    ],
)
def test_the_pass_stays_with_a_reason(changes, words, tmp_path):
    with mock.patch("trl_multinode.rollouts.loss_scores.report") as report:
        run = Run(tmp_path, False, **changes)
    assert run.passes > 0 and run.error is None
    report.assert_called_once()
    assert words in report.call_args.args[0]


@pytest.mark.parametrize(
    ("mode", "low", "high", "expected"),
    [
        ("token_truncate", None, 2.0, [[2.0, 1.0, 0.5, 1.0]]),
        ("token_truncate", 0.7, 2.0, [[2.0, 1.0, 0.7, 1.0]]),
        ("token_mask", None, 2.0, [[0.0, 1.0, 0.5, 1.0]]),
        ("token_mask", 0.7, 5.0, [[4.0, 1.0, 0.0, 1.0]]),
        ("sequence_truncate", None, 1.5, [[1.5]]),
        ("sequence_mask", None, 1.5, [[0.0]]),
        ("sequence_mask", None, 2.5, [[2.0]]),
    ],
)
def test_the_ratio_by_hand(mode, low, high, expected):
    """Ratios 4, NaN, 1/2 and, not trained, 16: their product without the last two kinds is 2."""
    sampled = torch.tensor([[0.0, torch.nan, 0.0, 0.0]])
    logps = torch.tensor([[4.0, 1.0, 0.5, 16.0]]).log()
    found = importance_ratio(logps, sampled, torch.tensor([[1, 1, 1, 0]]), mode, low, high)
    assert torch.allclose(found, torch.tensor(expected))


class Dropping(nn.Module):
    def __init__(self, rate: float):
        super().__init__()
        self._dropout = nn.Dropout(rate)

    def forward(self, input_ids, **_):
        return self._dropout(input_ids.float())


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_the_generator_is_asked_and_stays(rate):
    model = Dropping(rate).train()
    accelerator = mock.Mock(device=torch.device("cpu"))
    trainer = mock.Mock(model=model, accelerator=accelerator, _tokenizer=mock.Mock(pad_token_id=0))
    before = torch.get_rng_state()
    assert moves_the_generator(trainer) == (rate > 0)
    assert torch.equal(torch.get_rng_state(), before)
