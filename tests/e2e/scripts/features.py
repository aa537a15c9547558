"""Scenarios of TRL's features, each under both trainers. Usage: features.py FOLDER NAME[,NAME...]"""

import sys
import time
from pathlib import Path

import deepspeed
from both_arms import compare
from common import RANK, write_result
from scenarios import SCENARIOS

# accelerate does so on GPUs only; without, TRL's reference model, loaded under ZeRO-3, believes in a world of one
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
folder, names = Path(sys.argv[1]), sys.argv[2].split(",")
if not SCENARIOS.keys() >= set(names):
    import nightly_scenarios  # noqa: F401  (adds its own)
for name in names:
    start = time.monotonic()
    (folder / name).mkdir(exist_ok=True)
    found = compare(name, lambda name=name: SCENARIOS[name](folder / name), folder / name)
    write_result(str(folder), name, **found, seconds=time.monotonic() - start)
    if RANK == 0:
        print(f"SCENARIO {name}: {time.monotonic() - start:.1f} s", flush=True)
deepspeed.comm.barrier()  # nobody takes its store and its sockets away from the others
deepspeed.comm.destroy_process_group()
