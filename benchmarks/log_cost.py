"""Cost of the readable log on rank 0, in milliseconds: `python benchmarks/log_cost.py [--nodes 64] [--ranks 7]`.

The numbers of all ranks are random; what is measured is the code from the gathered rows to the text, and what every
rank does per micro-batch and per phase. The gather itself and the trackers are left out.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from trl_multinode.engine_process.states import EngineStates
from trl_multinode.reporting.lines import node_table, rendered, step_line
from trl_multinode.reporting.metrics import NUMBERS, RunShape, step_metrics
from trl_multinode.reporting.steps import count_tokens
from trl_multinode.rollouts.staleness import summarize_rounds
from trl_multinode.run.phase_file import PhaseFile
from trl_multinode.run.topology import NodeShape, Topology
from trl_multinode.weights.timings import STAGES, SyncTimings, sync_metrics
from trl_multinode.wire.line_file import LineFile

REPEATS = 20


def milliseconds(work: Callable[[], object]) -> float:
    """Return the median time of `work`."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return round(1e3 * median(times), 4)


def write_step(file: PhaseFile) -> None:
    for _ in range(6):
        file.write("train", 1.0, 1.0, 1.0, 1)
    file.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=7, help="training ranks per node")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = torch.rand(options.nodes * options.ranks, len(NUMBERS)).tolist()
    world = options.nodes * options.ranks
    topology = Topology(0, world, 0, options.ranks, 0, options.nodes, launched=False)
    topology.learn({rank: NodeShape(options.ranks) for rank in range(world)})
    shape = RunShape(topology)

    def metrics() -> dict[str, float]:
        ranks = [dict(zip(NUMBERS, row, strict=True)) for row in rows]
        found = step_metrics(ranks, 1, shape)
        found |= summarize_rounds(ranks, [0.1] * len(ranks))
        stages = [[rank[name] for name in STAGES] for rank in ranks]
        return found | sync_metrics(SyncTimings(), stages, topology)

    logs = metrics()
    masks = {
        "prompt_mask": torch.ones(8, 512).long(),
        "completion_mask": torch.ones(8, 4096).long(),
    }
    with tempfile.TemporaryDirectory() as folder:
        file = PhaseFile(Path(folder), rank=0, node=0)
        states = EngineStates(
            LineFile(Path(folder) / "engine.jsonl", lambda error: None), node=0, engine=0
        )
        found = {
            "metrics": milliseconds(metrics),
            "line": milliseconds(lambda: step_line(logs, 1, 2)),
            "table": milliseconds(lambda: rendered(node_table(logs, 1))),
            "tokens of a micro-batch of 8 rows": milliseconds(lambda: count_tokens(masks, None)),
            "the 6 lines of a step's phases": milliseconds(lambda: write_step(file)),
            "a line of an engine's state": milliseconds(lambda: states.enter("generate", 8)),
            "a change of an engine's rows without a line": milliseconds(lambda: states.count(1, 8)),
        }
    print(json.dumps(found | {"series": len(logs)}, indent=1))


if __name__ == "__main__":
    main()
