"""Dynamic sampling in whole runs of one process: rounds of every mode, kinds of agents, the log, and the end."""

import pytest
from agent_kinds import KINDS, SPEAKER
from agents import GROUP, chats, engines_here, keep_outputs, keep_rounds, ours
from trl.trainer.utils import RepeatSampler

from trl_multinode.errors import RolloutError
from trl_multinode.rollouts.sampling_again import drawn_index

AGAIN = {"score_groups": True, "dynamic_sampling": True, "learning_rate": 0.0}
MODES = {
    "synchronous": {},
    "drain": {"max_staleness": 1},
    "in flight": {"weight_update": "in_flight", "open_rounds": 2, "max_age": 2},  # in the order of the dataset
}
NUM_ROWS, PLACES, STEPS = 12, 2, 3  # a round is a step


def number_of(row: dict) -> int:
    return int(row["prompt"][0]["content"].split()[0])


def odd_ones_differ(prompts, completion_ids, **_) -> list[float]:
    """Rewards of 0 for all completions of an even prompt."""
    numbers = [int(prompt[0]["content"].split()[0]) for prompt in prompts]
    return [float(sum(ids) % 11) * (number % 2) for number, ids in zip(numbers, completion_ids, strict=True)]


def always_one(prompts, **_) -> list[float]:
    return [1.0] * len(prompts)


def kept_numbers(rounds: list) -> list[list[int]]:
    return [[number_of(row) for row in rows[::GROUP]] for rows, _ in rounds]


def simulation(seed: int = 42, most: int = 8) -> list[list[int]]:
    order = list(RepeatSampler(range(NUM_ROWS), GROUP, PLACES, 1, True, seed))[::GROUP]
    kept = []
    for place, number in enumerate(order[: PLACES * STEPS]):
        tries = (drawn_index(seed, place // PLACES, place % PLACES, a, NUM_ROWS) for a in range(1, most + 1))
        while number % 2 == 0 and (other := next(tries, None)) is not None:
            number = other
        kept.append(number)
    return [kept[start : start + PLACES] for start in range(0, len(kept), PLACES)]


def run(folder, kind: str, reward, **settings):
    columns = {name: (values * NUM_ROWS)[:NUM_ROWS] for name, values in KINDS[kind].columns.items()}
    with engines_here(SPEAKER):
        trainer = ours(folder, reward, chats(NUM_ROWS, **columns), KINDS[kind].keywords, **(AGAIN | settings))
        rounds, outputs = keep_rounds(trainer), keep_outputs(trainer)
        try:
            trainer.train()
        finally:
            trainer.close()
    return trainer, rounds, outputs


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_the_groups_of_the_simulation_and_none_without_an_advantage(mode, tmp_path):
    trainer, rounds, outputs = run(tmp_path, "tools", odd_ones_differ, **MODES[mode])
    assert kept_numbers(rounds) == simulation() and trainer.state.global_step == STEPS
    assert any(number % 2 == 0 for one in simulation(most=0) for number in one), "no group is flat at first"
    for output in outputs:
        assert output["advantages"].view(PLACES, GROUP).abs().amax(dim=1).gt(0.1).all()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logs) == STEPS
    for entry in logs:
        assert entry["dynamic_sampling/effective_groups"] == PLACES and entry["dynamic_sampling/flat_groups"] == 0
        assert entry["frac_reward_zero_std"] == 0
    shares = [entry.get("dynamic_sampling/dropped_share", 0.0) for entry in logs]
    assert 0 < max(shares) < 1 and max(entry.get("dynamic_sampling/extra_tokens", 0.0) for entry in logs) > 0


@pytest.mark.parametrize("kind", ["environments", "rollout_func"])
def test_environments_and_loops_of_the_user_are_sampled_again(kind, tmp_path):
    trainer, rounds, outputs = run(tmp_path, kind, odd_ones_differ, **MODES["drain"])
    assert len(outputs) == STEPS and {len(rows) for rows, _ in rounds} == {PLACES * GROUP}
    flat = [entry["dynamic_sampling/flat_groups"] for entry in trainer.state.log_history if "reward" in entry]
    assert flat == [0.0] * STEPS and trainer.state.global_step == STEPS


@pytest.mark.parametrize("mode", MODES)
def test_a_run_without_any_differing_rewards_ends_in_its_first_round(mode, tmp_path):
    settings = MODES[mode] | {"max_resample_rounds": 2}
    with pytest.raises(RolloutError, match=r"step 1 .*\(6 prompts\).*`always_one` 1 "):
        run(tmp_path, "tools", always_one, **settings)
