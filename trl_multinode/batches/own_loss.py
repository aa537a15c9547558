"""Losses that are not TRL's: the class of the user's that defines one, and what it declares about it.

Balanced micro-batches and rounds ahead are exact for TRL's losses. A subclass may average in another way, or leave the
importance ratio out, and no tensor shows that.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import ConfigurationError

LOSSES = ("compute_loss", "_compute_loss")
REDUCTIONS = ("rows", "tokens")
KNOWN = ("trl_multinode.", "trl.trainer.", "transformers.")
RATIO = "importance_sampling_ratio"  # TRL's field of a batch


def owner_of(kind: type, *names: str) -> type | None:
    """Return the class that defines one of these methods, if it is neither TRL's trainer's nor this library's."""
    for one in kind.__mro__:
        if any(name in vars(one) for name in names) and not one.__module__.startswith(KNOWN):
            return one
    return None


def reason_of_loss(kind: type) -> str | None:
    """Return why the loss of a trainer class cannot be regrouped, or `None` if it can.

    Raises:
        `ConfigurationError`: if `loss_reduction` has another value than `"rows"` and `"tokens"`.
    """
    declared = getattr(kind, "loss_reduction", None)
    if declared is not None and declared not in REDUCTIONS:
        raise ConfigurationError(
            f"`{kind.__name__}.loss_reduction` must be one of {REDUCTIONS} or None, got {declared!r}.",
            setting="loss_reduction",
            got=declared,
            expected=REDUCTIONS,
        )
    owner = owner_of(kind, *LOSSES)
    if owner is None:
        return None
    above = kind.__mro__[: kind.__mro__.index(owner) + 1]
    if any(vars(one).get("loss_reduction") is not None for one in above):
        return None
    return (
        f"`{owner.__name__}` has a loss of its own. If it is the mean over the rows of its batch, or the sum over its "
        'tokens divided by `inputs["num_items_in_batch"]` as TRL does, set `loss_reduction = "rows"` or `"tokens"` in '
        "that class"
    )


class RatioCheck:
    """Check that a loss of the user's own reads TRL's importance ratio, in the first step of rounds ahead.

    Args:
        owner (`type`):
            Class that defines the loss.
    """

    def __init__(self, owner: type):
        self._owner = owner
        self._batches: list[_Watched] = []
        self._done = False

    def watched(self, inputs: Any) -> Any:
        """Return the batch of a loss, whose reads are noted until the check is done."""
        if self._done or not isinstance(inputs, dict) or RATIO not in inputs:
            return inputs
        self._batches.append(batch := _Watched(inputs))
        return batch

    def check(self) -> None:
        """Check the batches of an optimizer step.

        Raises:
            `ConfigurationError`: if the loss has left the ratio out.
        """
        if not self._batches:
            return
        read, self._done = any(batch.read for batch in self._batches), True
        self._batches.clear()
        if not read:
            raise ConfigurationError(
                f"The loss of `{self._owner.__name__}` does not read `inputs[{RATIO!r}]`, TRL's correction "
                "for completions that older weights made, so it would train them as if the present weights "
                "had.",
                setting="_compute_loss",
                cure="Multiply the loss of each token by it, call `super()._compute_loss`, or use `max_staleness=0`.",
            )


class _Watched(dict):
    """Batch that notes whether its importance ratio was read. A copy of the batch may be read unseen, and counts."""

    read = False
    # through `__getitem__`, unlike those of `dict`
    get, items, values = Mapping.get, Mapping.items, Mapping.values  # type: ignore[assignment]

    # without it `{**batch}` would copy the entries below these methods
    def __iter__(self) -> Iterator:
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        self.read |= key == RATIO
        return super().__getitem__(key)

    def pop(self, key: Any, *default: Any) -> Any:
        self.read |= key == RATIO
        return super().pop(key, *default)

    def copy(self) -> dict:
        return {**self}
