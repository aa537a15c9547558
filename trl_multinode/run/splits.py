"""Advice on the split of a node's GPUs between training and engines, from measured seconds."""

from dataclasses import dataclass

TAIL_ROWS = 0.1  # an engine generates a tail with fewer than this share of its rows
SMALL_TAIL = 0.05  # of the step; the advice does not mention a shorter tail


@dataclass(frozen=True)
class StepTimes:
    """Measured seconds of one step.

    Args:
        generate_s (`float`), train_s (`float`):
            Seconds in which engines generate, and in which ranks train.
        tail_s (`float`, *optional*, defaults to 0):
            Part of `generate_s` in which an engine has fewer than 10 % of its rows.
    """

    generate_s: float
    train_s: float
    tail_s: float = 0.0

    def drained(self, gpus: float) -> float:
        """Return the seconds of generation with `gpus` times the present GPUs, if a round waits for all of its rows.

        More engines share the rows, but the longest rows end no sooner.
        """
        return self.tail_s + (self.generate_s - self.tail_s) / gpus

    def in_flight(self, gpus: float) -> float:
        """Return the same if rows of other rounds take the place of those that ended: a row of the tail then takes at
        most 10 % of an engine."""
        return (self.generate_s - self.tail_s + TAIL_ROWS * self.tail_s) / gpus


def split_advice(
    times: StepTimes,
    training: int,
    reserved: int,
    max_staleness: int = 0,
    nodes: int = 1,
) -> str:
    """Recommend a split of a node's GPUs, or nodes that only generate, from measured seconds.

    With g seconds of generation on the engines of a split and t seconds of training, a step takes g + t, or the longer
    of both if engines generate while the ranks train. From a staleness of 2 on, completions continue across syncs.

    Args:
        times ([`StepTimes`]):
            Measured seconds with the present split.
        training (`int`), reserved (`int`):
            Current number of training and of reserved GPUs per node.
        max_staleness (`int`, *optional*, defaults to 0):
            Rounds that are begun while a round trains.
        nodes (`int`, *optional*, defaults to 1):
            Nodes of the run. The pull of nodes that only generate is left out.
    """
    total = training + reserved

    def step_s(engines: float, staleness: int) -> float:
        generate = times.in_flight if staleness > 1 else times.drained
        parts = generate(engines / reserved), times.train_s * training / (total - engines)
        return max(parts) if staleness else sum(parts)

    splits = range(1, total)
    at = {engines: step_s(engines, max_staleness) for engines in splits}
    best = min(splits, key=at.__getitem__)
    # the engines of `count` whole nodes, shared by all nodes
    pools = {count: step_s(total * count / nodes, max_staleness) for count in range(1, nodes)}
    how = "beside" if max_staleness else "and"
    line = f"Split: {training}+{reserved} takes {at[reserved]:.1f} s of generation {how} training per step"
    if at[best] > 0.95 * at[reserved]:
        line += ", which is the best or within 5 % of it"
    else:
        line += f"; {total - best}+{best} would take about {at[best]:.1f} s (num_processes = {total - best} per node)"
    if pools and min(pools.values()) < 0.95 * at[best]:
        count = min(pools, key=pools.__getitem__)
        line += f"; {count} of {nodes} nodes that only generate, beside others that train on all {total}, would take "
        line += f"about {pools[count]:.1f} s"
    colocated = times.drained(total / reserved) + times.train_s * training / total
    line += f"; colocation on all {total} would take about {colocated:.1f} s if it fits in memory."
    if max_staleness > 1 or times.tail_s <= SMALL_TAIL * at[reserved]:
        return line
    in_flight_at = {engines: step_s(engines, 3) for engines in splits}
    best = min(splits, key=in_flight_at.__getitem__)
    other = "" if best == reserved else f", {total - best}+{best} about {in_flight_at[best]:.1f} s"
    return (
        f"{line} In {times.tail_s:.1f} of {times.generate_s:.1f} s of generation fewer than {100 * TAIL_ROWS:.0f} % "
        "of the rows run, and no split shortens this. max_staleness=3 fills it with rows of later rounds: "
        f"{training}+{reserved} would take about {in_flight_at[reserved]:.1f} s{other}."
    )
