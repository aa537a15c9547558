"""Additions to vLLM's engine core: the greatest use of its key-value cache, the level of its log, its signals.

vLLM's own statistics are off (`disable_log_stats`), because they cost front-end time for every row. Noting the use
costs the core one division per step: 0.6 us measured, where a step takes milliseconds.
"""

from pathlib import Path
from typing import Any
from uuid import uuid4

from ..wire.stop_signals import ignore_stop_signals, obey_stop_signals
from .quiet import quiet_vllm

TAKE_KV_USE = "take_kv_use"  # method of vLLM's core that the engine process calls


def extend_core() -> None:
    """Let vLLM's scheduler note its greatest cache use, and its core return it. Call it in the core's process.

    The core also gets the functions that the engine process calls in all of vLLM's processes, as `WorkerExtension` has
    them for the workers.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    schedule = Scheduler.schedule

    def schedule_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        self.greatest_kv_use = max(
            getattr(self, "greatest_kv_use", 0.0), self.kv_cache_manager.usage
        )
        return output

    def take_kv_use(self: Any) -> float:
        """Return the greatest share of the cache that was in use since the last call."""
        use = getattr(self.scheduler, "greatest_kv_use", 0.0)
        self.scheduler.greatest_kv_use = 0.0
        return use

    Scheduler.schedule = schedule_and_note
    setattr(EngineCore, TAKE_KV_USE, take_kv_use)
    # the core installs handlers of signals late
    for function in (quiet_vllm, ignore_stop_signals, obey_stop_signals):
        setattr(EngineCore, function.__name__, staticmethod(function))


def keep_stores_in(folder: Path) -> None:
    """Let the workers of an engine meet in a file of the run's private folder.

    vLLM makes the file in the temporary folder, where a killed engine leaves it. vLLM 0.26 has a TCP store instead,
    after whose address workers on a CPU name their shared memory; it stays.
    """
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    def in_folder() -> str:
        return f"file://{folder}/vllm_dist_{uuid4().hex}"

    for executor in (uniproc_executor, multiproc_executor):
        if hasattr(executor, "get_file_store_init_method"):
            executor.get_file_store_init_method = in_folder
