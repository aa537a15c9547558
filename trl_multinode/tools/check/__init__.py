"""Report of what `accelerate launch` would run on this node. It starts no process, loads no model, touches no GPU.

    trl-multinode check accelerate_configs/4node.yaml --machine_rank 1 --main_process_ip HOST0
    trl-multinode check FILE [flags of accelerate launch] [--gpus_per_node 8] [script and its arguments]

File and flags go through accelerate's own parser, loader, choice of launcher and preparation for torchrun; only the
launchers themselves are replaced. The script's arguments go through its own parser, which is built without running the
script. The report lists every problem with its cure, not only the first. Exit status: 0 without problems, 1 with
problems, 2 for an invalid command line.
"""

from .launch import Batch, Launch, Problem
from .report import check, main

__all__ = ["Batch", "Launch", "Problem", "check", "main"]
