"""`trl-multinode engines --ray`: keeps agents on a Ray cluster. Its process is a driver of Ray, and no rank.

An engine that ends is replaced here, and not by Ray (`max_restarts`): Ray would keep its place, and only the exit code
of the agent shows whether another one would end alike.
"""

import argparse
import os
import signal
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

from ..engine.agents import Measure
from ..errors import ConfigurationError, MultiNodeError
from ..run.endings.exit_codes import CONFIGURATION, code_of
from ..run.reporter import report
from .autoscale import Autoscaler
from .finding import notice_at

if TYPE_CHECKING:
    from .ray_cluster import End, PlacedEngine, RayCluster

POLL_S = 1.0
AGAIN_S = 5.0  # between an engine that has ended and the next one
MEASURE_S = 5.0  # between two looks at the measure of the run
ENGINES_S = 15.0  # for the end of an agent's engines, after its grace


class RayEngines:
    """Owner of the engines on a cluster.

    Args:
        cluster (`RayCluster`):
            Connection to Ray.
        flags (`argparse.Namespace`):
            Flags of `trl-multinode engines`.
    """

    def __init__(self, cluster: "RayCluster", flags: argparse.Namespace):
        self._cluster = cluster
        self._flags = flags
        self._engines: list[PlacedEngine] = []
        self._count = 0  # of engines so far, which numbers them
        self._again = 0.0  # time before which none starts
        # engines that would end with the same error again, with its text
        self._refused: list[str] = []
        self._served = False  # whether an agent has served a run and ended
        self._scaler = Autoscaler(*flags.autoscale) if flags.autoscale else None
        self._measure: Measure | None = None
        self._next_measure = 0.0  # time of the next look for it

    def keep(self) -> bool:
        """Look at the engines, and start and end some for their number. Return whether a run was served with `--once`.

        Raises:
            `PeerFailureError`: if the head of the cluster is lost.
            `ConfigurationError`: if all agents ended with such an error.
        """
        if not self._cluster.answers():
            return False
        self._look_at_all()
        drained = self._cluster.drained()
        for engine in self._staying():
            if engine.node in drained:
                self._leave(engine, "Ray drains its node")
        if self._flags.once and self._served:
            return not any(engine.node for engine in self._engines)
        self._scale()
        return False

    def _look_at_all(self) -> None:
        for engine in list(self._engines):
            had_place = bool(engine.node)
            end = engine.look()
            if engine.node and not had_place:
                report(f"{engine} has its place")
            if end is not None:
                self._engines.remove(engine)
                self._cluster.remove(engine)
                self._note(engine, end)

    def _staying(self) -> "list[PlacedEngine]":
        return [engine for engine in self._engines if not engine.leaves]

    def _note(self, engine: "PlacedEngine", end: "End") -> None:
        """Report the end of an engine, and decide whether there may be another one."""
        if engine.leaves or end.code == 0:
            self._served |= not engine.leaves
            report(f"{engine} has left")
            return
        how = end.cause if end.code is None else f"code {end.code}: {end.cause}"
        report(f"{engine} has ended, {how}", error=True)
        if end.code == CONFIGURATION:
            self._refused.append(f"{engine}: {end.cause}")
        self._again = time.monotonic() + AGAIN_S

    def _scale(self) -> None:
        staying = self._staying()
        wanted, why = self._wanted(sum(bool(engine.node) for engine in staying))
        wanted -= len(self._refused)
        if wanted <= 0 and not self._engines:
            raise ConfigurationError(
                "No engine is left that could start.",
                setting="--ray",
                got=self._refused,
                cure="Correct the nodes of the cluster, and start this command again.",
            )
        for engine in staying[wanted:]:
            self._leave(engine, why)
        if time.monotonic() >= self._again:
            for _ in range(len(staying), wanted):
                self._start(why)

    def _wanted(self, placed: int) -> tuple[int, str]:
        """Return how many engines there should be, and why it changes."""
        if self._scaler is None:
            return self._flags.engines or 1, ""
        now = time.monotonic()
        if now >= self._next_measure:
            notice = notice_at(self._flags.join)
            self._measure = None if notice is None else notice.measure
            self._next_measure = now + MEASURE_S
        return self._scaler.wanted(self._measure, placed, now)

    def _start(self, why: str) -> None:
        flags = self._flags
        self._count += 1
        host, port = flags.join
        words = ["--join", f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
        words += ["--grace", str(flags.grace)]
        if flags.tp is not None:
            words += ["--tp", str(flags.tp)]
        if flags.once:
            words.append("--once")
        if why:
            words += ["--why", why]
        logs = flags.logs.absolute() / f"engine-{self._count}"
        engine = self._cluster.place(self._count, words, str(logs))
        report(f"{engine} waits for a place{f': {why}' if why else ''}")
        self._engines.append(engine)

    def _leave(self, engine: "PlacedEngine", why: str) -> None:
        """Have an engine leave, at once if it has no place yet."""
        report(f"{engine} leaves: {why}")
        if engine.node:
            engine.leave(why)
        else:
            self._engines.remove(engine)
            self._cluster.remove(engine)

    def close(self) -> None:
        """Have all agents leave, and wait for the end of their grace."""
        for engine in self._staying():
            self._leave(engine, "this command ends")
        deadline = time.monotonic() + self._flags.grace + ENGINES_S
        while self._engines and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self._look_at_all()


def run(flags: argparse.Namespace) -> int:
    """Keep engines on a Ray cluster, until a signal or the end of the parent process ends this one.

    Args:
        flags (`argparse.Namespace`):
            Flags of `trl-multinode engines`.

    Returns:
        `int`: 0, or the code of the error (`run/endings/exit_codes.py`).
    """
    stopped = threading.Event()
    parent = os.getppid()
    try:
        with closing(_join(flags)) as cluster:
            # after Ray, which has handlers of its own
            signals = [
                number
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
                if signal.getsignal(number) != signal.SIG_IGN
            ]
            for number in signals:
                signal.signal(number, lambda *_: stopped.set())
            with closing(RayEngines(cluster, flags)) as engines:
                while not stopped.wait(POLL_S) and not engines.keep():
                    # `nohup` lets a process outlive its shell
                    if os.getppid() != parent and signal.SIGHUP in signals:
                        break
        return 0
    except MultiNodeError as error:
        report(error, error=True)
        return code_of(error)


def _join(flags: argparse.Namespace) -> "RayCluster":
    try:
        from .ray_cluster import RayCluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigurationError(
            "Ray is not installed.",
            setting="ray",
            expected="ray",
            cure="Run `pip install 'trl-multinode[ray]'` here and on the nodes of the cluster.",
        ) from None
    return RayCluster(flags.tp or 1)
