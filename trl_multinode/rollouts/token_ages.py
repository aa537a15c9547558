"""Weight updates of a run whose completions continue across them: the versions in a row, and the age of its tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..engine.client import Rollout
from ..errors import WeightVersionError
from ..wire.messages import WeightVersion


@dataclass(frozen=True)
class TokenAges:
    """Age of the tokens of some rows, in generation rounds and in optimizer steps."""

    rounds_mean: float = 0.0
    rounds_max: int = 0
    steps_mean: float = 0.0
    steps_max: int = 0


class UpdateLog:
    """Weight updates of this run, with the generation round and the optimizer step of each.

    Updates of an earlier run, which made restored tokens, have numbers below 0.

    Args:
        where (`str`):
            Name of the rank, for error messages.
    """

    def __init__(self, where: str):
        self._where = where
        self._updates: dict[int, tuple[int, int]] = {}  # update -> round, optimizer step

    def add(self, version: WeightVersion, number: int) -> None:
        """Add an update that is sent for generation round `number`."""
        self._updates[version.update] = number, version.step

    def move_to(self, number: int) -> None:
        """Count all updates of this run for round `number`."""
        for update, (_, step) in self._updates.items():
            if update > 0:
                self._updates[update] = number, step

    def check(self, row: Rollout, first: int) -> None:
        """Raise `WeightVersionError` if a row began before update `first`, which was current when it was submitted."""
        if row.version.update < first:
            raise WeightVersionError(
                f"{self._where}: engine {row.engine} began a row with the weights of {row.version}, expected update "
                f"{first} or later: it did not load the update before the request. See its log; a run that continued "
                "would train on completions of an older policy."
            )

    def ages(
        self, rows: Iterable[tuple[Rollout, int]], number: int, current: WeightVersion
    ) -> TokenAges:
        """Return the ages of the tokens in round `number`, with the `current` weights.

        Args:
            rows (`Iterable[tuple[Rollout, int]]`):
                Rows, each with the round in which it was submitted: its weights may have been sent in an earlier one,
                if no optimizer step lies between.
        """
        tokens = in_rounds = in_steps = rounds_max = steps_max = 0
        for row, begun in rows:
            start = 0
            for span in row.versions:
                made_in, step = self._updates[span.update]
                rounds = (
                    0 if span.update == current.update else max(1, number - max(made_in, begun))
                )
                steps = current.step - step
                count = span.end - start
                start = span.end
                tokens += count
                in_rounds += rounds * count
                in_steps += steps * count
                rounds_max = max(rounds_max, rounds)
                steps_max = max(steps_max, steps)
        return TokenAges(
            in_rounds / max(1, tokens), rounds_max, in_steps / max(1, tokens), steps_max
        )

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def of_rows(self, rows: Iterable[Rollout]) -> dict[int, tuple[int, int]]:
        """Return the round and the step of every update that made tokens of `rows`."""
        return {span.update: self._updates[span.update] for row in rows for span in row.versions}

    def add_earlier(self, updates: dict[int, tuple[int, int]]) -> None:
        """Add updates of the run that wrote a checkpoint, with numbers below 0."""
        self._updates |= updates
