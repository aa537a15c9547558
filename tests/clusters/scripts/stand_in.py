"""Stands for `accelerate launch` and its rank, without libraries. Usage: stand_in.py launch --machine_rank K ... WHAT

`fail` ends node 1 with code 6; `wait` saves for 3 s when SIGTERM comes and leaves with code 143.
"""

import os
import signal
import sys
import time

*flags, what = sys.argv[1:]
node = flags[flags.index("--machine_rank") + 1]


def save(*_) -> None:
    print("saves", flush=True)
    time.sleep(3)
    print("saved", flush=True)
    os._exit(143)


signal.signal(signal.SIGTERM, save if what == "wait" else signal.SIG_DFL)
print(f"node {node} {what}s", flush=True)
if what == "fail" and node == "1":
    sys.exit(6)
time.sleep(120)
