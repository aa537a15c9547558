"""A rank that reports its own state, or ends in some way. Usage: process.py FOLDER report|raise|exit|hang."""

import os
import sys

folder, case = sys.argv[1:]
rank = int(os.environ["RANK"])


def report() -> None:
    path = sys.path[0]  # Ray's import adds one before it
    import atexit
    import json
    import logging
    import random
    import signal
    import tempfile
    import threading
    from pathlib import Path

    import numpy
    import torch
    from accelerate import PartialState

    import trl_multinode
    from trl_multinode.run.watch import early

    trl_multinode.GRPOTrainer  # noqa: B018  imports all that ranks import; some of it sets variables
    watch = early.early_watch()
    watch.store.lend(lambda client: watch.arrivals.look(client, False))
    found = {
        "environment": dict(os.environ),
        "main": [__name__, __file__, sys.modules["__main__"].__dict__ is globals(), sys.argv, path],
        "folder": os.getcwd(),
        "temporary": tempfile.gettempdir() == os.environ["TMPDIR"],
        "session": os.getsid(0) == os.getpid(),
        "parent": os.getppid(),
        "handlers": {s.name: str(signal.getsignal(s)).partition(" at ")[0] for s in signal.valid_signals()
                     if isinstance(s, signal.Signals)},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "sockets": sockets_that_stay(),
        "standard_input": os.readlink("/proc/self/fd/0"),
        "unbuffered": [sys.stdout.write_through, sys.stderr.write_through],
        "threads": [thread.name for thread in threading.enumerate()],
        "state": dict(PartialState._shared_state),
        "log_handlers": len(logging.getLogger().handlers),
        "torch": [torch.get_num_threads(), torch.distributed.is_initialized()],
        "random": [random.random(), numpy.random.random(), torch.initial_seed()],
    }  # fmt: skip
    state = PartialState(cpu=True)
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    found["world"] = [state.num_processes, int(total)]
    Path(folder, f"report{rank}.json").write_text(json.dumps(found))
    print("to stdout")
    print("to stderr", file=sys.stderr)
    atexit.register(print, "at exit")
    threading.Timer(0.3, print, ["from a thread"]).start()
    torch.distributed.barrier()


def kind_of_file(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]
    except OSError:
        return "closed"


def sockets_that_stay() -> int:
    """Count the sockets. The watch keeps one, and for a moment a second one, to find this host's address."""
    import time

    deadline = time.monotonic() + 600
    while (count := sum(kind_of_file(fd) == "socket" for fd in os.listdir("/proc/self/fd"))) > 1:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return count


class Kept:
    def __del__(self):
        print("destroyed")


if case == "report":
    kept = Kept()
    report()
elif case == "raise" and rank == 1:
    raise ValueError("on purpose")
elif case == "exit" and rank == 1:
    sys.exit("the reason")
else:
    import time

    print("hangs", flush=True)
    time.sleep(600)
