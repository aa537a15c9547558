"""Stands for `accelerate launch` and its rank, without libraries. Usage: stand_in.py launch --machine_rank K ... WHAT

`fail` ends node 1 with code 6. `wait` saves for 3 s when SIGTERM comes and leaves with code 143. It prints whether the
shell of its task is still there, because SLURM would kill what a shell leaves behind where it tracks cgroups.
"""

import os
import signal
import sys
import time
from pathlib import Path

*flags, what = sys.argv[1:]
node = flags[flags.index("--machine_rank") + 1]


def shell() -> str:
    """Return the pid of the parent of the roll-call, which is the parent of this process."""
    return Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]


def save(*_) -> None:
    print("saves", flush=True)
    time.sleep(3)
    print("saved" if shell() == SHELL else "left behind", flush=True)
    os._exit(143)


SHELL = shell()
signal.signal(signal.SIGTERM, save if what == "wait" else signal.SIG_DFL)
print(f"node {node} {what}s", flush=True)
if what == "fail" and node == "1":
    sys.exit(6)
time.sleep(120)
