"""An agent: it waits for a run, serves it with its engines until the run ends, and waits for the next one."""

import argparse
import os
import signal
import socket
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.distributed import HashStore

from ..engine.agents import Join, Notice, Start
from ..engine.fleet import SHOWN, EngineFleet
from ..engine.group import answers
from ..engine.node_engines import NodeEngines
from ..engine.node_port import pool_of_run
from ..engine.restarts import EngineRestarts
from ..engine.settings import EngineSettings, check_vllm
from ..errors import EngineError, MultiNodeError, PeerFailureError, WeightSyncError
from ..run.endings.exit_codes import code_of
from ..run.gpu_variables import check_accelerator
from ..run.phase_file import PhaseFile
from ..run.reporter import report
from ..run.topology import EngineDevices, Topology, assign_engines, shape_of
from ..run.watch.watchdog import Watchdog
from ..weights.pulling import PulledUpdates
from ..weights.transport import Transport
from ..wire.handshake import Pool
from ..wire.messages import Await, Done, Drain, EngineTimes
from ..wire.process_end import end_with_parent
from ..wire.secret import pool_secret
from ..wire.stop_signals import preempt_signals
from .finding import notice_at
from .leaving import Leaving
from .member import Member

POLL_S = 2.0  # between two looks for a run
WAITING_EVERY_S = 15.0
PULL_S = 1.0  # for a newer update, before this process looks whether the run has ended
# between the seeds of two agents; more than the engines of a run
SEEDS_APART = 1 << 16
# of a run that ends, or that loses its link to this machine
LEAVES = (OSError, EOFError, EngineError, WeightSyncError, PeerFailureError)


class AgentPlace(Topology):
    """Place of this process in its own messages; it is a rank of no run."""

    def __str__(self) -> str:
        return f"engines on {socket.gethostname()}"


