"""The ranks meet after generation and after the rewards, before the collective in which TRL would let them wait."""

from types import SimpleNamespace

import pytest
from stubs import A, build

import trl_multinode
from trl_multinode.node_trainer import NodeTrainer
from trl_multinode.rollouts.aligning import aligned_before_gather


@pytest.fixture
def events():
    return []


def trainer_of(name: str, events: list) -> tuple[NodeTrainer, SimpleNamespace]:
    """A trainer with nothing but what a round needs, and its host."""
    kind = getattr(trl_multinode, f"MultiNode{name}Trainer")
    trainer = kind.__new__(kind)
    trainer.vllm_generation = build()
    trainer.accelerator = SimpleNamespace(gather=lambda value: events.append(f"gather {value}"))
    return trainer, SimpleNamespace(updates=SimpleNamespace(align=lambda: events.append("meet")))


def test_the_first_gather_is_preceded_by_a_meeting_and_the_others_are_not(events):
    owner = SimpleNamespace(gather=lambda value: events.append(value) or [value])
    gather = owner.gather
    with aligned_before_gather(owner, lambda: events.append("meet")):
        assert owner.gather("lengths") == ["lengths"]
        owner.gather("rewards")
    assert events == ["meet", "lengths", "rewards"] and owner.gather is gather


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "Distillation"])
def test_tool_loops_may_generate_any_number_of_times_before_the_ranks_meet(name, events):
    trainer, host = trainer_of(name, events)
    with trainer._aligned(host):
        for _ in range(3):
            trainer.vllm_generation.generate([A], None, num_generations=1)
        trainer.accelerator.gather("lengths")
        trainer.accelerator.gather("counts")
    assert events == ["meet", "gather lengths", "gather counts"]


@pytest.mark.nightly  # e2e/test_trainers runs them
@pytest.mark.parametrize("name", ["SDFT", "SDPO", "GOLD", "IWOPD"])
def test_trainers_that_run_the_model_after_their_only_generation_meet_straight_after_it(
    name, events
):
    trainer, host = trainer_of(name, events)
    with trainer._aligned(host):
        trainer.vllm_generation.generate([A], None, num_generations=1)
        events.append("model")
        trainer.accelerator.gather("losses")
    trainer.vllm_generation.generate([A], None, num_generations=1)  # of a callback, outside a round
    assert events == ["meet", "model", "gather losses"]


def test_the_ranks_meet_before_a_sync_and_not_if_the_engines_have_the_weights(events):
    generation = build()
    generation._host.updates.align = lambda: events.append("meet")
    generation.accelerator.wait_for_everyone = lambda: events.append("barrier")
    generation.sync_weights()
    generation.sync_weights()
    assert events == ["meet", "barrier"]
