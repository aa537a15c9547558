"""Start, readiness and end of a node's engine processes. Local main process only."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import msgspec

from ..errors import EngineStartError
from ..wire.connection import reason_of_end
from ..wire.line_file import LineFile
from ..wire.messages import EngineSpec
from ..wire.stop_signals import END_ENGINE, stop_signals_blocked
from ..wire.supervisor import exit_cause, exit_words, unlink_shared_memory
from .cores import on_cores
from .environment import engine_environment
from .run_folder import check_exists
from .start_log import REFERS_TO_ANOTHER, StartLog

PROGRESS_EVERY_S = 15.0
# after a process of vLLM has logged that the start failed, in which all of them must end
FAILED_S = 20.0


class EngineProcess:
    """One engine process and its log.

    Args:
        spec (`EngineSpec`):
            Settings of the process. The files of the process before it are removed.
        log_path (`Path`):
            File for all output of the engine and of vLLM's processes.
        environment (`dict[str, str]`):
            Variables on top of the allow-listed environment: devices, thread counts.
        module (`str`, *optional*):
            Module to run, and arguments for it, separated by blanks; the test kit passes engines of its own.
        cores (`Collection[int]`, *optional*):
            Cores that the process may use. Default: those of the calling thread.
    """

    def __init__(
        self,
        spec: EngineSpec,
        log_path: Path,
        environment: dict[str, str],
        module: str = "trl_multinode.engine_process.main",
        cores: Collection[int] = (),
    ):
        folder = Path(spec.folder)
        check_exists(folder, spec.node)
        self.index = spec.index
        self.start = spec.start
        self.name = f"engine {spec.index} of node {spec.node}"
        self.log_path = log_path
        self._spec = spec
        self.socket_path = spec.socket_path
        for left in (spec.socket_path, spec.failure_path, spec.shared_memory_record):
            left.unlink(missing_ok=True)
        spec_path = self.socket_path.with_suffix(".json")
        spec_path.write_bytes(msgspec.json.encode(spec))
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # append: an earlier run's error message may refer to this file
        with open(log_path, "ab", buffering=0) as log:
            with suppress(OSError):  # a full disk
                log.write(f"---- {self.name}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            self.start_log = StartLog(log_path)
            # a session of its own: Ctrl-C in the terminal must reach only the ranks, which then log why they end
            with stop_signals_blocked(), on_cores(cores):
                self._process = subprocess.Popen(
                    [sys.executable, "-m", *module.split(), str(spec_path)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    env=engine_environment(environment, folder), start_new_session=True,
                )  # fmt: skip
        self.pid = self._process.pid

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def is_ready(self) -> bool:
        """Return whether the engine's socket exists; raise `EngineStartError` if its start has failed."""
        is_alive = self.is_alive()
        self.start_log.follow()
        if not is_alive:
            stage = self.start_log.stage
            raise self._start_error(
                f"did not start: {self.why_ended()} (stage of its start: {stage})"
            )
        if self.start_log.failed_s > FAILED_S:
            cause = self.start_log.cause() or "see its log"
            raise self._start_error(
                f"failed to start: {cause.rstrip('.')}. Some of its processes stay. Log: {self.log_path}"
            )
        if is_ready := self.socket_path.exists():
            self.start_log.end()
        return is_ready

    def too_late(self, timeout_s: float) -> EngineStartError:
        """Return the error for an engine that was not ready in time."""
        return self._start_error(
            f"was not ready after {timeout_s:.0f} s ({self.start_log.seconds()}). Raise `engine_start_timeout`, or "
            f"see its log: {self.log_path}"
        )

    def _start_error(self, message: str) -> EngineStartError:
        """Return an error with the last lines of the log as a note, which Python prints below the message.

        All ranks print the message, and only this one the note.
        """
        error = EngineStartError(f"{self.name} {message}")
        lines = self.start_log.last_lines()
        error.add_note("\n".join([f"Last {len(lines)} lines of {self.log_path}:", *lines]))
        return error

    def why_ended(self) -> str:
        """Return the reason that the engine wrote, or else how its process ended, and the path of its log."""
        reason = reason_of_end(self._spec.failure_path)
        if reason is None:
            # set if another thread has asked for it, which removes the zombie
            code = self._process.returncode
            how = exit_cause(self.pid) if code is None else exit_words(code)
            reason = f"its process {self.pid} {how}"
        if any(words in reason for words in REFERS_TO_ANOTHER):
            reason = self.start_log.cause() or reason
        return f"{reason.rstrip('.')}. Log: {self.log_path}"

    def record_loss(self, why: str) -> None:
        """Write into the file of the engine's states that its process has ended; a killed engine cannot do it."""
        if self._spec.state_path:
            line = {"phase": "lost", "start": round(time.time(), 6), "cause": why}
            file = LineFile(Path(self._spec.state_path), lambda error: None)
            file.add(line | self._spec.labels)
            file.close()

    def stop(self, timeout_s: float) -> None:
        """Wait `timeout_s` for the process to end, and again after `END_ENGINE`; then kill the rest of its group."""
        # the second wait is after the signal, which makes the process kill its own tree
        for _ in range(2):
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.send_signal(END_ENGINE)
        self.kill()

    def kill(self) -> None:
        """SIGKILL the engine process and, up to 3 s later, what is left of its process group.

        Call it when the engine process has ended or must end now. During the 3 s the engine's children die by their
        parent-death signal, and multiprocessing's resource tracker unlinks their shared memory.
        """
        deadline = time.monotonic() + 3.0
        if self._process.poll() is None:
            self._process.kill()
        while time.monotonic() < deadline and self._group_alive():
            time.sleep(0.05)
        if self._group_alive():
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(5.0)
        unlink_shared_memory(self._spec.shared_memory_record)

    def _group_alive(self) -> bool:
        self._process.poll()  # reap the leader: its zombie would count as alive
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True


def wait_until_ready(
    engines: list[EngineProcess], timeout_s: float, report: Callable[[str], None]
) -> None:
    """Wait until all engines of the node are ready, and report the stage of each one that is not every 15 s.

    Raises:
        `EngineStartError`: if an engine ends, or an engine is not ready within `timeout_s`.
    """
    start = reported = time.monotonic()
    while waiting := [engine for engine in engines if not engine.is_ready()]:
        now = time.monotonic()
        if now - start > timeout_s:
            raise waiting[0].too_late(timeout_s)
        if now - reported >= PROGRESS_EVERY_S:
            reported = now
            stages = ", ".join(
                f"engine {engine.index} {engine.start_log.stage}" for engine in waiting
            )
            report(
                f"{len(waiting)} engine(s) still starting, {now - start:.0f} of {timeout_s:.0f} s: {stages}"
            )
        time.sleep(0.1)
    last = max(engines, key=lambda engine: engine.start_log.last_change)
    # they may have started long before this wait, while the model was loaded
    total_s = max(engine.start_log.total_s for engine in engines)
    report(f"{len(engines)} engine(s) ready after {total_s:.0f} s ({last.start_log.seconds()})")
