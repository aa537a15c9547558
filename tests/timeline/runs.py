"""Files of a small run: two nodes of two ranks and one engine, whose clocks differ, with rounds one step ahead."""

import json
from pathlib import Path

from pandas import DataFrame

STEPS = 4
AHEAD_S = 7.5  # of node 1's clock
BEGIN = 1_000_000.0
FATAL = "node 1, rank 2 failed in phase reward: ValueError: <b>no answer</b> </script>"


def write_lines(path: Path, lines: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def rank_lines(rank: int, attempt: int = 1, begin: float = BEGIN) -> list[dict]:
    """Return the lines of a rank: each step is 10 s, of which 1 s sync, 2 s reward, and 1 s wait on node 0."""
    node, found = rank // 2, []
    fixed = {"node": node, "attempt": attempt}
    begin += AHEAD_S * node
    found.append(
        {"phase": "set-up", "start": begin - 20, "seconds": 15.0, "total": 15.0, "step": 0} | fixed
    )
    for step in range(STEPS):
        at, wait = begin + 10 * step, 1.0 - node
        inner = [("sync", 0.5, 1.0), ("wait", 1.5, wait), ("reward", 4.0, 2.0)]
        found += [{"phase": name, "start": at + after, "seconds": each, "total": each, "step": step} | fixed
                  for name, after, each in inner if each]  # fmt: skip
        own = 9.0 - sum(each for _, _, each in inner)
        found.append(
            {"phase": "train", "start": at, "seconds": own, "total": 9.0, "step": step} | fixed
        )
    evaluation = {
        "phase": "generate",
        "start": begin + 40,
        "seconds": 3.0,
        "total": 3.0,
        "step": STEPS - 1,
    }
    return [*found, evaluation | fixed | {"evaluation": True}]


def engine_lines(
    node: int, attempt: int = 1, begin: float = BEGIN, in_flight: bool = False
) -> list[dict]:
    """Return the lines of a node's engine: it generates while the ranks train, and node 1's is lost in step 3."""
    fixed = {"node": node, "engine": 0, "attempt": attempt, "process": 0}
    begin += AHEAD_S * node
    found = [{"phase": "start", "start": begin - 10, "rows": 0, "update": 0} | fixed]
    for step in range(STEPS):
        at = begin + 10 * step
        rows = 6 if in_flight and step else 0
        found.append({"phase": "sync", "start": at + 0.5, "rows": rows, "update": step + 1} | fixed)
        found.append(
            {"phase": "generate", "start": at + 1.5, "rows": 8, "update": step + 1} | fixed
        )
        if node == 1 and step == 2:
            found.append({"phase": "lost", "start": at + 3, "cause": "killed by SIGKILL"} | fixed)
            fixed = fixed | {"process": 1}
            found.append({"phase": "start", "start": at + 4, "rows": 0, "update": 0} | fixed)
            continue
        found.append({"phase": "generate", "start": at + 5, "rows": 2, "update": step + 1} | fixed)
        if not in_flight:
            found.append({"phase": "idle", "start": at + 7, "rows": 0, "update": step + 1} | fixed)
    return [*found, {"phase": "end", "start": begin + 45, "rows": 0, "update": 0} | fixed]


def logs() -> list[dict]:
    return [
        {"step": step + 1, "attempt": 1, "reward": 0.1 * (step + 1), "loss": 1.0 / (step + 1), "perf/step_s": 10.0,
         "completions/mean_length": 20.0,
         "learning_rate": 1e-6, "note": "text"} for step in range(STEPS)
    ]  # fmt: skip


def write_completions(folder: Path, step: int, rows: int) -> None:
    """Write the file of TRL's `log_completions` for one log."""
    table = {
        "step": [step] * rows,
        "prompt": [[{"role": "user", "content": "1+1?"}]] * rows,
        "completion": [f"it is {row}" for row in range(rows)],
        "accuracy_reward": [float(row == 2) for row in range(rows)],
        "advantage": [abs(row - 2.2) for row in range(rows)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    DataFrame(table).to_parquet(folder / f"completions_{step:05d}.parquet")


def write_run(folder: Path, failed: bool = False, in_flight: bool = False) -> Path:
    """Write the files of a run, and return its `output_dir`."""
    own = folder / "_multinode"
    for rank in range(4):
        write_lines(own / "phases" / f"rank{rank}.jsonl", rank_lines(rank))
    for node in range(2):
        write_lines(
            own / "phases" / f"node{node}_engine0.jsonl", engine_lines(node, in_flight=in_flight)
        )
        ending = {"code": 6, "cause": FATAL, "phase": "reward", "step": 4, "checkpoint": "out/checkpoint-3",
                  "continues": True, "node": node, "time": "2026-01-02T03:04:05Z"}  # fmt: skip
        good = ending | {
            "code": 0,
            "cause": "",
            "phase": "end",
            "checkpoint": None,
            "continues": False,
        }
        write_lines(own / f"ending-node{node}.json", [ending if failed else good])
    write_lines(own / "log.jsonl", logs())
    write_completions(folder / "completions", step=2, rows=3)
    write_completions(folder / "completions", step=4, rows=12)
    settings = {
        "attempt": 1, "time": BEGIN, "model": "a/model", "nodes": 2, "settings": {"max_staleness": 1},
        "defaults": {"num_engines": None}, "versions": {"trl": "1.16.0", "trl_multinode": "0.1.0"},
    }  # fmt: skip
    write_lines(own / "settings.jsonl", [settings])
    return folder
