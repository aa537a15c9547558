"""Dynamic sampling in whole runs of one process: rounds of every mode, kinds of agents, and the log."""

import pytest
from agent_kinds import KINDS, SPEAKER
from agents import GROUP, chats, engines_here, keep_outputs, ours

# test_sampling_again decides which groups are kept, and test_recipe_launches has a run of two nodes
pytestmark = pytest.mark.nightly
AGAIN = {"score_groups": 0, "dynamic_sampling": 8, "learning_rate": 0.0}
MODES = {
    "synchronous": {},
    "drain": {"max_staleness": 1},
    "in flight": {"max_staleness": 2, "max_age": 2},  # in the order of the dataset
}
NUM_ROWS, PLACES, STEPS = 12, 2, 3  # a round is a step


def odd_ones_differ(prompts, completion_ids, **_) -> list[float]:
    """Rewards of 0 for all completions of an even prompt."""
    numbers = [int(prompt[0]["content"].split()[0]) for prompt in prompts]
    return [
        float(sum(ids) % 11) * (number % 2)
        for number, ids in zip(numbers, completion_ids, strict=True)
    ]


def run(folder, kind: str, reward, **settings):
    columns = {name: (values * NUM_ROWS)[:NUM_ROWS] for name, values in KINDS[kind].columns.items()}
    with engines_here(SPEAKER):
        trainer = ours(
            folder, reward, chats(NUM_ROWS, **columns), KINDS[kind].keywords, **(AGAIN | settings)
        )
        outputs = keep_outputs(trainer)
        try:
            trainer.train()
        finally:
            trainer.close()
    return trainer, outputs


CASES = [*(("tools", mode) for mode in MODES), ("environments", "drain"), ("rollout_func", "drain")]


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_no_group_without_an_advantage_is_trained(kind, mode, tmp_path):
    trainer, outputs = run(tmp_path, kind, odd_ones_differ, **MODES[mode])
    assert len(outputs) == trainer.state.global_step == STEPS
    for output in outputs:
        assert output["advantages"].view(PLACES, GROUP).abs().amax(dim=1).gt(0.1).all()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logs) == STEPS
    for entry in logs:
        assert (
            entry["dynamic_sampling/effective_groups"] == PLACES
            and entry["dynamic_sampling/flat_groups"] == 0
        )
        assert entry["frac_reward_zero_std"] == 0
    shares = [entry.get("dynamic_sampling/dropped_share", 0.0) for entry in logs]
    assert (
        max(shares) > 0
        and max(entry.get("dynamic_sampling/extra_tokens", 0.0) for entry in logs) > 0
    )
