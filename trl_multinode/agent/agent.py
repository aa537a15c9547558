"""An agent: it waits for a run, serves it with its engines until the run ends, and waits for the next one."""

import os
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from torch.distributed import HashStore

from ..engine.agents import Notice, Start
from ..engine.fleet import SHOWN, EngineFleet
from ..engine.node_engines import NodeEngines
from ..engine.node_port import pool_of_run
from ..engine.settings import EngineSettings, check_vllm
from ..errors import EngineError, MultiNodeError, WeightSyncError
from ..node_settings import NodeSettings
from ..run.endings.exit_codes import code_of
from ..run.gpu_variables import check_accelerator, check_gpu_variables
from ..run.phase_file import PhaseFile
from ..run.reporter import report
from ..run.topology import EngineDevices, Topology, assign_engines, shape_of
from ..run.watch.watchdog import Watchdog
from ..weights.transport import Transport
from ..wire.handshake import Pool, PortAddress
from ..wire.messages import WeightVersion
from ..wire.secret import pool_secret
from ..wire.stop_signals import preempt_signals
from .finding import notice_at
from .member import Member, join

POLL_S = 2.0  # between two looks for a run
WAITING_EVERY_S = 15.0
PULL_S = 1.0  # for a newer update, before this process looks whether the run has ended
# between the seeds of two agents; more than the engines of a run
SEEDS_APART = 1 << 16
# of a run that ends, or that loses its link to this machine
LEAVES = (OSError, EOFError, EngineError, WeightSyncError)


class AgentPlace(Topology):
    """Place of this process in its own messages; it is a rank of no run."""

    def __str__(self) -> str:
        return f"engines on {socket.gethostname()}"


class PulledWeights(Protocol):
    """Weights of the engines, as an agent sees them."""

    def pull(self, timeout_s: float) -> WeightVersion | None: ...

    def close(self) -> None: ...


def pulled_weights(
    ports: Sequence[PortAddress],
    pool: Pool,
    engines: NodeEngines,
    transport: Transport,
    settings: NodeSettings,
) -> PulledWeights:
    """Return the object that pulls updates from the ports of the training nodes, and lets the engines load them."""
    from ..weights.pulling import PulledUpdates

    return PulledUpdates(engines, transport, ports, pool)


@dataclass(frozen=True)
class AgentSettings:
    """Settings of an agent.

    Args:
        address (`tuple[str, int]`):
            Host and port of the store of a run: its `main_process_ip` and `main_process_port`.
        gpus (`Sequence[int]`, *optional*):
            Indices of GPUs for engines among the visible ones. Default: all.
        tensor_parallel_size (`int`, *optional*):
            GPUs per engine. Default: that of the run.
        num_engines (`int`, *optional*):
            Number of engines. Default: as many as fit.
        logs (`Path`):
            Folder for the logs of the engines.
    """

    address: tuple[str, int]
    gpus: Sequence[int] | None
    tensor_parallel_size: int | None
    num_engines: int | None
    logs: Path

    def devices(self, tensor_parallel_size: int, num_gpus: int) -> EngineDevices:
        """Return the devices of the engines.

        Raises:
            `ConfigurationError`: if GPUs, engines and tensor parallelism do not fit.
        """
        gpus = range(num_gpus) if self.gpus is None else self.gpus
        size = self.tensor_parallel_size or tensor_parallel_size
        no_ranks = AgentPlace(0, 1, 0, 0, 0, 1, launched=False)
        return assign_engines(no_ranks, num_gpus, gpus, self.num_engines, size)


