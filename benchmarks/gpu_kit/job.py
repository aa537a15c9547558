"""Run one job in a process of its own: `python -m gpu_kit.job --job NAME ...`, started by `benchmarks/gpu.py`."""

import argparse
import json
import sys
from pathlib import Path

from .jobs import JOBS
from .preflight import count_gpus, describe, obstacle
from .record import Recorder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--describe", action="store_true", help="print the machine as JSON")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--job")
    parser.add_argument("--stages", default="")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--engine", default="trl_multinode.engine_process.main")
    options = parser.parse_args()
    if options.describe:
        reason = None if options.rehearse else obstacle(count_gpus())
        print(json.dumps({"obstacle": reason} if reason else describe(options.rehearse)))
        return 0
    from .machine import Machine  # imports TRL and transformers

    machine = Machine(options.rehearse, options.engine)
    (job,) = (job for job in JOBS if job.name == options.job)
    wanted = "".join(stage for stage in job.stages if stage in options.stages)
    job.run(machine, Recorder(options.record), job.name, options.folder, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
