"""Look-ahead: while a round trains, the engines already generate the next round's completions.

One round of `max_staleness=1`, on every rank:

```python
sync_weights()               # first waits for the look-ahead, so that no engine generates while its weights change
rows = look_ahead.take(...)  # completions of the previous round's weights
look_ahead.submit(...)       # the next round's prompts, with the current weights; a thread collects the completions
score(rows); train(rows)     # meanwhile the engines generate
```

Only the completions are made ahead. TRL computes rewards and the trainer's log-probs when it uses the round, so its
importance-sampling correction (trainer / sampler) is the off-policy correction of decoupled PPO (arXiv:2110.00641).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.client import Rollout
from ..run.reporter import warn
from ..wire.messages import WeightVersion

Batch = list[dict[str, Any]]  # rows of the dataset


@dataclass(frozen=True)
class RoundRollouts:
    """One rank's completions for one generation round."""

    number: int  # the generation round that uses them
    prompts: list[list[int]]  # token ids, one row per completion
    rows: list[Rollout]  # in the order of `prompts`
    version: WeightVersion  # the weights that made all of them
    images: list[list | None] | None = None  # PIL images of each row


class LookAhead:
    """Generation of at most one round ahead, in a thread of this rank that has its own connections to the engines.

    Args:
        where (`str`):
            Name of the rank, for log messages.
    """

    def __init__(self, where: str):
        self._where = where
        self._thread: threading.Thread | None = None
        self._made: RoundRollouts | None = None
        self._error: BaseException | None = None
        self._warned = False
        self.generated_s = 0.0  # seconds from each submission to its last row, summed
        self.waited_s = 0.0  # part of `generated_s` in which the rank blocked in `wait`

    def submit(
        self,
        number: int,
        prompts: list[list[int]],
        version: WeightVersion,
        generate: Callable[[], list[Rollout] | None],
    ) -> None:
        """Call `generate` in a background thread, and return at once. If it returns `None`, nothing is made ahead."""
        assert self._thread is None, "the previous look-ahead was neither taken nor dropped"
        self._made = self._error = None

        def run() -> None:
            start = time.monotonic()
            try:
                if (rows := generate()) is not None:
                    self._made = RoundRollouts(number, prompts, rows, version)
            except BaseException as error:  # the main thread raises it in `wait`
                self._error = error
            self.generated_s += time.monotonic() - start

        # A daemon thread, so that a rank that exits early does not wait for completions it will not use.
        self._thread = threading.Thread(target=run, name="look-ahead", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the running look-ahead is complete; return at once if there is none.

        The wait fails when an engine makes no token for `engine_stall_timeout` seconds.

        Raises:
            `EngineError` or `WeightVersionError`: the error that stopped the thread.
        """
        if self._thread is None:
            return
        start = time.monotonic()
        self._thread.join()
        self.waited_s += time.monotonic() - start
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def take(self, number: int, prompts: list[list[int]]) -> RoundRollouts | None:
        """Return the completions made ahead for this round and these prompts, or `None` if they must be generated."""
        self.wait()
        made, self._made = self._made, None
        if made is None:
            return None
        if made.number == number and made.prompts == prompts:
            return made
        if not self._warned:
            self._warned = True
            warn(
                f"{self._where}: round {number} has other prompts than those generated ahead (for round "
                f"{made.number}), so its completions are generated again. The look-ahead helps only if prompts "
                "depend on nothing but the dataset row."
            )
        return None

    @property
    def made(self) -> RoundRollouts | None:
        """Return the completions that a checkpoint must save; call `wait` first."""
        return self._made

    def drop(self) -> None:
        """Wait for the look-ahead of a run that ended early, and discard its completions or its error."""
        if self._thread is not None:
            self._thread.join()
        self._thread = self._made = self._error = None

    def restore(self, made: RoundRollouts) -> None:
        """Restore the completions that a checkpoint saved."""
        self._made = made

    def take_seconds(self) -> tuple[float, float]:
        """Return `generated_s` and `waited_s`, and reset both."""
        seconds = (self.generated_s, self.waited_s)
        self.generated_s = self.waited_s = 0.0
        return seconds


def to_arrays(made: RoundRollouts) -> tuple[dict[str, np.ndarray], dict]:
    """Convert a round's completions to flat arrays and JSON notes, for a checkpoint."""
    arrays = {
        "prompts": np.concatenate([np.asarray(p, dtype=np.int32) for p in made.prompts]),
        "prompt_lengths": np.asarray([len(p) for p in made.prompts], dtype=np.int32),
        "tokens": np.concatenate([row.tokens for row in made.rows]),
        "logprobs": np.concatenate([row.logprobs for row in made.rows]),
        "lengths": np.asarray([len(row.tokens) for row in made.rows], dtype=np.int32),
        "engines": np.asarray([row.engine for row in made.rows], dtype=np.int32),
    }
    return arrays, {"number": made.number, "step": made.version.step}


def from_arrays(arrays: dict[str, np.ndarray], notes: dict) -> RoundRollouts:
    """Invert [`to_arrays`]. The optimizer step is kept; the update is 0, because a resumed run counts updates anew."""
    version = WeightVersion(0, notes["step"])
    ends = np.cumsum(arrays["lengths"])[:-1]
    rows = zip(
        np.split(arrays["tokens"], ends), np.split(arrays["logprobs"], ends), arrays["engines"].tolist(), strict=True
    )
    prompts = np.split(arrays["prompts"], np.cumsum(arrays["prompt_lengths"])[:-1])
    return RoundRollouts(
        notes["number"], [p.tolist() for p in prompts], [Rollout(t, p, version, e) for t, p, e in rows], version
    )


class UpcomingBatches:
    """Batches of one epoch, fetched early enough that the next generation block's prompts are known.

    It fetches only when the trainer fetches, because fetching is a collective with a dispatching dataloader.

    Args:
        source (`Iterator`):
            Iterator over the epoch's batches.
        ahead (`int`):
            Number of batches to hold beyond those handed out: the length of a generation block.
    """

    def __init__(self, source: Iterator[Batch], ahead: int):
        self.source = source
        self._ahead = ahead
        self._held: deque[Batch] = deque()  # batches of the current optimizer step, then later ones
        self._handed = 0  # number of held batches that the trainer has received

    def open_window(self) -> "UpcomingBatches":
        """Drop the batches of the last optimizer step and return the iterator for those of the next one."""
        for _ in range(self._handed):
            self._held.popleft()
        self._handed = 0
        return self

    def __iter__(self) -> "UpcomingBatches":
        return self

    def __next__(self) -> Batch:
        self._fetch(self._handed + 1 + self._ahead)
        if self._handed == len(self._held):
            raise StopIteration
        self._handed += 1
        return self._held[self._handed - 1]

    def _fetch(self, count: int) -> None:
        while len(self._held) < count:
            try:
                self._held.append(next(self.source))
            except StopIteration:
                return

    def after(self, batch: Batch, count: int) -> Batch | None:
        """Return the batch `count` positions after the current `batch`, or `None` if the epoch ends before it."""
        index = self._index(batch)
        return self._held[index + count] if index is not None and index + count < len(self._held) else None

    def place_in_window(self, batch: Batch) -> int:
        """Count the batches of this optimizer step that come before `batch`."""
        return self._index(batch) or 0

    def _index(self, batch: Batch) -> int | None:
        return next((index for index, held in enumerate(self._held) if held is batch), None)
