"""Dynamic sampling: which groups are flat, which prompts take their places, and how a run ends that has only such."""

import inspect
import textwrap
import threading
import time
from functools import partial
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest
import torch
from stubs import rounds_of
from trl import GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.utils import RepeatSampler
from waiting import until

from trl_multinode.engine.client import Rollout
from trl_multinode.errors import RolloutError
from trl_multinode.node_settings import NodeSettings
from trl_multinode.rollouts.groups import Group
from trl_multinode.rollouts.recorded import Recorded, Scores, Turn
from trl_multinode.rollouts.recorded_groups import RecordedGroups
from trl_multinode.rollouts.sampling_again import SamplingAgain, are_flat, drawn_index
from trl_multinode.rollouts.saved_groups import SavedGroups, decoded, encoded
from trl_multinode.rollouts.seeds import RowSeeds
from trl_multinode.rollouts.staleness import StalenessMeter, summarize_rounds
from trl_multinode.saving.open_groups import OpenGroupsFile
from trl_multinode.wire.messages import WeightVersion

NAN = float("nan")
PLACES, SIZE, ROUNDS, MOST, SEED = 6, 2, 4, 3, 11  # groups of a round of all ranks, rows of a group
DATASET = [{"prompt": f"row {index}", "extra": [index]} for index in range(PLACES * ROUNDS)]


def trainer_of(rank=0, ranks=1, **fields) -> SimpleNamespace:
    rows = PLACES // ranks * SIZE
    args = SimpleNamespace(per_device_train_batch_size=rows, steps_per_generation=1, num_generations=SIZE, seed=SEED,
                           generation_batch_size=PLACES * SIZE)  # fmt: skip
    values = {
        "args": args, "train_dataset": DATASET, "num_generations": SIZE, "shuffle_dataset": True,
        "accelerator": SimpleNamespace(process_index=rank, num_processes=ranks),
        "reward_weights": torch.ones(1), "reward_func_names": ["exact"], "_metrics": {"train": Lists()},
        "multi_objective_aggregation": "sum_then_normalize", "state": SimpleNamespace(global_step=4),
        "host": SimpleNamespace(topology=f"Rank {rank} (node 0)", settings=NodeSettings(max_staleness=2)),
        "_get_collator_with_removed_columns": lambda collate, description: collate,
    }  # fmt: skip
    return SimpleNamespace(**values | fields)


class Lists(dict):
    def __missing__(self, name):
        return self.setdefault(name, [])


def again_of(rank=0, ranks=1, most=MOST, **fields) -> SamplingAgain:
    settings, meter = SimpleNamespace(dynamic_sampling=most), StalenessMeter(SimpleNamespace())
    return SamplingAgain(settings, meter, trainer_of(rank, ranks, **fields))


# ---- which groups are flat


