"""The engine process: it serves vLLM's `AsyncLLM` through the protocol and supervises its own process tree.

The node's local main process starts it as `python -m trl_multinode.engine_process.main SPEC.json`. It is a separate
process because vLLM's front end costs Python time for every token, and because DeepSpeed's and vLLM's patches of torch
do not mix. This module imports neither TRL nor transformers.
"""

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from ..vllm_worker.plugin import RUN_MARKER
from ..wire.leftovers import remove_folder
from ..wire.locks import hold
from ..wire.messages import EngineSpec
from ..wire.stop_signals import END_ENGINE, ignore_stop_signals
from ..wire.supervisor import (
    become_subreaper,
    exit_cause,
    first_ended,
    kill_descendants,
    record_shared_memory,
    record_while_starting,
    release_resource_tracker,
    title_of,
    unlink_shared_memory,
    watch_end,
)
from ..wire.tolerant_output import tolerate_full_disk
from .backend import Backend
from .server import EngineServer
from .states import EngineStates
from .vllm_backend import VllmBackend, vllm_processes

LONGEST_REASON = 600  # characters; all ranks print it


def check_reports(folder: Path) -> None:
    """Check that every vLLM process has run our plugin; a process without it would outlive a killed engine.

    Raises:
        `RuntimeError`: if a process has not; the message names its pid and the cure.
    """
    silent = [process for process in vllm_processes() if not (folder / str(process.pid)).exists()]
    if silent:
        raise RuntimeError(
            f"vLLM processes {[process.pid for process in silent]} did not load the trl_multinode plugin. Install the "
            "package (`pip install trl-multinode`, in a clone `pip install .`; a bare PYTHONPATH has no entry points) "
            "and leave VLLM_PLUGINS unset."
        )


def leave(spec: EngineSpec, reason: str | None, code: int, owner_died: bool = False) -> None:
    """Kill all descendants, remove the socket and exit. `reason` goes to the owner; `None` marks a clean shutdown."""
    if reason:
        print(f"engine {spec.index}: {reason}", file=sys.stderr, flush=True)
        with suppress(OSError):
            spec.failure_path.write_text(reason)
    EngineStates.of(spec).enter("end")
    with suppress(OSError):  # this process must exit even if the record fails
        if not spec.socket_path.exists():  # the engine was still starting
            record_shared_memory(spec.shared_memory_record)
    release_resource_tracker()
    survivors = kill_descendants()
    if survivors:
        print(
            f"engine {spec.index}: processes {survivors} survived SIGKILL",
            file=sys.stderr,
            flush=True,
        )
    unlink_shared_memory(spec.shared_memory_record)
    spec.socket_path.unlink(missing_ok=True)
    # another engine removes the folder, because the ended owner cannot do it
    with suppress(FileNotFoundError):
        if owner_died and not list(Path(spec.folder).glob("engine*.sock")):
            remove_folder(Path(spec.folder))
    os._exit(code)


def in_one_line(error: BaseException) -> str:
    """Return an error's type and text in one line. The first line of pydantic's says only how many errors follow."""
    text = str(error)
    if callable(errors := getattr(error, "errors", None)):
        found = [(".".join(map(str, each["loc"])), each["msg"]) for each in errors()]
        text = "; ".join(f"{place}: {what}" if place else what for place, what in found)
    return " ".join(f"{type(error).__name__}: {text}".split())[:LONGEST_REASON]


async def run(spec: EngineSpec, backend: Backend) -> None:
    """Start the backend and serve until `Shutdown`. The owner's signal or the end of a process ends the whole tree."""
    start = time.monotonic()
    # the first process that ends decides; `leave` ends the others, and does not return
    one_end = threading.Lock()

    def ended(pid: int) -> None:
        with one_end:
            if pid == spec.owner_pid:
                server.sessions.kill_processes()
                leave(spec, None, 0, owner_died=True)
            if server.closing:
                return  # vLLM's own shutdown ends its processes one by one; `main` kills the rest
            server.leaving.set()
            first = first_ended(pid, titles)
            leave(spec, f"{titles[first]} (pid {first}) {exit_cause(first)}", 1)

    server = EngineServer(spec, backend)
    titles: dict[int, str] = {}
    watch_end(spec.owner_pid, ended)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(END_ENGINE, leave, spec, "ended by its owner", 1)
    with record_while_starting(spec.shared_memory_record):
        await backend.start()
    check_reports(spec.report_folder)
    record_shared_memory(spec.shared_memory_record)
    for process in vllm_processes():
        titles[process.pid] = title_of(process) or "a process of vLLM"
        watch_end(process.pid, ended)
    print(f"engine {spec.index}: ready after {time.monotonic() - start:.1f} s", flush=True)
    await server.serve()
    print(f"engine {spec.index}: shut down in good order", flush=True)


def main(make_backend: Callable[[EngineSpec], Backend] = VllmBackend) -> None:
    """Run an engine process; the last argument of the command line is the path of its [`EngineSpec`]."""
    spec = msgspec.json.decode(Path(sys.argv[-1]).read_bytes(), type=EngineSpec)
    # the run's folder must stay while this process removes what is its own
    hold(Path(sys.argv[-1]))
    become_subreaper()
    ignore_stop_signals()
    tolerate_full_disk()
    os.environ[RUN_MARKER] = f"{os.getpid()}:{spec.report_folder}"
    spec.report_folder.mkdir(mode=0o700, exist_ok=True)
    EngineStates.of(spec).enter("start")
    try:
        asyncio.run(run(spec, make_backend(spec)))
    except BaseException as error:  # every error must end the tree and reach the owner
        traceback.print_exc()
        leave(spec, in_one_line(error), 1)
    leave(spec, None, 0)


if __name__ == "__main__":
    main()
