"""A Ray cluster on this machine, in a process of its own that runs one command per line of its input.

Usage: `python ray_host.py`. Each line has a command and its argument in JSON; the answer is a line of JSON.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

STORE_BYTES = 80 * 2**20
CLOSE_S = 60.0
# Ray ends what has no head after this time, 60 s by default
LOST_VARIABLE, LOST_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 30


class RayHost:
    """The cluster, as a test sees it. It has a head without room for engines.

    Args:
        folder (`Path`):
            Folder of Ray's files, with a short path, because sockets are in it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        environment = {
            **os.environ,
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            LOST_VARIABLE: str(LOST_S),
        }
        self._log = open(folder / "host.log", "w+")
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            # Ray leaves out the folder of a script that its workers import from
            cwd=Path(__file__).parents[1],
        )
        self.address = self._answer()

    def ask(self, command: str, argument: Any = None) -> Any:
        """Run a command of [`Commands`], and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, argument]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._log.seek(0)
        assert line, self._log.read()
        return json.loads(line)

    def close(self) -> None:
        """End the cluster."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._log.close()


class Commands:
    """The commands, in the process of the cluster."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._add(num_cpus=0)
        self._nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return self._cluster.address

    def _add(self, **arguments: Any) -> Any:
        return self._cluster.add_node(
            include_dashboard=False, object_store_memory=STORE_BYTES, **arguments
        )

    def add(self, environment: dict[str, str]) -> str:
        """Add a node with room for one engine, whose processes have further variables; return its id."""
        node = self._add(num_cpus=1, env_vars=environment)
        self._nodes[node.node_id] = node
        return node.node_id

    def remove(self, node: str) -> None:
        """Remove a node as `ray stop` does."""
        self._cluster.remove_node(self._nodes.pop(node))

    def lose(self, node: str) -> None:
        """Kill the processes of a node, which Ray notices half a minute later."""
        self._cluster.remove_node(self._nodes.pop(node), allow_graceful=False)

    def drain(self, node: str) -> bool:
        """Announce the end of a node, as `ray drain-node` and a notice of a pre-emption do."""
        import ray
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int(1000 * (time.time() + 600))
        client = ray._raylet.GcsClient(address=self.address)
        return client.drain_node(node, reason, "a test", deadline_ms)[0]

    def kill(self, name: str) -> None:
        """Kill an actor by `ray.kill`."""
        import ray
        from ray.util import list_named_actors

        ray.init(self.address, log_to_driver=False, logging_level="ERROR")
        (found,) = (each for each in list_named_actors(True) if each["name"] == name)
        ray.kill(ray.get_actor(**found))
        ray.shutdown()

    def lose_head(self, _: None) -> None:
        """Kill the server of the head, as the other nodes see the end of its machine."""
        self._cluster.head_node.kill_gcs_server(check_alive=False)

    def close(self) -> None:
        with suppress(Exception):
            self._cluster.shutdown()


def main() -> None:
    # Ray prints to stdout
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    commands = Commands()
    print(json.dumps(commands.address), file=answers, flush=True)
    for line in sys.stdin:
        command, argument = json.loads(line)
        print(json.dumps(getattr(commands, command)(argument)), file=answers, flush=True)
    commands.close()


if __name__ == "__main__":
    main()
