"""What in a log needs a person: nothing to learn from, or a loss that is no number."""

from collections.abc import Iterator, Mapping
from math import isfinite

from .lines import numbers_in, short


def alerts(logs: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """
    Yield title and text of each.

    Args:
        logs (`Mapping[str, object]`):
            Metrics of a training step as `Trainer.log` received them.
    """
    found = numbers_in(logs)
    broken = [name for name in ("loss", "grad_norm") if not isfinite(found.get(name, 0.0))]
    if broken:
        values = " and ".join(f"`{name}` is {found[name]}" for name in broken)
        cure = "Look at the rewards and log-probs of this step, and lower the learning rate"
        yield "the loss is not finite", f"{values}. {cure}"
    if found.get("frac_reward_zero_std") == 1.0:
        yield (
            "rewards are equal",
            f"within every group ({_means(found)}), so no advantage is left and nothing is learned. Look at the "
            "completions (`log_completions=True`) and at the function",
        )


def _means(found: Mapping[str, float]) -> str:
    """Return the mean of each reward function."""
    means = {
        name.split("/")[1]: mean
        for name, mean in found.items()
        if name.startswith("rewards/") and name.endswith("/mean")
    }
    return ", ".join(f"`{name}` {short(mean)} on average" for name, mean in means.items())
