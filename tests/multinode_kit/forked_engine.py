"""An engine as a fork of a [`template`](template.py).

Usage: `python -m multinode_kit.forked_engine SOCKET PROGRAM [FAULTS] SPEC.json`.

A rank starts this module as it starts any engine, as a new process. The process stands for the engine: it asks the
template to fork one, passes its owner's signal on to it, and ends as it ends. If it is killed, so is the fork.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

from trl_multinode.wire.process_end import open_end
from trl_multinode.wire.stop_signals import END_ENGINE, ignore_stop_signals

from .forked_process import Inherited, begin_process, show_node
from .forking import FAKE_PROGRAM, VLLM_PROGRAM, ForkedProcess
from .namespaces import enter_namespaces_of


def run_engine(request: Mapping[str, Any], log: int, inherited: Inherited) -> None:
    """Become an engine in the place of the process that sent the request, after a fork of the template."""
    sender = request["sender"]
    begin_process(request["environment"], log, inherited)
    enter_namespaces_of(sender)
    os.chdir(request["folder"])
    os.sched_setaffinity(0, os.sched_getaffinity(sender))
    show_node()
    threading.Thread(target=_die_with, args=(open_end(sender),), daemon=True).start()
    sys.argv = [__file__, *request["arguments"]]
    PROGRAMS[request["program"]](inherited)


def _run_fake(_: Inherited) -> None:
    from .fake_engine import FakeBackend, main

    main(FakeBackend)


def _run_vllm(inherited: Inherited) -> None:
    from . import forked_vllm

    inherited.add_variables()
    forked_vllm.main(forked_vllm.make_backend)


PROGRAMS = {FAKE_PROGRAM: _run_fake, VLLM_PROGRAM: _run_vllm}


def _die_with(sender: int) -> None:
    select.select([sender], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Stand for the engine. Arguments: the template's socket, the program, then the arguments of the engine."""
    socket_path, program, *arguments = sys.argv[1:]
    ignore_stop_signals()
    engine = ForkedProcess(socket_path, program, arguments, os.environ, sys.stdout.fileno())
    signal.signal(END_ENGINE, lambda *_: os.kill(engine.pid, END_ENGINE))
    code = engine.wait()
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
