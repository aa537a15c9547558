"""Picture of the readable log: `docs/operate/log.svg`, printed by rich from the logs of a run.

`python benchmarks/log_picture.py` draws the recorded run in `docs/operate/log.json` again. With the `output_dir` of a
run of several nodes, whose `trainer_state.json` or `history.jsonl` has the logs, it first records the last steps of
that run.
"""

import argparse
import io
import json
from pathlib import Path

from rich.console import Console

from trl_multinode.reporting.lines import node_table, other_line, step_line

PAGES = Path(__file__).parents[1] / "docs" / "operate"
WIDTH = 112  # of the picture, which a README shows about 830 pixels wide; longer lines are wrapped
STEPS = 4  # lines before the table, which is that of the last one


def read(folder: Path) -> list[dict]:
    """Return the logs of a run: those of the demo, or those in the trainer's newest state."""
    if (history := folder / "history.jsonl").is_file():
        return [json.loads(line) for line in history.read_text().splitlines()]
    states = sorted(folder.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(states[-1].read_text())["log_history"]


def record(folder: Path) -> dict:
    """Return the last steps of a run, and its evaluation if there is one after them."""
    logs = read(folder)
    steps = [index for index, entry in enumerate(logs) if "perf/step_s" in entry][-STEPS:]
    kept = [
        entry for entry in logs[steps[0] :] if "perf/step_s" in entry or "eval_runtime" in entry
    ]
    return {"max_steps": max(entry["step"] for entry in logs), "logs": kept}


def draw(recorded: dict, path: Path) -> None:
    """Print the lines and the table of the last step into an SVG file."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    last = max(entry["step"] for entry in recorded["logs"])
    for entry in recorded["logs"]:
        step = entry["step"]
        logs = {name: value for name, value in entry.items() if name != "step"}
        is_step = "perf/step_s" in logs
        line = step_line(logs, step, recorded["max_steps"]) if is_step else other_line(logs, step)
        console.print(line, highlight=False)
        if is_step and step == last and (table := node_table(logs, step)) is not None:
            console.print(table)
    console.save_svg(str(path), title="rank 0", unique_id="log")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", help="output_dir of a run to record; default: log.json"
    )
    options = parser.parse_args()
    recording = PAGES / "log.json"
    if options.folder is not None:
        recorded = record(options.folder)
        lines = ",\n".join(map(json.dumps, recorded["logs"]))
        recording.write_text(f'{{"max_steps": {recorded["max_steps"]}, "logs": [\n{lines}\n]}}\n')
    draw(json.loads(recording.read_text()), PAGES / "log.svg")


if __name__ == "__main__":
    main()