def trls(rewards: torch.Tensor, weights: torch.Tensor, aggregation: str, scale: str) -> dict:
    """The variables of TRL's own lines, from the gathered rewards to the advantages of all ranks."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    lines = source.split("        num_generations = self.num_generations if mode", 1)[1]
    lines = lines.split("        # Slice to keep only the local part of the data", 1)[0]
    names = {
        **vars(grpo_trainer), "rewards_per_func": rewards.flatten(0, 1), "device": "cpu", "mode": "train",
        "self": SimpleNamespace(
            num_generations=rewards.shape[1], multi_objective_aggregation=aggregation, scale_rewards=scale,
            reward_weights=weights, reward_funcs=[None] * rewards.shape[2],
        ),
    }  # fmt: skip
    exec(textwrap.dedent("        num_generations = self.num_generations if mode" + lines), names)  # noqa: S102
    return names


def trls_advantages(
    rewards: torch.Tensor, weights: torch.Tensor, aggregation: str, scale: str
) -> torch.Tensor:
    return trls(rewards, weights, aggregation, scale)["advantages"].view(rewards.shape[:2])


GROUPS = {  # rows of (first function, second function) -> flat in the sum, flat if each is normalized first
    "equal": ([(1.0, 0.5)] * 4, True, True),
    "zeros": ([(0.0, 0.0)] * 4, True, True),
    "different": ([(1.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)], False, False),
    "none everywhere": ([(NAN, NAN)] * 4, True, True),
    "one row with a reward": ([(1.0, NAN), (NAN, NAN), (NAN, NAN), (NAN, NAN)], True, True),
    "the same where there are rewards": (
        [(1.0, 0.0), (1.0, 0.0), (NAN, NAN), (1.0, 0.0)],
        True,
        True,
    ),
    "two different rows": ([(1.0, 0.0), (0.5, 0.0), (NAN, NAN), (NAN, NAN)], False, False),
    "none of a function counts 0": ([(0.0, NAN), (NAN, 0.0), (NAN, NAN), (0.0, 0.0)], True, True),
    "the sums are equal, after normalizing too": (
        [(1.0, 0.0), (0.0, 0.5), (1.0, 0.0), (0.0, 0.5)],
        True,
        False,
    ),
    "the sums cancel": ([(1.0, 0.0), (0.0, 0.5), (0.5, 0.25), (0.5, 0.25)], True, False),
    "one function has one value": ([(NAN, 1.0), (NAN, 1.0), (0.0, 1.0), (NAN, 1.0)], True, True),
    "tenths": ([(0.1, 0.7)] * 4, True, True),
    "small differences": ([(1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.001, 0.0)], False, False),
}
SCALES = [("sum_then_normalize", scale) for scale in ("group", "batch", "none")] + [
    ("normalize_then_sum", "group")
]


@pytest.mark.parametrize(("aggregation", "scale"), SCALES)
def test_a_group_is_flat_if_and_only_if_trl_gives_all_its_rows_no_advantage(aggregation, scale):
    """All groups are one batch of TRL, because `scale_rewards="batch"` and `normalize_then_sum` look at the batch."""
    rewards = torch.tensor([rows for rows, _, _ in GROUPS.values()])
    weights = torch.tensor([1.0, 2.0])
    advantages = trls_advantages(rewards, weights, aggregation, scale)
    without = (advantages.abs() < 1e-4).all(dim=1).tolist()  # the smallest other ones are 7e-4
    assert are_flat(rewards, weights, aggregation).tolist() == without
    in_sum = aggregation == "sum_then_normalize"
    assert without == [
        in_the_sum if in_sum else normalized for _, in_the_sum, normalized in GROUPS.values()
    ]


def test_the_limit_of_a_standard_deviation_is_trls():
    step = 9.3e-10  # between neighbours of 0.01 in float32
    rows = [
        [0.01, 0.01 + step, 0.01, 0.01],
        [0.01, 0.01 + step, NAN, 0.01],
        [0.01, 0.01 + 40 * step, 0.01, 0.01],
    ]
    rewards, one = torch.tensor(rows).unsqueeze(2), torch.ones(1)
    assert all(len(row.unique()) > 1 for row in rewards[:, :2])
    is_std_zero = trls(rewards, one, "sum_then_normalize", "group")["is_std_zero"].view(3, 4)
    assert (
        are_flat(rewards, one, "sum_then_normalize").tolist()
        == is_std_zero[:, 0].tolist()
        == [True, True, False]
    )


def test_equal_rewards_are_flat_where_trls_rounding_makes_an_advantage_of_them():
    rewards = torch.full((1, 6, 1), 100.3)
    assert trls_advantages(rewards, torch.ones(1), "sum_then_normalize", "group").abs().max() > 0.05
    assert are_flat(rewards, torch.ones(1), "sum_then_normalize").tolist() == [True]
    assert are_flat(
        torch.full((1, 6, 1), float("inf")), torch.ones(1), "sum_then_normalize"
    ).tolist() == [True]


def test_the_rewards_of_a_group_are_read_with_none_and_the_trainers_weights():
    again = again_of(reward_weights=torch.tensor([1.0, 0.0]))
    # the second function has no weight
    assert again.is_flat(Scores([[1.0, None, 1.0], [0.0, None, 5.0]]))
    assert not again.is_flat(Scores([[1.0, 1.0, None], [0.0, None, 5.0]]))
    again._trainer.reward_weights = torch.tensor([1.0, 1.0])  # a callback may change them
    assert not again.is_flat(Scores([[1.0, None, 1.0], [0.0, None, 5.0]]))
    with pytest.raises(AssertionError, match="is called later"):
        again.is_flat(Scores([[1.0], None]))


# ---- the rule, as a simulation and as threads of several ranks


def flat_row(prompt: str, number: int) -> bool:
    """More than half of the prompts are flat in a round, other ones in each."""
    return crc32(f"{prompt} {number}".encode()) % 20 < 11


def simulation(order: list[int]) -> list[list[str]]:
    """The prompts of each round: a flat one makes room for the prompt of the next attempt, at most `MOST` times."""
    rounds = []
    for number in range(ROUNDS):
        kept = []
        for place in range(PLACES):
            prompt = DATASET[order[number * PLACES + place]]["prompt"]
            for attempt in range(1, MOST + 1):
                if not flat_row(prompt, number):
                    break
                prompt = DATASET[drawn_index(SEED, number, place, attempt, len(DATASET))]["prompt"]
            kept.append(prompt)
        rounds.append(kept)
    return rounds


def recorded_of(group: Group, flat: bool) -> Recorded:
    tokens = 1 + group.attempt
    rows = [
        Rollout(np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), WeightVersion(), 0)
        for _ in range(SIZE)
    ]
    turn = Turn([[0]] * SIZE, rows)
    prompts = [row["prompt"] for row in group.inputs]
    scores = Scores([[0.0, 0.0 if flat else 1.0]])
    return Recorded(group.inputs, prompts, prompts, [[0]] * SIZE, [turn], scores=scores)


class NoStream:
    """The rollouts of these tests ask no engine."""

    rows_left = rows_under_way = 0
    stopped = False


class Rank:
    """Rounds of one of several ranks. Its threads end in an order of their own."""

    def __init__(self, rank: int, ranks: int, order: list[int], open_rounds: int, max_age: int):
        self.again, self.quota, self.order = again_of(rank, ranks), PLACES // ranks, order
        self.first = rank * self.quota
        self.max_age = max_age
        self.dropped: list[Recorded] = []
        self.delays = np.random.default_rng(rank + 10 * ranks)
        self.lock = threading.Lock()
        groups = partial(RecordedGroups, self.make, lambda: 0)
        self.rounds = rounds_of(NoStream(), open_rounds, max_age, rank, groups)

    def make(self, group: Group, ask) -> Recorded:
        return self.again.sample(group, self.record, self.dropped.append)

    def record(self, group: Group) -> Recorded:
        with self.lock:
            delay = self.delays.uniform(0, 0.004)
        time.sleep(delay)
        return recorded_of(group, flat_row(group.inputs[0]["prompt"], group.number))

    def batch(self, number: int):
        if number >= ROUNDS:
            return None
        mine = self.order[number * PLACES + self.first :][: self.quota]
        rows = [dict(DATASET[index]) for index in mine for _ in range(SIZE)]
        return rows, [[] for _ in rows]

    def train(self, number: int) -> dict[tuple[int, int], str]:
        """Train a round, as the trainer does, and return the prompt of each group by round and place."""
        rounds, version = self.rounds, WeightVersion(number + 1, number)
        rounds.begin_round(number, self.quota, SIZE, lambda ahead: self.batch(number + ahead))
        if rounds.must_sync:
            rounds.begin_following(version)
        rows = rounds.take()
        assert len(rows) == self.quota * SIZE
        rounds.add_update(version, trains=True)
        rounds.begin_following(version)
        assert all(group.recorded.inputs == group.inputs for group in rounds.taken)
        assert max(number - group.begun for group in rounds.taken) <= self.max_age
        return {
            (one.number, self.first + one.place): one.inputs[0]["prompt"] for one in rounds.taken
        }


def order_of_trl() -> list[int]:
    """One epoch of the dataset in the order of TRL's sampler, one index per group."""
    return list(RepeatSampler(DATASET, SIZE, PLACES, 1, True, SEED))[::SIZE]


