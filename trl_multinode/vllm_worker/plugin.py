"""Entry point that vLLM calls in each of its processes. Without the run marker it does nothing. Imports nothing heavy.

`register` does six things in a process of one of our engines. (1) It makes the kernel kill this process when its
parent dies: vLLM leaves its engine core and workers alive, holding the GPU, when the parent is killed (vllm #55510).
(2) It reports its pid, so that the engine can verify that every vLLM process did this. (3) It registers our
weight-transfer backend. (4) It lets the engine core note how much of its key-value cache is in use. (5) It ignores
SIGTERM and the pre-empt signal, which a scheduler sends to every process; only a worker has its handlers by then.
(6) It lets output fail silently: the log may be on a disk that is full.
"""

import os
import signal
import sys
from pathlib import Path

from ..wire.process_end import end_with_parent
from ..wire.stop_signals import ignore_stop_signals
from ..wire.tolerant_output import tolerate_full_disk

RUN_MARKER = "TRL_MULTINODE_ENGINE"  # set to "<pid of the engine process>:<folder for reports>"
BACKEND = "trl_multinode"


def register() -> None:
    """Register this package in a process of vLLM; a no-op outside the engines of this package."""
    marker = os.environ.get(RUN_MARKER)
    if marker is None:
        return
    engine_pid, folder = marker.split(":", 1)
    if os.getpid() != int(engine_pid):
        # the thread that forked it is a main thread in vLLM
        end_with_parent(os.getppid(), signal.SIGKILL)
        ignore_stop_signals()
        tolerate_full_disk()
        (Path(folder) / str(os.getpid())).touch()
        if "vllm.v1.engine.core" in sys.modules:  # the core; a worker does not import it
            from .core import extend_core, keep_stores_in

            extend_core()
            keep_stores_in(Path(folder).parent)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "trl_multinode.vllm_worker.worker", "BucketReceiver"
        )
