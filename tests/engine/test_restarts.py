"""A restart that cannot begin ends the run as the end of an engine."""

import threading
from types import SimpleNamespace

from waiting import HANG_S

from trl_multinode.engine.restarts import EngineRestarts
from trl_multinode.run.endings.exit_codes import ENGINE


def test_a_restart_that_raises_ends_the_run_with_the_code_of_an_engine():
    told, ended = [], threading.Event()

    def report(cause: str, code: int = 1) -> None:
        told.append((cause, code))
        ended.set()

    def start_again(index: int):
        raise OSError(28, "No space left on device")

    process = SimpleNamespace(
        index=0,
        pid=1,
        start=0,
        name="engine 0 of node 1",
        why_ended=lambda: "killed",
        kill=lambda: None,
        record_loss=lambda why: None,
    )
    watch = SimpleNamespace(report=report, add_process=lambda *_: None)
    EngineRestarts([process], start_again, 2, 1.0, watch, lambda text: None)._on_end(process)
    assert ended.wait(HANG_S)
    assert told == [("OSError: [Errno 28] No space left on device", ENGINE)]
