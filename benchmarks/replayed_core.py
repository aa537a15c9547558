"""vLLM's front end with a played engine core: what happens on the host after the last token, without a GPU before it.

`make_async_mp_client` is where vLLM's `AsyncLLM` starts its engine core. Here it gets a `ReplayedCore`, which makes
random tokens for all rows of a round in lock-step. Everything above it is real: vLLM's `AsyncLLM`, `OutputProcessor`
and server, our engine process. The last step gives every row its last token at once, which is the worst moment.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np
import psutil
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from trl_multinode.wire.process_end import end_with_parent
from trl_multinode.wire.supervisor import (
    become_subreaper,
    kill_descendants,
    record_shared_memory,
    unlink_shared_memory,
)

FORK = get_context("fork")
VOCABULARY = (
    150_000  # ids as large as real ones: Python keeps small integers, and they are short in JSON
)
MAX_STEPS_AHEAD = 4  # that wait for the front end; a real core is not faster than it either
# tokens of a row come 64 at a time, as from speculative decoding, the last 64 one by one
TOGETHER, TAIL = (
    64,
    64,
)
ENGINE_ARGS = {
    "dtype": "float32", "max_model_len": 8192, "max_num_seqs": 512, "seed": 0, "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
}  # fmt: skip
STOP_S = 20.0  # for the end of a server and of its vLLM processes
PAUSE_S = 0.02  # before the last step, as long as one takes on a GPU: the front end has seen all but the last tokens


@dataclass
class Round:
    """What the benchmark and a server's core tell each other, in shared memory."""

    # to wait for, before tokens are made
    num_rows: Synchronized = field(default_factory=lambda: FORK.Value("l", 0))
    num_tokens: Synchronized = field(default_factory=lambda: FORK.Value("l", 0))  # of every row
    # monotonic time of the last step
    last_token: Synchronized = field(default_factory=lambda: FORK.Value("d", 0.0))


class ReplayedCore:
    """Takes the place of vLLM's `AsyncMPClient`: the same messages, made here instead of in another process."""

    engine_ranks_managed = [0]
    resources = type("Resources", (), {"engine_dead": False})

    def __init__(self, round_: Round):
        self._round = round_
        self._rows: list[str] = []
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self._random = np.random.default_rng(os.getpid())
        self._steps: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue(MAX_STEPS_AHEAD)
        self.outputs_queue = self._steps  # the engine counts tokens when they are put here
        self._player: asyncio.Task | None = None

    async def get_supported_tasks_async(self):
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._rows.append(request.request_id)
        if len(self._rows) == self._round.num_rows.value:
            self._player = asyncio.create_task(self._play(self._rows, self._round.num_tokens.value))
            self._rows = []

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._steps.get()

    async def collective_rpc_async(self, method, *_) -> list[str]:
        """Refuse the extension of log-probs: a probe row would follow, which no round contains."""
        return [f"there is no worker for {method!r}, tokens are played"]

    async def call_utility_async(self, method, *_) -> None:
        """Do nothing: there is no core whose signals or logs could be set."""

    async def reset_mm_cache_async(self) -> None: ...

    async def abort_requests_async(self, request_ids) -> None:
        assert not request_ids, "the round was cut short"

    def shutdown(self, timeout=None) -> None: ...

    async def _play(self, rows: list[str], num_tokens: int) -> None:
        early = max(num_tokens - TAIL, 0)
        counts = [TOGETHER] * (early // TOGETHER) + [1] * (
            early % TOGETHER + min(num_tokens, TAIL) - 1
        )
        for count in counts:
            await self._steps.put(self._step(rows, count, None))
        await asyncio.sleep(PAUSE_S)
        step = self._step(rows, 1, FinishReason.LENGTH)
        self._round.last_token.value = step.timestamp
        # as it comes from another process
        await self._steps.put(self._decoder.decode(self._encoder.encode(step)))

    def _step(
        self, rows: list[str], count: int, finish_reason: FinishReason | None
    ) -> EngineCoreOutputs:
        ids = self._random.integers(2, VOCABULARY, (len(rows) * count, 1))
        logprobs = -self._random.random((len(rows) * count, 1), dtype=np.float32) * 10
        lists = LogprobsLists(ids, logprobs, ids[:, 0] % 100, [i * count for i in range(len(rows))])
        return EngineCoreOutputs(outputs=[
            EngineCoreOutput(
                request_id=row, new_token_ids=ids[i * count : (i + 1) * count, 0].tolist(),
                new_logprobs=lists.slice_request(i, count), finish_reason=finish_reason,
            )
            for i, row in enumerate(rows)
        ])  # fmt: skip


