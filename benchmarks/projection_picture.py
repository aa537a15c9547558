"""Picture of the projection: seconds over the size of a model, ours calculated and others' as published."""

from pathlib import Path

STYLES = {"host": "#c44e52", "nccl": "#4c72b0", "ipc": "#55a868"}
PLACES = {  # of a label beside its point, in points, where the usual place is taken
    ("verl nccl_parallel", 54.0): (-92, -10),
    ("verl nccl", 54.0): (-45, 5),
    ("TRL AsyncGRPO", 65.5): (8, -9),
    ("Moonshot checkpoint-engine", 470.2): (-128, -4),
    ("verl delta_sharded", 65.5): (-92, -4),
    ("verl delta_sharded", 470.2): (-112, -2),
    ("NeMo-RL NCCL-Reshard", 61.0): (-112, -4),
    ("NeMo-RL NCCL-Xfer", 61.0): (7, -8),
}
NODES = 32  # of the lines


def draw(found: dict, path: Path) -> None:
    """Draw the seconds of every model on 32 nodes, for each transport and network, with the published points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import ScalarFormatter

    figure, axes = plt.subplots(figsize=(9.5, 5.6))
    for words, line in zip(found["projected"], (":", "-"), strict=False):
        for kind, color in STYLES.items():
            rows = [row for row in found["projected"][words] if row["transport"] == kind]
            label = f"{kind}, {words.split(' (')[0]}"
            sizes, took = [row["gb"] for row in rows], [row["seconds"][NODES] for row in rows]
            axes.plot(sizes, took, line, color=color, marker=".", label=label)
    for row in found["published"]:
        middle = (row["low_s"] + row["high_s"]) / 2
        reach = (row["high_s"] - row["low_s"]) / 2
        axes.errorbar(
            row["gb"], middle, yerr=reach, fmt="D", color="#222222", markersize=5, capsize=3
        )
        place = PLACES.get((row["who"], row["gb"]), (7, -3))
        axes.annotate(
            row["who"], (row["gb"], middle), xytext=place, textcoords="offset points", fontsize=8
        )
    for name, row in {row["model"]: row for row in next(iter(found["projected"].values()))}.items():
        axes.annotate(name, (row["gb"], 0.11), ha="center", fontsize=9, color="#666666")
        axes.axvline(row["gb"], color="#dddddd", linewidth=0.8, zorder=0)
    axes.set(xscale="log", yscale="log", xlim=(12, 4500), ylim=(0.1, 400))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("weights, GB")
    axes.set_ylabel("seconds of a sync")
    axes.set_title(
        f"Lines: our arithmetic on {NODES} nodes. Diamonds: measured by others, each on its own cluster"
    )
    axes.grid(which="both", color="#eeeeee")
    axes.legend(fontsize=8, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
