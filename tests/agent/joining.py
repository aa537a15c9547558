"""A run as an agent sees it, without ranks: a store, the port of node 0, and an agent in a forked process."""

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import msgspec
import torch
from forks import Rank
from ported import running
from torch.distributed import TCPStore
from waiting import HANG_S, until

from multinode_kit.engines import SyncDriver
from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from trl_multinode.agent import agent as module
from trl_multinode.agent import finding
from trl_multinode.engine.agents import AGENTS, POOL_KEY, Agents, Measure, Notice, Serve, start_of
from trl_multinode.engine.node_engines import EnginePlace, NodeEngines
from trl_multinode.engine.node_port import pool_of_run
from trl_multinode.engine.remote_rows import connect_rows
from trl_multinode.engine.settings import EngineSettings, save_without_weights
from trl_multinode.node_settings import NodeSettings
from trl_multinode.run.topology import EngineDevices, Topology
from trl_multinode.tools import main
from trl_multinode.wire.handshake import Pool
from trl_multinode.wire.port import Port, Service

NODES = 2  # training nodes of the run
ON_CPU = EngineDevices(((),), shared_with_training=False)
CONTEXT = 64


def settings_of(context: int = CONTEXT, **settings) -> EngineSettings:
    topology = Topology(0, 1, 0, 1, 0, 1, launched=False)
    keywords = {"max_model_length": context, "max_num_seqs": 4, "callable": print}
    return EngineSettings(NodeSettings(**settings), topology, ON_CPU, torch.float32, keywords)


@dataclass
class Run:
    """A run that agents can join.

    Args:
        port (`Port`), pool (`Pool`):
            Port of node 0, and what it shares with agents.
    """

    port: Port
    pool: Pool
    serving: dict[int, Serve] = field(default_factory=dict)  # by number
    left: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    # writes the notice of the run, with its measure
    announce: Callable[[Measure | None], None] = lambda measure: None

    def changed(self, number: int, serve: Serve | None, text: str) -> None:
        self.lines.append(f"{number} {text}")
        if serve is not None:
            self.serving[number] = serve
            return
        self.serving.pop(number, None)
        if text == "has left":
            self.left.append(number)

    def agent(self) -> int:
        """Wait for an agent that serves, and return its number."""
        return until(lambda: next(iter(self.serving), 0), lambda: f"an agent: {self.lines}")

    def engines_of(self, number: int, load: Path) -> NodeEngines:
        """Return a rank's clients for the engines of an agent."""
        serve = self.serving[number]
        places = [
            EnginePlace(
                number,
                index,
                partial(connect_rows, serve.address, index, 0, self.pool, load),
                is_of_agent=True,
            )
            for index in range(serve.engines)
        ]
        return NodeEngines(places, 0, 1, load, 60.0, 64)


@contextmanager
def run_of(
    store: TCPStore,
    folder: Path,
    settings: EngineSettings | None = None,
    name: str = "run-1",
    limit_s: float = 30.0,
    services: Mapping[str, Service] | None = None,
    **identity: str,
) -> Iterator[Run]:
    """Open the port of node 0 for agents and with further services, and write the notice of the run."""
    model_folder = folder / f"model-{name}"
    save_without_weights(tiny_qwen2(), tiny_tokenizer(), model_folder)
    start = start_of(settings or settings_of(), model_folder, ranks=2)
    secret, facts = pool_of_run(name)
    pool = Pool(secret, facts | identity)
    service = Agents(
        start,
        NODES,
        lambda number, serve, text: run.changed(number, serve, text),
        limit_s,
    )
    port = Port(
        "127.0.0.1",
        0,
        pool,
        {AGENTS: service, **(services or {})},
        lambda line: run.lines.append(line),
    )
    run = Run(port, pool)
    with running(port.serve()):
        run.announce = lambda measure: store.set(
            POOL_KEY, msgspec.json.encode(Notice(name, [port.address], measure)).decode()
        )
        run.announce(None)
        yield run


def new_store(port: int = 0) -> TCPStore:
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        timeout=timedelta(seconds=HANG_S),
        wait_for_workers=False,
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Pulled:
    """Stands for the weights that an agent pulls: those of a tiny model, once for each membership."""

    def __init__(self, engines, transport, ports, pool, report):
        self._driver = SyncDriver(tiny_qwen2(seed=7), engines, transport=transport)

    def pull(self, timeout_s: float):
        if self._driver.version.update == 0:
            return self._driver.send()
        time.sleep(0.05)
        return None

    def close(self) -> None:
        self._driver.sync.close()


class AgentProcess(Rank):
    """An agent in a process of its own."""

    def __init__(self, port: int, folder: Path, *words: str):
        folder.mkdir(exist_ok=True)
        self.logs = folder / "logs"
        self._words = [
            "engines", "--join", f"127.0.0.1:{port}", "--logs", str(self.logs), *words,
        ]  # fmt: skip
        super().__init__(self._main, 0, folder)

    def _main(self, _: int) -> int:
        with (
            mock.patch.object(module, "POLL_S", 0.05),
            mock.patch.object(module, "PULL_S", 0.05),
            mock.patch.object(finding, "ATTEMPT_S", 1.0),
            mock.patch.object(finding, "CONNECT_S", 0.5),
            mock.patch.object(module, "PulledUpdates", Pulled),
        ):
            raise SystemExit(main(self._words))


@contextmanager
def agent_of(port: int, folder: Path, *words: str) -> Iterator[AgentProcess]:
    """An agent, which is killed at the end."""
    one = AgentProcess(port, folder, *words)
    try:
        yield one
    except BaseException:
        print(one.text)
        raise
    finally:
        one.process.kill()
        one.process.join()
