"""Picture of rows over time in a run of `make demo MODE=in-flight`, with the weight updates that they ran across.

python examples/demo/rows.py outputs/demo docs/use/long-tail    # some steps of a run: long-tail.json and long-tail.png
python examples/demo/rows.py docs/use/long-tail                 # the picture again, from long-tail.json
"""

import json
import sys
import time
from pathlib import Path

RANK = 0
FIRST_STEP, NUM_STEPS = 1, 5


class RecordedStream:
    """Stream of requests that writes a line per row: seconds of its request and of its end, tokens, number of updates.

    Args:
        stream ([`~trl_multinode.engine.stream.RequestStream`]):
            Stream that the rank's open groups use.
        path (`Path`):
            File to write.
    """

    def __init__(self, stream, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = stream
        self._file = open(path, "w", buffering=1)
        self._begins: dict = {}

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def add(self, requests) -> None:
        self._begins |= dict.fromkeys(requests, time.time())
        self._stream.add(requests)

    def poll(self) -> list:
        ended = self._stream.poll()
        for request, (rollout,) in ended:
            line = {
                "round": request.group[0], "begin": self._begins.pop(request), "end": time.time(),
                "tokens": len(rollout.tokens), "updates": len(rollout.versions),
            }  # fmt: skip
            self._file.write(json.dumps(line) + "\n")
        return ended


def read(folder: Path) -> dict:
    """Read the rows and weight syncs of some steps, in seconds after the first sync."""
    lines = [
        json.loads(line)
        for line in (folder / "_multinode/phases" / f"rank{RANK}.jsonl").read_text().splitlines()
    ]
    syncs = [line for line in lines if line.get("phase") == "sync"][
        FIRST_STEP : FIRST_STEP + NUM_STEPS
    ]
    start, end = syncs[0]["start"], syncs[-1]["start"] + syncs[-1]["seconds"]
    rows = [
        json.loads(line)
        for line in (folder / "rows" / f"rank{RANK}.jsonl").read_text().splitlines()
    ]
    shown = [row for row in rows if row["end"] > start and row["begin"] < end]
    return {
        "syncs": [[round(line["start"] - start, 3), round(line["seconds"], 3)] for line in syncs],
        "rows": [
            row | {"begin": round(row["begin"] - start, 3), "end": round(row["end"] - start, 3)}
            for row in sorted(shown, key=lambda row: (row["round"], row["end"]))
        ],
    }


def draw(record: dict, path: Path) -> None:
    """Draw a line per row from its request to its end, a color per round, and a bar per weight sync."""
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot

    rows, syncs = record["rows"], record["syncs"]
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for start, seconds in syncs:
        axes.axvspan(
            start, start + seconds, color="black", alpha=0.35, linewidth=0, label="weight sync"
        )
    colors = [f"C{row['round'] % 10}" for row in rows]
    axes.hlines(
        range(len(rows)),
        [row["begin"] for row in rows],
        [row["end"] for row in rows],
        colors=colors,
    )
    mixed = sum(row["updates"] > 1 for row in rows) / len(rows)
    title = (
        f"{len(rows)} completions of one rank, a color per round; "
        f"{mixed:.0%} hold tokens of several weight updates"
    )
    end = syncs[-1][0] + syncs[-1][1]
    axes.set(xlabel="seconds", ylabel="completion", xlim=(-0.1 * end, 1.05 * end), title=title)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[:1], labels[:1], loc="outside lower center")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    record = Path(sys.argv[-1])
    data, picture = record.with_suffix(".json"), record.with_suffix(".png")
    if len(sys.argv) > 2:
        data.write_text(json.dumps(read(Path(sys.argv[1]))) + "\n")
    draw(json.loads(data.read_text()), picture)


if __name__ == "__main__":
    main()