@pytest.mark.parametrize(
    ("open_rounds", "max_age"),
    [(0, 0), (1, 1), (2, 2), (2, 6)],
    ids=["0", "drain", "in flight", "as groups end"],
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_kept_groups_and_their_order_are_those_of_the_simulation_on_any_number_of_ranks(
    ranks, open_rounds, max_age
):
    order = order_of_trl()
    expected = simulation(order)
    first = [
        [DATASET[index]["prompt"] for index in order[n * PLACES :][:PLACES]] for n in range(ROUNDS)
    ]
    assert (
        sum(a != b for x, y in zip(expected, first, strict=True) for a, b in zip(x, y, strict=True))
        > PLACES
    )
    run = [Rank(rank, ranks, order, open_rounds, max_age) for rank in range(ranks)]
    trained = {}
    # every rank has as many rounds: the epoch ends for all after the same step
    for number in range(ROUNDS):
        found = {}
        for rank in run:
            found |= rank.train(number)
        trained |= found
        assert len(found) == PLACES
        assert max_age > open_rounds or list(found) == [(number, place) for place in range(PLACES)]
    assert trained == {
        (n, place): prompt for n, kept in enumerate(expected) for place, prompt in enumerate(kept)
    }
    assert not any(rank.rounds.groups.ids for rank in run)


def test_groups_and_tokens_that_were_dropped_are_counted_and_logged():
    rank = Rank(0, 1, order_of_trl(), 0, 0)
    for number in range(ROUNDS):
        rank.train(number)
    counts = rank.again._meter.take((0.0, 0.0), np.zeros((0, 4)))
    groups, dropped = counts["sampled_groups"], counts["dropped_groups"]
    tokens, dropped_tokens = counts["sampled_tokens"], counts["dropped_tokens"]
    assert groups == PLACES * ROUNDS + dropped and dropped == len(rank.dropped) > PLACES
    assert (
        dropped_tokens
        == sum(len(row.tokens) for one in rank.dropped for row in one.turns[0].rows)
        < tokens
    )
    found = summarize_rounds([counts], [0.0])
    assert found["dynamic_sampling/dropped_share"] == dropped / groups
    assert found["dynamic_sampling/extra_tokens"] == dropped_tokens / tokens


# ---- the next attempt


def group_of(number=2, place=1) -> Group:
    return Group(number, place, [{"prompt": "first"}] * SIZE, [[5]] * SIZE, due=number)


def test_an_attempt_has_rows_of_its_own_and_the_last_one_is_kept():
    group, again = group_of(), again_of()
    seen = []
    while again.next_group(group):
        seen.append(group.inputs[0]["prompt"])
        assert group.prompts == [[]] * SIZE and len(group.inputs) == SIZE
        assert (
            group.inputs[0] is not group.inputs[1]
            and group.inputs[0]["extra"] is not group.inputs[1]["extra"]
        )
    drawn = [drawn_index(SEED, 2, 1, attempt, len(DATASET)) for attempt in (1, 2, 3)]
    assert seen == [DATASET[index]["prompt"] for index in drawn]
    assert group.attempt == MOST and group.inputs[0]["prompt"] == seen[-1]


def test_the_drawn_rows_are_uniform_over_the_dataset_and_differ_with_everything_that_counts():
    counts = np.bincount([drawn_index(0, 3, place, 1, 10) for place in range(20_000)], minlength=10)
    assert abs(counts / 2000 - 1).max() < 0.08  # 2000 +- 42 each, so this is 3.8 sigma
    arguments = {"seed": 1, "number": 2, "place": 3, "attempt": 4}
    base = drawn_index(**arguments, num_rows=2**40)
    assert all(drawn_index(**arguments | {name: 9}, num_rows=2**40) != base for name in arguments)


def test_a_row_has_the_columns_that_the_dataloader_gives():
    kept = lambda collate, description: lambda rows: [{"prompt": row["prompt"]} for row in rows]  # noqa: E731
    group, again = group_of(), again_of(_get_collator_with_removed_columns=kept)
    assert again.next_group(group) and set(group.inputs[0]) == {"prompt"}


def test_the_seeds_of_an_attempt_are_its_own_and_those_of_its_global_rows():
    def seeds(ranks: int, attempt: int) -> list[list[int]]:
        rows, found = PLACES * SIZE // ranks, []
        for place in range(PLACES):
            rank, mine = divmod(place, PLACES // ranks)
            group = Group(1, mine, [{}] * SIZE, [[]] * SIZE, due=1, attempt=attempt)
            of_group = RowSeeds(5, rank).of_group(group.seed_mode, 1, mine * SIZE, SIZE, rows)
            found.append(of_group.of_call([[7]] * SIZE))
        return found

    assert seeds(1, 1) == seeds(3, 1)
    assert (
        len({seed for attempt in range(4) for group in seeds(2, attempt) for seed in group})
        == 4 * PLACES * SIZE
    )


# ---- checkpoints


def test_a_checkpoint_has_the_drawn_row_and_the_attempt_of_an_open_group():
    """Rank 1 of 2 is at its second attempt for its first place; a resumed run begins that attempt again."""
    order, release = order_of_trl(), threading.Event()

    class Slow(Rank):
        def record(self, group: Group) -> Recorded:
            if group.attempt == 2:
                release.wait()
            return recorded_of(group, flat=group.place == 0 and group.attempt < 3)

    rank = Slow(1, 2, order, open_rounds=1, max_age=1)
    rank.rounds.begin_round(0, rank.quota, SIZE, rank.batch)
    rank.rounds.begin_following(WeightVersion(1, 0))
    until(lambda: {one.attempt for one in rank.rounds.groups.snapshot() if one.place == 0} == {2})
    file = OpenGroupsFile(trainer_of(1, 2, vllm_generation=SimpleNamespace(rounds=rank.rounds)))
    data = encoded(SavedGroups.of(rank.rounds, file._index_of))
    found = decoded(data)
    saved = {
        group.id: (index, group.attempt)
        for group, index in zip(found.groups, found.indices, strict=True)
    }
    places, first = range(PLACES // 2), PLACES // 2
    expected = {
        (n, place): (order[n * PLACES + first + place], 0) for n in range(2) for place in places
    }
    expected |= {(n, 0): (drawn_index(SEED, n, first, 2, len(DATASET)), 2) for n in range(2)}
    assert saved == expected

    resumed = Slow(1, 2, order, open_rounds=1, max_age=1)
    decoded(data).restore_to(resumed.rounds, file._row_of)
    groups = {group.id: group for group in resumed.rounds.groups.snapshot()}
    assert groups[1, 0].attempt == 2 and groups[1, 0].inputs == [DATASET[expected[1, 0][0]]] * SIZE
    release.set()
    rank.rounds.groups.wait_for_all()


# ---- nothing to learn


def test_a_round_of_flat_groups_ends_the_run_on_every_rank_with_its_rewards_and_the_cure():
    rewards = torch.zeros(PLACES * SIZE, 2)
    rewards[:, 1] = torch.arange(PLACES).repeat_interleave(SIZE) / 10
    rewards[-1, 1] = rewards[-2, 1] = NAN
    fields = {"reward_weights": torch.ones(2), "reward_func_names": ["exact", "format"]}
    messages = []
    for rank in range(2):
        again = again_of(rank, 2, **fields)
        with pytest.raises(RolloutError) as failed:
            again.check_round(rewards)
        messages.append(str(failed.value))
        assert again._trainer._metrics["train"]["dynamic_sampling/flat_groups"] == [PLACES]
    assert messages[0].replace("Rank 0", "Rank 1") == messages[1]
    for words in [
        "Rank 1 (node 0)", "step 5", "6 groups", "2 completions", "3 times (24 prompts)", "`exact` 0 ",
        "`format` 0 to 0.4", "2 rows", "`dynamic_sampling`",
    ]:  # fmt: skip
        assert words in messages[1], messages[1]


def test_one_group_with_different_rewards_lets_the_run_go_on():
    again, rewards = again_of(), torch.zeros(PLACES * SIZE, 1)
    rewards[3] = 1.0
    again.check_round(rewards)
    metrics = again._trainer._metrics["train"]
    assert metrics == {
        "dynamic_sampling/effective_groups": [1.0],
        "dynamic_sampling/flat_groups": [PLACES - 1.0],
    }
