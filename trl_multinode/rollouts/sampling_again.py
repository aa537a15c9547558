"""Dynamic sampling: a group whose rewards are equal teaches nothing, so its place in the round gets another prompt.

```python
again = SamplingAgain(settings, trainer)
recorded = again.sample(group, make, drop)  # in the thread of a group: until its rewards differ
...
again.check_round(rewards)                  # in the main thread of every rank: ends the run if all groups are flat
```

Nothing in here depends on time, on the number of ranks or on other groups, and nothing is a collective: the prompt of
an attempt is drawn by a stateless generator from the run's seed, the round, the place in the round and the attempt.
"""

import copy
import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from trl.trainer.utils import nanstd

from ..errors import RolloutError
from .groups import Group
from .recorded import Recorded, Scores
from .staleness import StalenessMeter

TOLERANCE = 1e-8  # of a standard deviation, as in TRL's `is_std_zero`
TRLS_EPSILON = 1e-4  # that TRL adds to a standard deviation before it divides


class SamplingAgain:
    """
    Attempts of one rank to find prompts whose completions get different rewards.

    Args:
        settings (`NodeSettings`):
            Settings with `dynamic_sampling`.
        meter ([`StalenessMeter`]):
            Meter that gets the groups and tokens that were sampled, and those that were dropped.
        trainer ([`~trl_multinode.MultiNodeGRPOTrainer`]):
            Trainer with the training dataset and the weights of its reward functions.
    """

    def __init__(self, settings: Any, meter: StalenessMeter, trainer: Any):
        args = trainer.args
        self._trainer, self._meter = trainer, meter
        self._most = settings.dynamic_sampling
        rows = args.per_device_train_batch_size * args.steps_per_generation
        self._first_place = trainer.accelerator.process_index * (rows // args.num_generations)
        # the row as a dataloader gives it, without the columns that `remove_unused_columns` drops
        self._collate = trainer._get_collator_with_removed_columns(lambda batch: batch, "training")
        self._lock = threading.Lock()  # of the dataset, whose transform may not be safe in threads

    def sample(
        self, group: Group, make: Callable[[Group], Recorded], drop: Callable[[Recorded], None]
    ) -> Recorded:
        """
        Make the rollouts of a group until its rewards differ, or `dynamic_sampling` is reached, and return the last
        ones. The group's thread calls it.

        Args:
            group ([`Group`]):
                Group with the prompt of its attempt; it is changed to that of the returned rollouts.
            make (`Callable`):
                Function that makes and scores the rollouts of a group.
            drop (`Callable`):
                Function that gets the rollouts that are not used, for example to free their environments.
        """
        while True:
            recorded = make(group)
            assert recorded.scores is not None, f"group {group.id} has no rewards"
            dropped = self.is_flat(recorded.scores) and self.next_group(group)
            self._count(recorded, dropped)
            if not dropped:
                return recorded
            drop(recorded)

    def is_flat(self, scores: Scores) -> bool:
        """Return whether the advantages of a group are all zero, if rewards are normalized within the group."""
        values = [scores.rewards_of(index) for index in range(len(scores.values))]
        known = [[torch.nan if one is None else one for one in value] for value in values]
        # whatever default another thread has set meanwhile
        rewards = torch.tensor(known, dtype=torch.float32)
        return bool(self._flat(rewards.T.unsqueeze(0))[0])

    def next_group(self, group: Group) -> bool:
        """Change a group to the prompt of its next attempt.

        Returns:
            `bool`: whether there is one; `False` if `dynamic_sampling` is reached.
        """
        if group.attempt >= self._most:
            return False
        dataset, seed = self._trainer.train_dataset, self._trainer.args.seed
        place, attempt = self._first_place + group.place, group.attempt + 1
        index = drawn_index(seed, group.number, place, attempt, len(dataset))
        with self._lock:
            (row,) = self._collate([dataset[index]])
        size = len(group.inputs)
        # first, because a checkpoint may be written meanwhile, which then ignores `inputs`
        group.attempt = attempt
        group.inputs = [copy.deepcopy(row) for _ in range(size)]
        group.prompts = [[] for _ in range(size)]  # the rollout tokenizes it
        return True

    def check_round(self, rewards: torch.Tensor) -> None:
        """
        Log how many groups of a round are flat, and end the run if all of them are. All ranks call it with the rewards
        that TRL has gathered, so that all of them end.

        Args:
            rewards (`torch.Tensor`):
                Rewards of all ranks of shape (rows, functions); TRL has made `None` NaN.

        Raises:
            `RolloutError`: on every rank.
        """
        trainer, size = self._trainer, self._trainer.num_generations
        flat = self._flat(rewards.cpu().float().unflatten(0, (-1, size)))
        num_flat = int(flat.sum())
        metrics = trainer._metrics["train"]
        metrics["dynamic_sampling/effective_groups"].append(float(len(flat) - num_flat))
        metrics["dynamic_sampling/flat_groups"].append(float(num_flat))
        if num_flat < len(flat):
            return
        seen = zip(trainer.reward_func_names, rewards.cpu().T, strict=True)
        raise RolloutError(
            f"{trainer.host.topology}: step {trainer.state.global_step + 1} has nothing to learn from: in each of the "
            f"{len(flat)} groups of all ranks the {size} completions have equal rewards, although each place was "
            f"sampled again {self._most} times ({len(flat) * (1 + self._most)} prompts). The last rewards were "
            f"{'; '.join(f'`{name}` {_seen(values)}' for name, values in seen)}. If these are the highest, the task "
            "is learned: use harder prompts, or stop here. Else make the first steps easier (prompts, or a reward for "
            "a part of the answer), raise `num_generations` or `temperature`, or raise `dynamic_sampling`."
        )

    def _count(self, recorded: Recorded, dropped: bool) -> None:
        tokens = sum(len(row.tokens) for row in recorded.rows)
        self._meter.add(sampled_groups=1, sampled_tokens=tokens)
        if dropped:
            self._meter.add(dropped_groups=1, dropped_tokens=tokens)

    def _flat(self, rewards: torch.Tensor) -> torch.Tensor:
        weights = self._trainer.reward_weights.detach().cpu().float()
        return are_flat(rewards, weights, self._trainer.multi_objective_aggregation)


def are_flat(rewards: torch.Tensor, weights: torch.Tensor, aggregation: str) -> torch.Tensor:
    """
    Return which groups teach nothing: the rewards of their rows are equal, or have a standard deviation below 1e-8.

    The rewards are those that TRL would normalize: the weighted sum of all functions, or with `"normalize_then_sum"`
    the weighted sum of what each function gives after its own mean and standard deviation in the group. NaN of one
    function counts 0 in the sum, and a row with NaN from all functions does not count.

    Args:
        rewards (`torch.Tensor`):
            Rewards as TRL has them, float32 of shape (groups, rows, functions).
        weights (`torch.Tensor`):
            Weight of each function.
        aggregation (`str`):
            TRL's `multi_objective_aggregation`.
    """
    unscorable = rewards.isnan().all(dim=2)
    if aggregation == "normalize_then_sum":
        rewards = rewards.double()
        deviations = rewards - rewards.nanmean(dim=1, keepdim=True)
        rewards = deviations / (nanstd(rewards, dim=1, keepdim=True) + TRLS_EPSILON)
    total = (rewards * weights).nansum(dim=2).masked_fill(unscorable, torch.nan)
    # in float32, equal rewards of 100.3 have one of 7e-6
    std = nanstd(total.double(), dim=1)
    first = total.gather(1, (~unscorable).int().argmax(dim=1, keepdim=True))
    # infinite ones, and single ones, have no standard deviation
    equal = (total.eq(first) | unscorable).all(dim=1)
    return equal | (std <= TOLERANCE)


def drawn_index(seed: int, number: int, place: int, attempt: int, num_rows: int) -> int:
    """Return the index of the row that attempt 1 or later of a place gets, uniform over the dataset.

    Args:
        seed (`int`):
            Seed of the run.
        number (`int`), place (`int`):
            Round, and place in the round of all ranks.
        attempt (`int`):
            Number of the attempt.
        num_rows (`int`):
            Rows of the dataset.
    """
    digest = hashlib.blake2b(f"{seed}/{number}/{place}/{attempt}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little") % num_rows


def _seen(values: torch.Tensor) -> str:
    """Describe the rewards of one function."""
    known = values[~values.isnan()]
    if len(known) == 0:
        return "NaN or None for all rows"
    low, high = f"{known.min():.4g}", f"{known.max():.4g}"
    none = (
        f", and NaN or None for {len(values) - len(known)} rows" if len(known) < len(values) else ""
    )
    return (f"{low} for all rows" if low == high else f"{low} to {high}") + none
