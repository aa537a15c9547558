"""A loss that is not TRL's is regrouped only if its class says how it reduces, and must use the importance ratio."""

from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from replays import ShortReplay, logged, make, on_ranks

from trl_multinode import GRPOConfig, GRPOTrainer
from trl_multinode.batches.own_loss import LOSSES, RATIO, RatioCheck, owner_of, reason_of_loss
from trl_multinode.experimental.gmpo import MultiNodeGMPOTrainer
from trl_multinode.node_settings import NodeSettings
from trl_multinode.trainers import MultiNodeRLOOTrainer


class MeanOverRows(ShortReplay):
    """With `loss_type="dapo"`, which TRL sums over tokens."""

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask, kept = inputs["completion_mask"], inputs["completion_ids"].size(1)
        both = torch.cat([inputs["prompt_mask"], mask], dim=1)
        logprobs = self._get_per_token_logps_and_entropies(model, ids, both, kept)[0]
        of_row = -(logprobs * inputs["advantages"].unsqueeze(1) * mask).sum(1) / mask.sum(1).clamp(
            min=1
        )
        return of_row.mean() / self.current_gradient_accumulation_steps


class Declared(MeanOverRows):
    loss_reduction = "rows"


class OwnAgain(Declared):
    """What its base class declares is about another loss."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * 2


class Misspelled(MeanOverRows):
    loss_reduction = "mean"


def gradients(folder, kind) -> dict:
    settings = {"loss_type": "dapo", "kind": kind, "max_steps": 2}
    theirs, ours = make(folder, **settings), make(folder, micro_batch_tokens=200, **settings)
    theirs.train()
    ours.train()
    pairs = zip(theirs.gradients, ours.gradients, strict=True)
    return {
        "difference": max(float((a - b).norm() / a.norm()) for a, b in pairs),
        "balanced": bool(logged(ours, "balance/moved_mib")),
    }


@pytest.mark.parametrize(
    ("kind", "balanced"), [(MeanOverRows, False), (Declared, True), (OwnAgain, False)]
)
def test_the_gradient_of_a_loss_of_the_users_own_is_that_without_micro_batch_tokens(
    kind, balanced, tmp_path
):
    """Before, long rows weighed as much as many short ones: a relative error of 0.4, without a word."""
    for found in on_ranks(lambda rank: gradients(tmp_path, kind), 2, tmp_path):
        assert found["balanced"] == balanced
        assert found["difference"] < 1e-5


def test_whose_loss_a_trainer_has():
    assert owner_of(GRPOTrainer, *LOSSES) is owner_of(MultiNodeRLOOTrainer, *LOSSES) is None
    assert owner_of(Declared, *LOSSES) is MeanOverRows and owner_of(OwnAgain, *LOSSES) is OwnAgain
    assert reason_of_loss(ShortReplay) is reason_of_loss(MultiNodeGMPOTrainer) is None
    assert "`OwnAgain`" in reason_of_loss(OwnAgain) and "loss_reduction" in reason_of_loss(
        MeanOverRows
    )
    with refused("loss_reduction", got="mean"):
        reason_of_loss(Misspelled)


def test_a_loss_without_the_importance_ratio_is_refused_in_the_first_step_of_rounds_ahead():
    batch = {RATIO: torch.ones(2, 3), "advantages": torch.ones(2)}

    def step(loss) -> None:
        watched = check.watched(batch)
        loss(watched)
        check.check()

    check = RatioCheck(MeanOverRows)
    check.check()  # a step that had only old rows of the buffer
    with refused("_compute_loss", "`max_staleness=0`"):
        step(lambda inputs: inputs["advantages"].sum())
    # a copy may be read unseen, so it counts
    entries = (lambda x: x[RATIO], lambda x: x.get(RATIO), lambda x: x.pop(RATIO))
    copies = (
        lambda x: {**x, "more": 1},
        lambda x: dict(x),
        lambda x: x.copy(),
        lambda x: list(x.items()),
    )
    for read in entries + copies:
        check = RatioCheck(MeanOverRows)
        step(read)
        assert check.watched(batch) is batch, "it looks once"
    assert RatioCheck(MeanOverRows).watched([1]) == [1]


class Shaped(GRPOTrainer):
    def _calculate_rewards(self, *args):
        return super()._calculate_rewards(*args) - 1.0


@pytest.mark.parametrize("kind", [Shaped, GRPOTrainer])
def test_rewards_that_a_subclass_shapes_are_refused_with_dynamic_sampling(
    kind, monkeypatch, tmp_path
):
    monkeypatch.setattr(GRPOTrainer.__mro__[1], "_check_call", lambda *_: None)
    host = SimpleNamespace(settings=NodeSettings(dynamic_sampling=8))
    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    if kind is GRPOTrainer:
        kind._check_call(object.__new__(kind), host, args, {})
        return
    with refused("dynamic_sampling", got="Shaped"):
        kind._check_call(object.__new__(kind), host, args, {})
