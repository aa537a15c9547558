"""What in a log needs a person: nothing to learn from, a loss that is no number, a restarted engine, a slow node."""

from collections.abc import Iterator, Mapping
from math import isfinite

from .lines import marked, nodes_in, numbers_in, short


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
    if restarts := found.get("engine/restarts"):
        yield (
            f"{restarts:.0f} restarts of engines",
            "since the start of the run. The log of that engine in `_multinode/logs` has the cause",
        )


def _means(found: Mapping[str, float]) -> str:
    """Return the mean of each reward function."""
    means = {
        name.split("/")[1]: mean
        for name, mean in found.items()
        if name.startswith("rewards/") and name.endswith("/mean")
    }
    return ", ".join(f"`{name}` {short(mean)} on average" for name, mean in means.items())


def slow_nodes(logs: Mapping[str, object]) -> dict[int, str]:
    """Return the nodes that marks in the table of nodes name as slower than the others, and why."""
    found: dict[int, str] = {}
    for node, why in marked(nodes_in(logs), numbers_in(logs)["perf/step_s"]).items():
        # a node that waits is one of the fast ones
        slow = [name for name in why if name.endswith("_s") and name != "wait_s"]
        if slow:
            found[node] = "; ".join(f"{name.removesuffix('_s')}: {why[name]}" for name in slow)
    return found
