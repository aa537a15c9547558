"""A rank without torch. Usage: print_node.py print|fail|wait

It prints what it finds of its node and ends; `fail` ends node 1 with an error; `wait` waits for SIGTERM, saves, and
leaves with code 143.
"""

import os
import signal
import sys
import time

(what,) = sys.argv[1:]
node, nodes = os.environ["GROUP_RANK"], os.environ["GROUP_WORLD_SIZE"]
cores, gpus = len(os.sched_getaffinity(0)), os.environ.get("CUDA_VISIBLE_DEVICES")
print(f"node {node} of {nodes}: {cores} cores, GPUs {gpus}", flush=True)
if what == "fail" and node == "1":
    sys.exit("no reason")


def save(*_) -> None:
    time.sleep(3)
    print("saved", flush=True)
    os._exit(143)


if what != "print":
    signal.signal(signal.SIGTERM, save)
    print("waits", flush=True)
    time.sleep(120)
