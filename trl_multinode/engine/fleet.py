"""The engines of one node: their processes, which the local main process owns, and every rank's clients for them."""

import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec
from torch.distributed import Store

from ..errors import EngineError, EngineStartError
from ..node_settings import NodeSettings
from ..run.endings.exit_codes import ENGINE
from ..run.phase_file import PhaseFile
from ..run.topology import Topology
from ..run.watch.watchdog import Watchdog
from ..wire.handshake import PortAddress
from ..wire.leftovers import remove_leftovers
from ..wire.messages import EngineSpec
from .client import EnginePlace
from .cores import engine_cores
from .node_engines import NodeEngines, local_places
from .node_port import pool_of
from .process import EngineProcess, wait_until_ready
from .remote_rows import connect_rows
from .restarts import EngineRestarts
from .run_folder import RunFolder, check_private
from .settings import EngineSettings, start_inputs

SHOWN = 5  # of the names of what differs, in one line
STOP_TIMEOUT_S = 15.0  # longer than vLLM gives its processes
# so that the local main process, whose error explains more, fails first
OTHER_RANKS_WAIT_LONGER_S = 30.0


class EngineFleet:
    """Engines of one node, as one of its ranks uses them.

    ```python
    fleet = EngineFleet(topology, watch, store, settings, logs, report, phases)
    if topology.is_local_main:
        fleet.launch(engine_settings, write_outline)  # optional, before a model is loaded
        fleet.start(engine_settings, write_model)     # a function that makes the folder of the model without weights
    engines = fleet.connect(window)                 # every rank of the node, as often as it needs clients
    fleet.close(engines)                            # ends the engines; on other ranks only closes the clients
    ```

    Args:
        topology (`Topology`):
            Topology of this rank.
        watch (`Watchdog`):
            Watchdog of this rank: it starts an engine again whose process ends, ends the run when that was tried often
            enough, and kills the engines with the run.
        store (`torch.distributed.Store`, *optional*):
            Store of the run, through which the other ranks of the node find the engines; `None` for a single process.
        settings (`NodeSettings`):
            Settings of node mode.
        logs (`Path`):
            Folder of this node's engine logs.
        report (`Callable[[str], None]`):
            Function that prints a line of progress; only local main processes call it.
        phases (`PhaseFile`):
            File of this rank's phases. The engines record their states beside it.
    """

    def __init__(
        self,
        topology: Topology,
        watch: Watchdog,
        store: Store,
        settings: NodeSettings,
        logs: Path,
        report: Callable[[str], None],
        phases: PhaseFile,
    ):
        self._topology = topology
        self._watch = watch
        self._store = store
        self._settings = settings
        self._logs = logs
        self._report = report
        self._phases = phases
        self._processes: list[EngineProcess] = []
        self._run_folder: RunFolder | None = None
        # settings of the processes, and the folder of the model with which they start
        self._launched: tuple[EngineSettings, Path]
        self._is_awaited = False  # by the main thread, which raises the error of a failed start
        self.restarts: EngineRestarts | None = None  # on the local main process

    def launch(self, settings: EngineSettings, write_model: Callable[[Path], None]) -> None:
        """Start the node's engine processes without waiting for them. Local main process only.

        Until `start` waits for them, the watch thread ends the run if one fails. Engines that run already go on if
        they were started with the same; otherwise they are started again.

        Args:
            settings (`EngineSettings`):
                Settings of the engines.
            write_model (`Callable[[Path], None]`):
                Function that makes the folder with which they start, as `save_without_weights` does.
        """
        self._open_folder()
        model_folder = self.folder / ("loaded_model" if self._processes else "model")
        write_model(model_folder)
        if not self._processes:
            self._watch.cleanups.append(self._kill)
            self._watch.chores.append(self._follow)
        elif found := self.differences(settings, model_folder):
            self._report(
                f"the loaded model differs from its outline in {', '.join(found[:SHOWN])}, so its engines start again"
            )
        else:
            return
        self._launched = settings, model_folder
        num_engines = len(settings.devices.per_engine)
        self._report(f"starting {num_engines} engine(s); logs in {self._logs}")
        for process in self._processes:
            process.kill()
        for index in range(num_engines):
            self._processes[index : index + 1] = [self._start_engine(index)]

    def _open_folder(self) -> None:
        if self._run_folder is None:
            remove_leftovers(self._report)
            self._run_folder = RunFolder(self._topology.node)

    def differences(self, settings: EngineSettings, model_folder: Path) -> list[str]:
        """Return the names of what engines would start with now, and what differs from what they were started with."""
        early, now = start_inputs(*self._launched), start_inputs(settings, model_folder)
        return sorted(key for key in early | now if early.get(key) != now.get(key))

    def _follow(self, _: Store) -> None:
        """Note the stages of engines that start beside the model's load, and end the run if one fails.

        The watch thread calls it. A single process may be a notebook, where `start` raises once the model is loaded.
        """
        try:
            for process in self._processes:
                process.is_ready()
        except EngineStartError as error:
            if self._is_awaited:  # by a thread that ends it, or that raises this error
                return
            self._is_awaited = True
            self._report("\n".join([str(error), *error.__notes__]))
            if self._topology.launched:
                self._watch.report(f"{type(error).__name__}: {error}", code=ENGINE)

    def start(self, engine_settings: EngineSettings, write_model: Callable[[Path], None]) -> None:
        """Start the node's engines, unless `launch` did, and wait until they are ready. Local main process only.

        A node without engines gets only the folder that its ranks share.

        Raises:
            `EngineStartError`: if an engine ends, or is not ready within `engine_start_timeout`.
        """
        # from here on this thread raises the error of a failed start, which explains more than the watch thread's
        self._is_awaited = True
        if not engine_settings.devices.per_engine:
            self._open_folder()
            return
        self.launch(engine_settings, write_model)
        settings = self._settings
        wait_until_ready(self._processes, settings.engine_start_timeout, self._report)
        self.restarts = EngineRestarts(
            self._processes,
            self._start_engine,
            settings.engine_restarts,
            settings.engine_start_timeout,
            self._watch,
            self._report,
        )

    def _start_engine(self, index: int) -> EngineProcess:
        settings, model_folder = self._launched
        node = self._topology.node
        states = self._phases.path.absolute().with_name(f"node{node}_engine{index}.jsonl")
        spec = EngineSpec(
            index=index,
            folder=str(self.folder),
            owner_pid=os.getpid(),
            engine_args=settings.arguments(model_folder, index),
            start=self._processes[index].start + 1 if index < len(self._processes) else 0,
            state_path=str(states),
            node=node,
            attempt=self._phases.attempt,
        )
        return EngineProcess(
            spec,
            self._logs / f"engine{index}.log",
            settings.environment(index),
            module=os.environ.get(
                "TRL_MULTINODE_ENGINE_MODULE", "trl_multinode.engine_process.main"
            ),
            cores=engine_cores(self._topology.launched),
        )

    @property
    def folder(self) -> Path:
        """Private folder of the run on this node. Local main process only, after `start`."""
        assert self._run_folder is not None
        return self._run_folder.path

    @property
    def sockets(self) -> list[Path]:
        """Unix sockets of the node's engines. Local main process only, after `start`."""
        return [process.socket_path for process in self._processes]

    def connect(self, window: int) -> NodeEngines:
        """Connect this rank to the node's engines; wait until the local main process has started them.

        A rank of a node without engines connects to those of all other nodes.

        Raises:
            `EngineError`: if a local main process does not start them in time.
        """
        topology = self._topology
        key = f"folder/{topology.node}"
        if self._run_folder is not None:
            self._store.set(key, str(self._run_folder.path))
        folder = Path(self._written(key, topology.node))
        check_private(folder)
        if num_engines := topology.nodes[topology.node].engines:
            sockets = [folder / f"engine{index}.sock" for index in range(num_engines)]
            places = local_places(sockets, topology.node, self._logs)
        else:
            places = self._remote_places()
        return NodeEngines(
            places,
            topology.node,
            topology.rank,
            folder / "load",
            self._settings.engine_stall_timeout,
            window=window,
            tolerant=self._settings.engine_restarts > 0,
        )

    def _remote_places(self) -> list[EnginePlace]:
        """Return the places of the engines of all other nodes."""
        pool = pool_of(self._store)
        found = []
        for node, shape in enumerate(self._topology.nodes):
            if not shape.engines:
                continue
            address = self.port_of(node)
            for index in range(shape.engines):
                log = self._logs.with_name(f"node{node}") / f"engine{index}.log"
                connect = partial(connect_rows, address, index, self._topology.node, pool, log)
                found.append(EnginePlace(node, index, connect))
        return found

    def port_of(self, node: int) -> PortAddress:
        """Wait for the address of a node's port."""
        return msgspec.json.decode(self._written(f"port/{node}", node), type=PortAddress)

    def _written(self, key: str, node: int) -> str:
        """Wait for a key that the local main process of a node writes when its engines are ready."""
        seconds = self._settings.engine_start_timeout + OTHER_RANKS_WAIT_LONGER_S
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except Exception as error:
            raise EngineError(
                f"Rank {self._topology.rank} (node {self._topology.node}) got no engines from the local main process "
                f"of node {node} within {seconds:.0f} s: {error}. See {self._logs}, or raise `engine_start_timeout`."
            ) from error
        return self._store.get(key).decode()

    def close(self, engines: NodeEngines | None) -> None:
        """End the node's engines, cleanly if this rank is connected to them. A second call does nothing."""
        if self._run_folder is None:
            return
        self._is_awaited = True
        if self.restarts is not None:
            self.restarts.close()
        if engines is not None and self._processes:
            engines.shutdown(STOP_TIMEOUT_S)
        for process in self._processes:
            process.stop(STOP_TIMEOUT_S if engines is not None else 0.0)
        self._kill()
        self._processes.clear()

    def _kill(self) -> None:
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # the remaining engines must still be killed
                process.kill()
        folder, self._run_folder = self._run_folder, None
        if folder is not None:
            folder.remove()
