"""The fake engine as a fork of the [`template`](template.py): `python -m trl_multinode.testing.forked_engine ...`.

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

from ..wire.process_end import open_end
from ..wire.stop_signals import END_ENGINE, ignore_stop_signals
from .forked_process import Inherited, begin_process, show_node
from .forking import ForkedProcess


def run_engine(request: Mapping[str, Any], log: int, inherited: Inherited) -> None:
    """Become a fake engine, after a fork of the template."""
    begin_process(request["environment"], log, inherited)
    show_node()
    threading.Thread(target=_die_with, args=(open_end(request["sender"]),), daemon=True).start()
    from .fake_engine import FakeBackend, main

    sys.argv = [__file__, *request["arguments"]]
    main(FakeBackend)


def _die_with(sender: int) -> None:
    select.select([sender], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Stand for the engine. Arguments: the template's socket, then those of the fake engine."""
    socket_path, *arguments = sys.argv[1:]
    ignore_stop_signals()
    engine = ForkedProcess(socket_path, "engine", arguments, os.environ, sys.stdout.fileno())
    signal.signal(END_ENGINE, lambda *_: os.kill(engine.pid, END_ENGINE))
    code = engine.wait()
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
