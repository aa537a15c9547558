"""A process that has imported what every rank or every vLLM engine imports, and that forks them on request.

[`forking`](forking.py) starts `python -u -m multinode_kit.template KIND SOCKET`, at most once per kind and
test session. There are two kinds, because DeepSpeed's and vLLM's patches of torch do not mix in one process. The
imports of a rank take 15 s of a core, those of a fake engine 5 s, those of vLLM 9 s; a fork takes a tenth of a second.
"""

import contextlib
import gc
import json
import os
import selectors
import socket
import sys
from importlib import import_module
from typing import NoReturn

from trl_multinode.wire.process_end import open_end
from trl_multinode.wire.supervisor import kill_descendants

from .forked_engine import run_engine
from .forked_process import Inherited, run_launcher, run_to_the_end
from .forking import FAKE_PROGRAM, LAUNCHER_PROGRAM, RANKS_KIND, VLLM_KIND, VLLM_PROGRAM

REQUEST_BYTES = 1 << 20  # a request holds the arguments and the environment of one process
PROGRAMS = {LAUNCHER_PROGRAM: run_launcher, FAKE_PROGRAM: run_engine, VLLM_PROGRAM: run_engine}
RANK_IMPORTS = (
    "accelerate.commands.accelerate_cli",
    "torch.distributed.run",
    "deepspeed",
    "peft",
    "datasets",
    "trl.trainer.grpo_trainer",
    "transformers.integrations.deepspeed",
    "transformers.models.qwen2.modeling_qwen2",
    "trl_multinode.trainer",
    "multinode_kit.fake_engine",
    "multinode_kit.models",
)
VLLM_IMPORTS = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.qwen2",
    "trl_multinode.engine_process.vllm_backend",
    "multinode_kit.faulty_engine",
    "multinode_kit.forked_vllm",
)
IMPORTS = {RANKS_KIND: RANK_IMPORTS, VLLM_KIND: VLLM_IMPORTS}


class Template:
    """Server of fork requests, until the process that started it ends. All forks and their children end with it.

    Each connection is one request: a message in JSON with the file descriptor of a log. The answers are the pid and,
    when the process has ended, its exit code.

    Args:
        listener (`socket.socket`):
            Socket on which requests arrive.
        inherited (`Inherited`):
            State of this process after the imports.
    """

    def __init__(self, listener: socket.socket, inherited: Inherited):
        self._listener = listener
        self._inherited = inherited
        self._running: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> pid, connection
        self._owner = open_end(os.getppid())
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._owner, selectors.EVENT_READ)

    def serve(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._owner:
                    kill_descendants()  # launchers, their ranks and the engines: no process would end them
                    sys.exit()
                elif key.fileobj is self._listener:
                    self._start()
                else:
                    self._report(key.fd)

    def _start(self) -> None:
        connection, _ = self._listener.accept()
        message, (log,), _, _ = socket.recv_fds(connection, REQUEST_BYTES, 1)
        request = json.loads(message)
        pid = os.fork()
        if pid == 0:
            run_to_the_end(lambda: PROGRAMS[request["program"]](request, log, self._inherited))
        os.close(log)
        # the process that sent the request was killed
        with contextlib.suppress(BrokenPipeError):
            connection.send(str(pid).encode())
        pidfd = open_end(pid)
        self._running[pidfd] = pid, connection
        self._selector.register(pidfd, selectors.EVENT_READ)

    def _report(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        pid, connection = self._running.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        # the process that sent the request was killed
        with (
            connection,
            contextlib.suppress(BrokenPipeError),
        ):
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        os.close(pidfd)


def main() -> None:
    """Import everything that the forks of a kind need, and serve until the process that started this one ends."""
    kind, listening = sys.argv[1:]
    before = dict(os.environ)
    # OpenMP threads of this process would be missing in its forks, which would wait for them
    import_module("torch").set_num_threads(1)
    for name in IMPORTS[kind]:
        import_module(name)
    gc.collect()
    gc.freeze()  # else the collector writes to every object, and each fork copies their pages
    listener = socket.socket(fileno=int(listening))
    Template(listener, Inherited.of_this_process(before, listener.fileno())).serve()


if __name__ == "__main__":
    main()
