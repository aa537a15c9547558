"""Ray, as far as this package uses it: a placed engine, and the actor that is the parent of its agent."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray._private.state import state
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors import ConfigurationError, PeerFailureError
from ..wire.line_file import last_lines
from .leaving import ask_to_leave

OUTPUT = "agent.log"  # of an agent, in the folder of its logs
DIAL_S = 2.0
ERRORS_ONLY = 40  # level of Python's logging
# Ray ends this process and all workers after this time without its head. The third leaves time for an orderly end
LIMIT_VARIABLE, LIMIT_S, SHARE = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0, 1 / 3


class Look(NamedTuple):
    """State of an agent, as its actor sees it."""

    node: str  # id in Ray
    host: str
    code: int | None  # with which the agent has ended; `None` while it runs
    last: str  # line of its output, once it has ended


class End(NamedTuple):
    """End of an engine."""

    code: int | None  # of its agent; `None` if the actor has ended
    cause: str


class EngineActor:
    """Parent of an agent, in a process that Ray has placed and that does nothing else.

    The agent is a session of its own, because a Ctrl-C at the terminal of `ray start` is not for it. It inherits the
    GPUs that Ray gives to this process, and the environment of its node, which has the secret.

    Args:
        words (`list[str]`):
            Flags of `trl-multinode engines`.
        logs (`str`):
            Folder of the agent's logs, which is made.
    """

    def __init__(self, words: list[str], logs: str):
        self._output = Path(logs, OUTPUT)
        self._output.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "trl_multinode.tools", "engines", *words]
        command += ["--logs", logs, "--parent", str(os.getpid())]
        with open(self._output, "wb") as output:
            # Ray makes an actor in the main thread of its process: the agent, which ends with this thread, ends with
            # the process
            self._agent = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def look(self) -> Look:
        """Return the state of the agent."""
        code = self._agent.poll()
        last = ""
        if code is not None:
            last = (last_lines(self._output) or ["no output"])[-1]
        return Look(ray.get_runtime_context().get_node_id(), socket.gethostname(), code, last)

    def leave(self, why: str) -> None:
        """Have the agent leave its run in order, for a reason that the run reports."""
        try:
            ask_to_leave(self._output.parent, why)
        except ConfigurationError:  # it has not begun to serve
            self._agent.terminate()


class PlacedEngine:
    """An engine on the cluster: its placement group, and the handle of its actor.

    Args:
        number (`int`):
            Number of the engine, for messages.
        bundle (`dict[str, float]`):
            Resources of the engine.
        words (`list[str]`), logs (`str`):
            Arguments of [`EngineActor`].

    Attributes:
        node (`str`):
            Id of the engine's node in Ray; empty until there is room for the engine.
        leaves (`bool`):
            Whether the agent was asked to leave.
    """

    def __init__(self, number: int, bundle: dict[str, float], words: list[str], logs: str):
        self.node, self.leaves = "", False
        self._name = f"engine {number}"
        name = f"trl-multinode-engine-{number}"
        self._group = placement_group([bundle], strategy="STRICT_PACK", name=name)
        kind: Any = ray.remote(EngineActor)
        self._actor = kind.options(
            name=name,
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group),
        ).remote(words, logs)
        self._answer = self._actor.look.remote()

    def __str__(self) -> str:
        return self._name

    def look(self) -> End | None:
        """Note the state of the agent without waiting for it, and return how it has ended."""
        if not ray.wait([self._answer], timeout=0)[0]:
            return None
        try:
            look: Look = ray.get(self._answer)
        except ActorUnavailableError:  # for a moment; the next answer shows whether it has ended
            look = Look(self.node, "", None, "")
        except RayError as error:
            return End(None, str(error).strip().splitlines()[-1])
        if not self.node:
            self.node, self._name = look.node, f"{self._name} on {look.host}"
        self._answer = self._actor.look.remote()
        return None if look.code is None else End(look.code, look.last)

    def leave(self, why: str) -> None:
        """Have the agent leave its run in order, without waiting for it."""
        self.leaves = True
        self._actor.leave.remote(why)

    def remove(self) -> None:
        """End the actor with an agent that still runs, and give the resources back."""
        ray.kill(self._actor)
        remove_placement_group(self._group)


class RayCluster:
    """Connection of this process to a running cluster, as a driver.

    Args:
        devices (`int`):
            GPUs of an engine, or its CPUs if the cluster has no GPU.

    Raises:
        `ConfigurationError`: if there is no cluster, or one of another version.
    """

    def __init__(self, devices: int):
        try:
            ray.init("auto", log_to_driver=False, logging_level=ERRORS_ONLY)
        except (ConnectionError, RuntimeError) as error:
            raise ConfigurationError(
                f"There is no Ray cluster to join: {error}",
                setting="RAY_ADDRESS",
                got=os.environ.get("RAY_ADDRESS"),
                expected="a running cluster with the Ray and the Python of this process",
                cure="Start one with `ray start --head`, or set RAY_ADDRESS to HOST:PORT of its head.",
            ) from error
        kind = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
        self.bundle = {kind: float(devices)}
        self._head = ray.get_runtime_context().gcs_address
        self._limit_s = SHARE * float(os.environ.get(LIMIT_VARIABLE, LIMIT_S))
        self._heard = time.monotonic()
        self._lost = False

    def answers(self) -> bool:
        """Return whether the head answers; every other call to Ray would wait for it.

        Raises:
            `PeerFailureError`: if it has not for too long.
        """
        host, _, port = self._head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), DIAL_S).close()
        except OSError as error:
            if time.monotonic() < self._heard + self._limit_s:
                return False
            self._lost = True
            raise PeerFailureError(
                f"The head of the Ray cluster, {self._head}, has not answered for {self._limit_s:.0f} s ({error}). "
                "Ray ends the engines that it has placed; the run goes on with others, or waits for `min_engines`."
            ) from error
        self._heard = time.monotonic()
        return True

    def place(self, number: int, words: list[str], logs: str) -> PlacedEngine:
        """Start an engine as soon as there is room for it, without waiting."""
        return PlacedEngine(number, self.bundle, words, logs)

    def remove(self, engine: PlacedEngine) -> None:
        """End an engine whose agent may still run, and give its resources back; a lost head cannot."""
        if not self._lost:
            engine.remove()

    def drained(self) -> set[str]:
        """Return the ids of the nodes that Ray drains."""
        return set(state.get_draining_nodes())

    def close(self) -> None:
        """Leave the cluster. Ray then ends what this process has left there."""
        if not self._lost:
            ray.shutdown()