def play_core(round_: Round) -> None:
    """From here on this process's vLLM has a played core."""
    EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: ReplayedCore(round_))


def watch_core(round_: Round) -> None:
    """From here on the time stamps of this process's real engine core are noted: the last one is the last token's."""
    original = OutputProcessor.process_outputs

    def process_outputs(self, outputs, timestamp=None, stats=None):
        round_.last_token.value = timestamp
        return original(self, outputs, timestamp, stats)

    OutputProcessor.process_outputs = process_outputs


def run_our_engine(round_: Round, model: Path, socket: Path, prepare: Callable = play_core) -> None:
    """An engine process of this library: its backend and server, unchanged."""
    from trl_multinode.engine_process.server import EngineServer
    from trl_multinode.engine_process.vllm_backend import VllmBackend
    from trl_multinode.vllm_worker.plugin import RUN_MARKER
    from trl_multinode.wire.messages import EngineSpec, WeightVersion

    async def serve() -> None:
        backend = VllmBackend(spec)
        await backend.start()
        server = EngineServer(spec, backend)
        await server._weights.end(1, WeightVersion(1, 0))  # no weights are sent here
        record_shared_memory(spec.shared_memory_record)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server._closing.set)
        await server.serve()

    become_subreaper()
    prepare(round_)
    folder = str(model.parent)
    os.environ[RUN_MARKER] = f"{os.getpid()}:{folder}"
    args = ENGINE_ARGS | {"model": str(model)}
    spec = EngineSpec(index=0, folder=str(socket.parent), owner_pid=os.getppid(), engine_args=args)
    try:
        asyncio.run(serve())
    finally:
        kill_descendants()
        unlink_shared_memory(spec.shared_memory_record)


def run_real_engine(round_: Round, model: Path, socket: Path) -> None:
    """The same with vLLM's own engine core, on a CPU and with dummy weights."""
    from trl_multinode.engine.settings import CPU_ENVIRONMENT

    os.environ.update(CPU_ENVIRONMENT, VLLM_WORKER_MULTIPROC_METHOD="spawn")
    run_our_engine(round_, model, socket, watch_core)


def run_vllm_serve(round_: Round, model: Path, address: Path | int) -> None:
    """`vllm serve` on a unix socket or on a port of this machine."""
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    play_core(round_)
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args([
        "--model", str(model), "--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "512",
        "--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log", "--max-logprobs", "-1",
        *(["--host", "127.0.0.1", "--port", str(address)] if isinstance(address, int) else ["--uds", str(address)]),
    ])  # fmt: skip
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args))


class Server:
    """A forked server and its round; ready when its socket takes connections."""

    def __init__(self, run: Callable, model: Path, address, log: Path):
        self.round = Round()
        self._process = FORK.Process(target=self._run, args=(run, model, address, log))
        self._process.start()

    def _run(self, run: Callable, model: Path, address, log: Path) -> None:
        end_with_parent(os.getppid(), signal.SIGKILL)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        run(self.round, model, address)

    def stop(self) -> None:
        """End the server by SIGTERM, so that it removes its shared memory, and kill what is left after `STOP_S`."""
        children = (
            psutil.Process(self._process.pid).children(recursive=True)
            if self._process.is_alive()
            else []
        )
        self._process.terminate()
        self._process.join(STOP_S)
        self._process.kill()
        for process in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.join()


class Rank:
    """A forked rank. `make()` gives `ask(...)`, which prepares a request and gives what sends it and returns its rows;
    the answer is the time at which the rows were there.
    """

    def __init__(self, make: Callable[[], Callable]):
        self._pipe, other = FORK.Pipe()
        self._process = FORK.Process(target=self._run, args=(other, make), daemon=True)
        self._process.start()

    @staticmethod
    def _run(pipe, make: Callable[[], Callable]) -> None:
        end_with_parent(os.getppid(), signal.SIGKILL)
        ask = make()
        pipe.send(0.0)
        while True:
            rows, tokens, *more = pipe.recv()
            answer = ask(rows, tokens, *more)
            ids, logprobs = answer()
            end = time.monotonic()
            assert [len(row) for row in ids] == [len(row) for row in logprobs] == [tokens] * rows
            pipe.send(end)

    def send(self, *request) -> None:
        self._pipe.send(request)

    def receive(self, deadline_s: float = 300.0) -> float:
        if not self._pipe.poll(deadline_s):
            raise TimeoutError(f"A rank said nothing for {deadline_s:.0f} s.")
        return self._pipe.recv()

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