class Agent:
    """Owner of the engines of a node without ranks. The main thread of its process makes it.

    Args:
        flags (`argparse.Namespace`):
            Flags of `trl-multinode engines`: `join`, a host and a port; `engine_gpus`, `tp` and `num_engines`, or
            `None` for all GPUs, the run's setting and as many as fit; the folder `logs`; `why` it was started.
        leaving ([`Leaving`]):
            Requests to leave.

    Raises:
        `ConfigurationError`: if the secret, the GPUs, vLLM or the flags cannot work.
    """

    def __init__(self, flags: argparse.Namespace, leaving: Leaving):
        self._leaving = leaving
        pool_secret()
        check_vllm()
        self._flags = flags
        self._devices(1, torch.cuda.device_count())
        self._watch = Watchdog(AgentPlace(0, 1, 0, 1, 0, 1, launched=False), lambda: "serving")
        # `nohup` lets a process outlive its shell
        if (parent := os.getppid()) and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            # at once; SIGTERM lets open rows end first
            end = partial(os.kill, os.getpid(), signal.SIGHUP)
            self._watch.of_process.processes.add(parent, end, self)
        self._fleet: EngineFleet | None = None
        self._number = 0  # in the last run
        self._engines: NodeEngines | None = None

    def _devices(self, workers: int, num_gpus: int) -> EngineDevices:
        """Return the devices of engines with so many workers each, unless a flag has another number."""
        flags = self._flags
        gpus = range(num_gpus) if flags.engine_gpus is None else flags.engine_gpus
        no_ranks = AgentPlace(0, 1, 0, 0, 0, 1, launched=False)
        return assign_engines(no_ranks, num_gpus, gpus, flags.num_engines, flags.tp or workers)

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
        """Wait for a run, and serve it until it ends, or until this agent leaves.

        Raises:
            `ConfigurationError`: if the secrets or versions differ, or if the engines of the run do not fit here.
            `EngineStartError`: if an engine does not start.
        """
        while not self._serve(*self._join()):
            time.sleep(POLL_S)

    def _join(self) -> tuple[Notice, Pool, Member]:
        """Wait for a run, and join it."""
        address, begin = self._flags.join, time.monotonic()
        num_lines = 0
        while True:
            waited_s = time.monotonic() - begin
            if waited_s >= num_lines * WAITING_EVERY_S:
                num_lines += 1
                report(f"waits for a run at {':'.join(map(str, address))} ({waited_s:.0f} s)")
            notice = notice_at(address)
            if notice is not None:
                pool = pool_of_run(notice.run)
                with suppress(*LEAVES):  # the port of a run that ends, or has not begun
                    join = Join(socket.gethostname(), self._number, self._flags.why)
                    return notice, pool, Member(notice.ports[0], pool, join, report)
            time.sleep(POLL_S)

    def _serve(self, notice: Notice, pool: Pool, member: Member) -> bool:
        """Serve a run, and return whether it has ended or this agent leaves. Otherwise it joins again."""
        start = member.start
        report(f"node {start.number} of the run {notice.run}")
        with closing(member):
            settings = self._engine_settings(start)
            fleet, engines, restarts = self._with_engines(settings, start)
            count = restarts.count
            node_settings = settings.settings
            transport = Transport(
                pin=settings.devices.sender is not None,
                folder=fleet.folder,
                timeout_s=node_settings.engine_stall_timeout,
                workers=[node_settings.vllm_tensor_parallel_size] * len(engines),
                report=report,
            )
            try:
                pulled = PulledUpdates(engines, transport, notice.ports, pool, report)
                with closing(pulled) as updates, self._leaving.in_order():
                    while not member.ended.is_set() and restarts.count == count:
                        if updates.pull(PULL_S) is not None and not self._leaving.asked:
                            member.serve(fleet.sockets)
                        if self._has_left(member, engines):
                            return True
            except LEAVES as error:
                # the end of a run may be noticed here first
                if not member.ended.wait(POLL_S):
                    report(f"leaves the run to join it again: {error}")
        return member.ended.is_set() or self._leaving.asked

    def _has_left(self, member: Member, engines: NodeEngines) -> bool:
        """Report the engines' times to the run; return whether this agent leaves and no row is open any more."""
        if self._leaving.asked:
            member.leave(self._leaving.why())
        posted = engines.post_all(Drain() if self._leaving.asked else Await(min_update=0))
        found = [reply for _, reply in answers(posted) if isinstance(reply, Done)]
        member.report_times(
            EngineTimes(
                clock_s=sum(reply.times.clock_s for reply in found),
                slot_s=sum(reply.times.slot_s for reply in found),
            )
        )
        return self._leaving.asked and self._leaving.is_over(sum(one.num_open for one in found))

    # ---- engines ----------------------------------------------------------------------------------------------------

    def _engine_settings(self, start: Start) -> EngineSettings:
        """Return the settings of this node's engines for a run."""
        settings, number, num_gpus = start.node_settings, start.number, 0
        if start.on_gpus:
            num_gpus = torch.cuda.device_count()
            check_accelerator(num_gpus, number, needs="trl-multinode engines")
        workers = settings.vllm_tensor_parallel_size
        devices = self._devices(workers, num_gpus)
        own_workers = self._flags.tp or workers
        # all ranks of the run may have their rows on this node
        place = AgentPlace(0, 1, 0, start.ranks, number, number + 1, launched=False)
        place.assume(shape_of(place, devices))
        seed = settings.seed + number * SEEDS_APART
        # TRL's number is that of one rank's rows times the workers
        rows = (start.keywords["max_num_seqs"] or workers) // workers
        return EngineSettings(
            replace(settings, vllm_tensor_parallel_size=own_workers, seed=seed),
            place,
            devices,
            getattr(torch, start.dtype),
            start.keywords | {"max_num_seqs": rows * own_workers},
            start.lora_rank,
        )

    def _with_engines(
        self, settings: EngineSettings, start: Start
    ) -> tuple[EngineFleet, NodeEngines, EngineRestarts]:
        """Return the engines, and wait until they are ready; those of an earlier run stay if nothing differs."""
        if self._fleet is not None and self._differs(self._fleet, settings, start):
            self.close()
        if self._fleet is None:
            self._number = start.number
            logs = self._flags.logs
            phases = PhaseFile(logs / "phases", 0, start.number)
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
        fleet, engines, restarts = self._fleet, self._engines, self._fleet.restarts
        assert engines is not None and restarts is not None
        indices = range(len(engines))
        while not all(map(restarts.is_ready, indices)):
            time.sleep(POLL_S)
        engines.renew(indices)
        return fleet, engines, restarts

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


def run(flags: argparse.Namespace) -> int:
    """Serve one run after the other, until a signal or the end of the parent process ends this one.

    Args:
        flags (`argparse.Namespace`):
            Flags as for [`Agent`]; `once`: return after one run; `parent`: pid of the actor that has started this
            process, or `None`.

    Returns:
        `int`: 0 after one run, or if this agent has left in order, else the code of the error
            (`run/endings/exit_codes.py`).
    """
    if flags.parent is not None:
        _begin_below(flags.parent)
    try:
        leaving = Leaving(flags.logs, flags.grace)
        leaving.obey_signals()
        with closing(Agent(flags, leaving)) as agent:
            leaving.record()
            agent.serve_one()
            while not (flags.once or leaving.asked):
                agent.serve_one()
            return 0
    except (MultiNodeError, OSError) as error:
        report("\n".join([str(error), *getattr(error, "__notes__", ())]), error=True)
        return code_of(error)


def _begin_below(actor: int) -> None:
    """Undo what this process has inherited from an actor of Ray, and end with the actor.

    Ray blocks SIGINT in its processes, and `nohup ray start` lets them ignore SIGHUP. This process is killed with the
    actor, and its engines end with it, because Ray may then give the GPUs to another actor.
    """
    for number in (signal.SIGINT, *preempt_signals()):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    end_with_parent(actor, signal.SIGKILL)
