"""Running engines without a trainer, for tests of the engine itself."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from trl_multinode.engine.client import EngineClient, Rollout
from trl_multinode.engine.node_engines import NodeEngines, local_places
from trl_multinode.engine.process import EngineProcess, wait_until_ready
from trl_multinode.engine.run_folder import RunFolder
from trl_multinode.engine.settings import (
    CPU_ENVIRONMENT,
    CPU_KV_CACHE_BYTES,
    cores_per_worker,
    save_without_weights,
)
from trl_multinode.errors import WeightSyncError
from trl_multinode.run.topology import Topology
from trl_multinode.sessions.harness import Harness
from trl_multinode.sessions.running import Sessions
from trl_multinode.weights.source import ModuleSource, WeightSource
from trl_multinode.weights.sync import WeightSync
from trl_multinode.weights.transport import Transport
from trl_multinode.wire.messages import CheckSlot, EngineSpec, UpdateWeights, WeightVersion
from trl_multinode.wire.supervisor import is_running

from .faults import FAKE, FORKED, REAL, TREE, WEIGHTS  # noqa: F401 - callers of `running_engines` import them
from .forking import from_template
from .models import tiny_tokenizer

STOP_TIMEOUT_S = 15.0
SAMPLING = {"temperature": 1.0}  # of sessions
ENGINE_ARGS = {
    "dtype": "float32",
    "seed": 0,
    "max_model_len": 256,
    "max_num_seqs": 64,
    "enforce_eager": True,
    "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,
}


@contextmanager
def running_engines(
    model: PreTrainedModel,
    log_folder: Path,
    module: str = FAKE,
    num_engines: int = 1,
    tensor_parallel_size: int = 1,
    window: int = 64,
    stall_timeout_s: float = 60.0,
    processing_class: Any = None,
    environment: Mapping[str, str] | None = None,
    **engine_args: Any,
) -> Iterator[NodeEngines]:
    """Start the engines of one node with dummy weights, and yield one rank's connections to them.

    Args:
        model (`PreTrainedModel`):
            Model that gives config and class; its weights reach the engines only when a [`WeightSync`] sends them.
        module (`str`):
            Module of the engine process: `FAKE`, `REAL`, `TREE` (the real one in a third of the CPU time), `FORKED`
            (a tenth), or one of them with faults, as `Faults.engine` returns it.
        processing_class (*optional*):
            Tokenizer or processor of the engines. Default: the tiny tokenizer.
        environment (`Mapping[str, str]`, *optional*):
            Variables of the engines. If given, only `engine_args` configure the engines, as on GPUs. Default: the
            engines run on this machine's CPU, and `engine_args` override `ENGINE_ARGS`.
    """
    if environment is None:
        module = from_template(module)
    folder = RunFolder(0)
    with ExitStack() as ends:
        ends.callback(folder.remove)
        save_without_weights(model, processing_class or tiny_tokenizer(), folder.path / "model")
        args = {"model": str(folder.path / "model"), "tensor_parallel_size": tensor_parallel_size}
        if environment is None:
            args = ENGINE_ARGS | args
            environment = CPU_ENVIRONMENT | cores_per_worker(tensor_parallel_size)
        processes = []
        for i in range(num_engines):
            log = log_folder / f"engine{i}.log"
            spec = EngineSpec(i, str(folder.path), os.getpid(), args | engine_args)
            process = EngineProcess(spec, log, dict(environment), module)
            ends.callback(process.kill)
            processes.append(process)
        wait_until_ready(processes, 300.0, print)
        sockets = [process.socket_path for process in processes]
        rows = sys.maxsize if num_engines == 1 else window
        engines = NodeEngines(
            local_places(sockets, 0, log_folder), 0, 0, folder.path / "load", stall_timeout_s, rows
        )
        ends.callback(engines.close)
        yield engines
        engines.shutdown(STOP_TIMEOUT_S)
        for process in processes:
            process.stop(STOP_TIMEOUT_S)


class SyncDriver:
    """Trainer's side of a weight sync in one process: perturb the weights, send them, compare log-probs.

    Args:
        model (`PreTrainedModel`):
            Model whose weights are sent.
        engines (`NodeEngines`):
            Engines that receive the weights.
        bucket_bytes (`int`):
            Largest bucket, in bytes. The default splits a layer of a tiny model over two buckets.
        source (`WeightSource`, *optional*):
            Source of the tensors. Default: the model's own weights.
        transport (`Transport`, *optional*):
            Memory of the slots. Default: host memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engines: NodeEngines,
        bucket_bytes: int = 40_000,
        source: WeightSource | None = None,
        transport: Transport | None = None,
    ):
        self.model = model
        self.engines = engines
        self.sync = WeightSync(
            source or ModuleSource(model, model.dtype), engines, bucket_bytes, transport
        )
        self.version = WeightVersion()
        # the same in each run, whatever has drawn before
        self._noise = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def perturb(self, scale: float = 0.05) -> None:
        """Change every parameter so much that log-probs of an engine with the old weights are off by more than 0.1."""
        for parameter in self.model.parameters():
            noise = torch.randn(parameter.shape, generator=self._noise)
            parameter.add_(noise.to(parameter) * scale)

    def send(self) -> WeightVersion:
        self.version = WeightVersion(self.version.update + 1, 10 * self.version.update)
        self.engines.expect(self.version)
        self.timings = self.sync.run(self.version)
        return self.version

    def send_part(self, num_buckets: int) -> None:
        """Give the first engine an update that ends after so many buckets; raises the engine's error."""
        assert self.sync.slots is not None
        signals, first = self.sync.slots.signals, self.sync._first
        version = WeightVersion(self.version.update + 1, 99)
        update = UpdateWeights(
            version=version,
            turn=signals.begin(),
            first_bucket=first,
            in_flight=self.sync.in_flight,
        )
        request = self.engines[0].post(update)
        if num_buckets:
            signals.send(first + num_buckets - 1)
        signals.end()
        self.engines[0].wait(request)

    @torch.no_grad()
    def logprobs(
        self, prompt: list[int], completion: list[int], temperature: float = 1.0
    ) -> torch.Tensor:
        ids = torch.tensor([[*prompt, *completion]])
        scores = (self.model(ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        return scores.gather(1, ids[0, len(prompt) :, None])[:, 0]


def sessions_on(
    driver: SyncDriver, harness: Harness, raises: bool = False, returns_text: bool = False
) -> Sessions:
    """Return the sessions of a rank on the engines of a driver, without a trainer; calls make at most 8 tokens."""
    settings = SimpleNamespace(tool_errors="raise" if raises else "answer")
    host = SimpleNamespace(topology=Topology.from_environment(), settings=settings)
    generation = SimpleNamespace(
        engines=driver.engines, version=driver.version, sampling=SAMPLING, max_completion_length=8
    )
    return Sessions(harness, host, generation, {}, returns_text)


def worst_difference(
    trainer: SyncDriver, groups: list[list[Rollout]], prompts: list[list[int]]
) -> float:
    """Return the largest log-prob difference |engine - trainer| over all rows that `NodeEngines.generate` returned."""
    differences = [
        (trainer.logprobs(prompt, row.tokens.tolist()) - torch.from_numpy(row.logprobs.copy()))
        .abs()
        .max()
        .item()
        for prompt, rows in zip(prompts, groups, strict=True)
        for row in rows
    ]
    return max(differences)


def sockets_of(engines: NodeEngines) -> list[Path]:
    """Return the unix sockets of the engines of this node."""
    return [Path(client._connection._socket.getpeername()) for client in engines]


def below(pid: int) -> list[psutil.Process]:
    """Return the live processes below a process, without zombies."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if is_running(child.pid)]


def crcs_of_weights(client: EngineClient) -> list[int]:
    """Return the CRC-32 of each worker's weights, bit by bit, from an engine of the kit that accepts faults."""
    try:
        client.ask(CheckSlot(slot=WEIGHTS, num_bytes=0, crc=-1))
    except WeightSyncError as error:  # its message has the checksums that it refuses
        text = str(error)
        return json.loads(text[text.index("[") : text.index("]") + 1])
    raise RuntimeError(f"{client.name} accepts every checksum")


def connected_again(engines: NodeEngines) -> NodeEngines:
    """Return further connections to the same engines, which accept the same versions."""
    load = sockets_of(engines)[0].parent / "load"
    other = NodeEngines([client.place for client in engines], 0, 0, load, 60.0, engines._window)
    for client in other:
        client._sent = engines._sent
    return other