class Agent:
    """Owner of the engines of a node without ranks. The main thread of its process makes it.

    Args:
        settings ([`AgentSettings`]):
            Settings of this agent.

    Raises:
        `ConfigurationError`: if the GPUs, vLLM or the flags cannot work.
    """

    def __init__(self, settings: AgentSettings):
        pool_secret()
        check_vllm()
        check_gpu_variables(os.environ)
        self._settings = settings
        settings.devices(1, torch.cuda.device_count())
        self._watch = Watchdog(AgentPlace(0, 1, 0, 1, 0, 1, launched=False), lambda: "serving")
        # `nohup` lets a process outlive its shell
        if (parent := os.getppid()) and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            end = partial(os.kill, os.getpid(), signal.SIGTERM)
            self._watch.of_process.processes.add(parent, end, self)
        self._fleet: EngineFleet | None = None
        self._number = 0  # in the last run
        self._engines: NodeEngines | None = None

    def close(self) -> None:
        """End the engines."""
        self._watch.forget_processes()
        if self._fleet is not None:
            self._fleet.close(self._engines)
        if self._engines is not None:
            self._engines.close()
        self._fleet = self._engines = None

    # ---- runs -------------------------------------------------------------------------------------------------------

    def serve_one(self) -> None:
        """Wait for a run, and serve it until it ends.

        Raises:
            `ConfigurationError`: if the secrets or versions differ, or if the engines of the run do not fit here.
            `EngineStartError`: if an engine does not start.
        """
        while not self._serve(*self._join()):
            time.sleep(POLL_S)

    def _join(self) -> tuple[Notice, Pool, socket.socket, Start]:
        """Wait for a run, and join it."""
        begin = time.monotonic()
        num_lines = 0
        while True:
            waited_s = time.monotonic() - begin
            if waited_s >= num_lines * WAITING_EVERY_S:
                num_lines += 1
                host, port = self._settings.address
                report(f"waits for a run at {host}:{port} ({waited_s:.0f} s)")
            notice = notice_at(self._settings.address)
            if notice is not None:
                pool = pool_of_run(notice.run)
                with suppress(*LEAVES):  # the port of a run that ends, or has not begun
                    return notice, pool, *join(notice.ports[0], pool, self._number)
            time.sleep(POLL_S)

    def _serve(self, notice: Notice, pool: Pool, stream: socket.socket, start: Start) -> bool:
        """Serve a run, and return whether it has ended. Otherwise this agent joins it again, with all engines."""
        member = Member(stream, notice.ports[0], pool, start.number, report)
        report(f"node {start.number} of the run {notice.run}")
        with closing(member):
            settings, devices = self._engine_settings(start)
            fleet, engines = self._with_engines(settings, start)
            restarts = fleet.restarts
            assert restarts is not None
            count = restarts.count
            transport = Transport(
                "host",
                torch.device("cpu"),
                pin=devices.sender is not None,
                timeout_s=settings.settings.engine_stall_timeout,
                workers=[settings.settings.vllm_tensor_parallel_size] * len(engines),
                report=report,
            )
            try:
                opened = pulled_weights(notice.ports, pool, engines, transport, settings.settings)
                with closing(opened) as weights:
                    while not member.ended.is_set() and restarts.count == count:
                        if weights.pull(PULL_S) is not None:
                            slots = min(engine.ready.slots for engine in engines)
                            member.serve(fleet.sockets, slots, engines.max_model_len)
            except LEAVES as error:
                # the end of a run may be noticed here first
                if not member.ended.wait(POLL_S):
                    report(f"leaves the run to join it again: {error}")
        return member.ended.is_set()

    # ---- engines ----------------------------------------------------------------------------------------------------

    def _engine_settings(self, start: Start) -> tuple[EngineSettings, EngineDevices]:
        """Return the settings of this node's engines for a run, and their devices."""
        settings, number = start.node_settings, start.number
        num_gpus = 0
        if start.on_gpus:
            num_gpus = torch.cuda.device_count()
            check_accelerator(num_gpus, number, needs="trl-multinode engines")
        workers = settings.vllm_tensor_parallel_size
        devices = self._settings.devices(workers, num_gpus)
        own_workers = self._settings.tensor_parallel_size or workers
        rows = (start.keywords["max_num_seqs"] or workers) // workers
        # all ranks of the run may have their rows on this node
        place = AgentPlace(0, 1, 0, start.ranks, number, number + 1, launched=False)
        place.assume(shape_of(place, devices))
        return EngineSettings(
            replace(
                settings,
                vllm_tensor_parallel_size=own_workers,
                seed=settings.seed + number * SEEDS_APART,
            ),
            place,
            devices,
            getattr(torch, start.dtype),
            start.keywords | {"max_num_seqs": rows * own_workers},
            start.lora_rank,
        ), devices

    def _with_engines(
        self, settings: EngineSettings, start: Start
    ) -> tuple[EngineFleet, NodeEngines]:
        """Return the engines, and wait until they are ready; those of an earlier run stay if nothing differs."""
        if self._fleet is not None and self._differs(self._fleet, settings, start):
            self.close()
        if self._fleet is None:
            self._number = start.number
            logs = self._settings.logs
            phases = PhaseFile(logs / "phases", rank=0, node=start.number)
            self._fleet = EngineFleet(
                settings.topology,
                self._watch,
                HashStore(),
                settings.settings,
                logs,
                report,
                phases,
            )
            self._fleet.start(settings, start.write_model)
            self._engines = self._fleet.connect(settings.window)
        assert self._engines is not None and self._fleet.restarts is not None
        while not all(map(self._fleet.restarts.is_ready, range(len(self._engines)))):
            time.sleep(POLL_S)
        self._engines.renew(range(len(self._engines)))
        return self._fleet, self._engines

    def _differs(self, fleet: EngineFleet, settings: EngineSettings, start: Start) -> bool:
        """Return whether the engines of a run would start with something else than those that run."""
        with tempfile.TemporaryDirectory(dir=fleet.folder) as folder:
            model_folder = Path(folder, "model")
            start.write_model(model_folder)
            found = fleet.differences(settings, model_folder)
        if found:
            names = ", ".join(found[:SHOWN])
            report(f"this run differs from the last one in {names}, so the engines start again")
        return bool(found)


def run(settings: AgentSettings, once: bool) -> int:
    """Serve one run after the other, until a signal or the end of the parent process ends this one.

    Args:
        settings ([`AgentSettings`]):
            Settings of the agent.
        once (`bool`):
            Return after one run.

    Returns:
        `int`: 0 after one run, else the code of the error (`run/endings/exit_codes.py`).
    """
    _obey_signals()
    try:
        with closing(Agent(settings)) as agent:
            agent.serve_one()
            while not once:
                agent.serve_one()
            return 0
    except (MultiNodeError, OSError) as error:
        report("\n".join([str(error), *getattr(error, "__notes__", ())]), error=True)
        return code_of(error)


def _obey_signals() -> None:
    """End this process in order at SIGTERM, SIGINT, or SIGHUP, unless it was started to ignore the signal."""
    numbers = [
        number
        for number in (signal.SIGINT, *preempt_signals())
        if signal.getsignal(number) != signal.SIG_IGN
    ]

    def stop(number: int, _: object) -> NoReturn:
        for each in numbers:  # a second one must not interrupt the end of the engines
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, stop)
