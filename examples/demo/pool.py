"""Agents of `make demo MODE=pool`: one from the start and one that joins during the run; then the first one leaves."""

import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from modes import JOINED, LEAVES_AFTER
from report import events_in

from multinode_kit.agents import running_agent
from multinode_kit.launch_files import core_of_engines
from multinode_kit.nodes import Nodes

STARTS_AFTER = 1  # step; the second agent joins when its engine is ready
SHARED_STEPS = 3  # with the engines of both, at least
NAMES = ("first", "second")
LEAVE_LIMIT_S = 60.0  # the grace for open rows, 20 s, and the end of the engine


class PoolError(RuntimeError):
    """Agent that ended early or did not leave, or a run that ended before it could."""


class Pool:
    """Agents of a demo run. The exit ends them.

    Args:
        nodes (`Nodes`):
            Nodes that have been launched.
        folder (`Path`):
            Folder of the agents' logs.
        steps (`int`):
            Optimizer steps of the run.
        environment (`Mapping[str, str]`):
            Variables of the agents, with the secret of the run.
    """

    def __init__(self, nodes: Nodes, folder: Path, steps: int, environment: Mapping[str, str]):
        self._nodes = nodes
        self._folder = folder.resolve()
        self._steps = steps
        self._environment = environment
        self._agents: list[subprocess.Popen] = []
        self._running = ExitStack()
        self._leaves = False

    def __enter__(self) -> "Pool":
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._running.close()

    def _start(self) -> None:
        number = len(self._agents)
        # with the TMPDIR of node 0, so that `Nodes` removes what an agent may leave behind
        own = {"TMPDIR": str(self._nodes.tmpdir(0)), **core_of_engines(number)}
        agent = running_agent(self._nodes, self._log(number).parent, {**self._environment, **own})
        self._agents.append(self._running.enter_context(agent))

    def _log(self, number: int) -> Path:
        return self._folder / f"agent{number}" / "agent.log"

    def follow(self) -> None:
        """Start the second agent, and let the first one leave, when it is time. `Nodes.wait` calls it again and again.

        Raises:
            `PoolError`: an agent has ended early.
        """
        self._check()
        events, step = events_in(self._nodes.rank_log(0))
        joined = {event.agent: event.step for event in events if "serves" in event.text}
        if len(self._agents) == 1:
            if step >= STARTS_AFTER:
                print("[demo] a second agent starts, and will join", flush=True)
                self._start()
            return
        if len(joined) < 2 or self._leaves:
            return
        (self._folder / JOINED).touch()
        if step >= max(LEAVES_AFTER * self._steps, max(joined.values()) + SHARED_STEPS):
            print("[demo] the first agent gets SIGTERM, and leaves", flush=True)
            self._leaves = True
            self._agents[0].terminate()

    def _check(self) -> None:
        for number, agent in enumerate(self._agents):
            code = agent.poll()
            has_left = self._leaves and number == 0 and code == 0
            if code is not None and not has_left:
                raise PoolError(f"The {NAMES[number]} agent ended early, with code {code}.")

    def finish(self) -> None:
        """Check, once the run has ended, that the first agent has left in order and the second one is still there.

        Raises:
            `PoolError`: if not.
        """
        if not self._leaves:
            raise PoolError("The run ended before the first agent could leave: take more --steps.")
        try:
            self._agents[0].wait(LEAVE_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise PoolError("The first agent did not leave.") from error
        self._check()
