"""Rounds of rollouts that are begun ahead: which groups a rank begins and takes in each round.

One round of `max_staleness=1` or more, on every rank:

```python
rows = rounds.take()             # the oldest complete groups; they replace the rows of the dataloader
sync_weights()                   # TRL's barrier, then the update; in flight, rows continue with the new weights
rounds.begin_following(version)  # the groups of the batch that is `max_staleness` ahead
score(rows); train(rows)         # meanwhile the engines generate
```

With `max_staleness=1` a group is the rank's whole part of a round, and the round waits for it before the update. From
2 on a group is the completions of one prompt.

The first round of an epoch has nothing to take: it syncs, begins its own groups and those of the following rounds, and
waits for as many as it trains. Near the end of an epoch or of the run no batch follows, so the last rounds take the
groups that are open, and every group that was begun is trained exactly once.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..engine.stream import RequestStream
from ..errors import RolloutError, WeightVersionError
from ..run.reporter import report, warn
from ..wire.messages import WeightVersion
from .groups import Group, OpenGroups
from .recorded import Turn
from .requests import check_lengths
from .token_ages import TokenAges, UpdateLog
from .upcoming import Batch

# returns the batch that is so many rounds ahead and its prompts as token ids; `None` if none follows
BatchAhead = Callable[[int], tuple[Batch, list[list[int]]] | None]


NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
# Settings of vLLM that look at the completion so far, which is part of the prompt when a row is continued
FROM_THE_START = (
    "structured_outputs",
    "stop",
    "min_tokens",
    "bad_words",
    "repetition_detection",
    "thinking_token_budget",
    "trace_decode_token_ids",
    "extra_args",  # of custom logits processors
    *NEUTRAL,
)


class Rounds:
    """Rounds of one rank on [`OpenGroups`].

    Args:
        generation ([`NodeGeneration`]):
            Generation of this rank, with the seeds of the rows, their settings and the limit of a completion.
        settings ([`NodeSettings`]):
            Settings with `max_staleness`, the rounds that are begun and not taken after a round has taken its groups,
            and `oldest_rounds`, after which a round waits for a group.
        stream ([`RequestStream`]):
            Requests, on connections that nothing else uses.
        open_groups (`Callable`, *optional*, defaults to [`OpenGroups`]):
            Function that builds the groups from the stream and a check of each row.
    """

    def __init__(
        self,
        generation: Any,
        settings: Any,
        stream: RequestStream,
        open_groups: Callable[..., OpenGroups] | None = None,
    ):
        self._generation = generation
        self._where = f"Rank {generation.accelerator.process_index}"
        self._warned = False
        self.updates = UpdateLog(self._where)
        open_groups = open_groups or partial(OpenGroups, one_by_one=settings.in_flight)
        self.groups = open_groups(stream, self.updates.check)
        self.taken: list[Group] = []  # groups of the current round
        self._open_rounds = settings.max_staleness
        self._spare_rounds = settings.oldest_rounds - settings.max_staleness
        self._number = -1  # current round
        self.last_begun = -1  # last round whose groups were begun
        # whether groups of a checkpoint are open, and their missing rows are not under way
        self._restored = False
        self._batch_ahead: BatchAhead = lambda rounds: None
        self._num_groups = self._size = 1

    def begin_round(self, number: int, num_groups: int, size: int, batch_ahead: BatchAhead) -> None:
        """Start training round `number` of `num_groups` groups of `size` rows. `batch_ahead(0)` is its own batch."""
        # a resumed run does not begin with round 0, and an evaluation may come first
        if self._number < 0:
            self.updates.move_to(number)
        self._number, self._batch_ahead = number, batch_ahead
        self._num_groups, self._size = num_groups, size
        self.taken = []

    @property
    def must_sync(self) -> bool:
        """Return whether rows have to begin before this round can take its groups. The same on every rank."""
        return self.last_begun < self._number or self._restored

    def add_update(self, version: WeightVersion, trains: bool) -> None:
        """Record an update before it is sent, for the current round or, from an evaluation, for the next one."""
        self.updates.add(version, self._number if trains else self._number + 1)
        self.groups.counts.update(swaps=1, swapped_rows=self.groups.rows_under_way)

    def begin_following(self, version: WeightVersion) -> None:
        """Begin the groups of the batches up to `max_staleness` ahead, and the missing rows of a checkpoint."""
        if self._restored:
            self._go_on(version)
        for number in range(
            max(self.last_begun + 1, self._number), self._number + self._open_rounds + 1
        ):
            found = self._batch_ahead(number - self._number)
            if found is None:
                break
            self.groups.submit(self._groups_of(number, *found, version))
            self.last_begun = number

    def _go_on(self, version: WeightVersion) -> None:
        """Begin the missing rows of a checkpoint."""
        # a shorter `max_age` than before must not make more groups due in a round than it can train
        self.groups.set_due(
            lambda index, group: max(
                self._due(group.number), self._number + index // self._num_groups
            )
        )
        starts_count = settings_from_the_start(self._generation.sampling)
        longest = 0 if starts_count else self._generation.max_completion_length
        continued, again = self.groups.go_on(version.update, longest)
        self._restored = False
        if continued or again:
            report(
                f"{self._where}: {continued} rows that were under way at the checkpoint continue, {again} begin again"
            )

    def _groups_of(
        self, number: int, batch: Batch, prompts: list[list[int]], version: WeightVersion
    ) -> list[Group]:
        generation = self._generation
        # the prompts of whole rollouts are made later, in their groups
        if any(prompts):
            check_lengths(generation, prompts)
        limit, due = generation.max_completion_length, self._due(number)
        groups = []
        for place, start in enumerate(range(0, len(batch), self._size)):
            rows = slice(start, start + self._size)
            seeds = generation.seeds.of_group("train", number, start, self._size, len(batch))
            groups.append(
                Group(
                    number, place, batch[rows], prompts[rows], due, self._number, version.update,
                    seeds=seeds.of_call(prompts[rows]), max_tokens=limit,
                )
            )  # fmt: skip
        return groups

    def _due(self, number: int) -> int:
        """Return the last round that may train the groups of round `number`."""
        return number + self._spare_rounds

    def take(self) -> Batch | None:
        """Take the groups of this round, with `num_rows` rows together, and return their rows of the dataset.

        Returns:
            `Batch`, *optional*: `None` if no engine is left for the rows.

        Raises:
            `WeightVersionError`: if a group is older than `max_age`, although its round should have waited for it.
        """
        taken = self.groups.take(self._num_groups, self._number)
        if taken is None:
            return None
        self.taken = taken
        if late := next((group for group in taken if group.due < self._number), None):
            raise WeightVersionError(
                f"{self._where}: round {self._number} took a group that was due in round {late.due}, which should "
                "have waited for it: its tokens are older than `max_age` allows. File a bug report."
            )
        return [row for group in taken for row in group.inputs]

    def made(self, prompts: list[list[int]]) -> Turn | None:
        """Return the completions of the taken groups; `None` if `prompts` are not theirs."""
        if not self.taken:
            return None
        made = self.first_turns()
        if made.prompts != prompts:
            if any(group.recorded is not None for group in self.taken):
                raise RolloutError(
                    f"{self._where}: round {self._number} has other prompts than its rollouts that ran ahead. A "
                    "callback or a subclass changes the chat template, the tools or the rows; use `max_staleness=0`."
                )
            if not self._warned:
                self._warned = True
                warn(
                    f"{self._where}: round {self._number} has other prompts than those generated ahead, so its "
                    "completions are generated again. Rounds in flight help only if prompts depend on nothing but the "
                    "dataset row."
                )
            return None
        return made

    def first_turns(self) -> Turn:
        """Return the completions of the taken groups, those of recorded ones from their first `generate` call."""
        turns = [group.first_turn for group in self.taken]
        prompts = [prompt for turn in turns for prompt in turn.prompts]
        rows = [row for turn in turns for row in turn.rows]
        images = [one for turn in turns for one in turn.images or [None] * len(turn.prompts)]
        return Turn(prompts, rows, images if any(images) else None)

    def stale(self, version: WeightVersion) -> bool:
        """Return whether weights before `version` took part in the taken rows: a row that had no token at a swap may
        still use their keys and values of its prompt."""
        return any(
            group.min_update < version.update
            or any(row.version.update < version.update for row in group.rows)
            for group in self.taken
        )

    def ages(self, version: WeightVersion) -> TokenAges:
        """Return the ages of the tokens that this round trains, with the weights of `version`."""
        rows = ((row, group.begun) for group in self.taken for row in group.rows)
        return self.updates.ages(rows, self._number, version)

    # ---- a run that ended early, and checkpoints --------------------------------------------------------------------

    def drop(self) -> None:
        """Forget the groups of a run that ended early."""
        self.groups.drop()
        self._number = self.last_begun = -1
        self._restored = False

    def restore(
        self, groups: list[Group], last_begun: int, updates: dict[int, tuple[int, int]]
    ) -> None:
        """Restore the open groups of a checkpoint. Their missing rows begin in the next round, after its sync."""
        self.updates.add_earlier(updates)
        self.groups.restore(groups)
        self.last_begun, self._restored = last_begun, True


def settings_from_the_start(sampling: Mapping[str, Any]) -> list[str]:
    """Return the names of sampling settings that depend on where a completion began: a continued row would lose it."""
    return [
        name
        for name in FROM_THE_START
        if sampling.get(name) not in (None, 0, [], NEUTRAL.get(name))
    ]
