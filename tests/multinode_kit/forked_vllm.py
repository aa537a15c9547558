"""The real engine with forked vLLM processes: `python -m multinode_kit.forked_vllm [FAULTS] SPEC.json`.

On a CPU vLLM starts its engine core and each worker as a new Python process that imports vLLM again: 24 of the 37 CPU
seconds that an engine with a tiny model takes. Here they are forks of the engine process, which is vLLM's own default
on GPUs. Process tree, plugin, weight updates and sampling are those of the started engine; `test_conformance.py` runs
the same tests on both.
"""

import multiprocessing
import os
import signal
import sys

from trl_multinode.engine_process.main import main
from trl_multinode.engine_process.vllm_backend import VllmBackend
from trl_multinode.wire.messages import EngineSpec

from .faulty_engine import FaultyBackend


def fork_vllm_processes() -> None:
    """Make vLLM fork its processes. Call it before vLLM starts one."""
    import torch
    from vllm import plugins
    from vllm.model_executor.models import registry

    fork = multiprocessing.get_context("fork")

    def begin_fork() -> None:
        plugins.plugins_loaded = False  # each vLLM process loads them, ours reports its pid
        # it is the parent's: vLLM's SIGTERM to its core would end the engine process
        signal.set_wakeup_fd(-1)
        # vLLM sets the variable for each worker; a fork's OpenMP has read it in the parent
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))

    # OpenMP threads of the parent would be missing in a fork, which then waits for them
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=begin_fork)
    multiprocessing.get_context = lambda method=None: fork  # type: ignore  # vLLM asks for "spawn" on every CPU
    # vLLM looks at a model class in a process of its own, because CUDA could be initialised: 10 s for each new class
    registry._run_in_subprocess = lambda look: look()


def make_backend(spec: EngineSpec) -> VllmBackend:
    """Return vLLM's backend, with faults if the command line names any."""
    fork_vllm_processes()
    return FaultyBackend(spec) if sys.argv[1:-1] else VllmBackend(spec)


if __name__ == "__main__":
    main(make_backend)
