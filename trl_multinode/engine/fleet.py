"""The engines of one node: their processes, which the local main process owns, and every rank's clients for them."""

import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EngineError, EngineStartError
from ..node_settings import NodeSettings
from ..run.endings.exit_codes import ENGINE
from ..run.phase_file import PhaseFile
from ..run.topology import Topology
from ..run.watch.watchdog import Watchdog
from ..wire.leftovers import remove_leftovers
from ..wire.messages import EngineSpec
from .cores import engine_cores
from .node_engines import NodeEngines
from .process import EngineProcess, wait_until_ready
from .restarts import EngineRestarts
from .run_folder import RunFolder, check_private
from .settings import EngineSettings, differences, save_without_weights

if TYPE_CHECKING:
    from ..run.store import Store

STOP_TIMEOUT_S = 15.0  # longer than vLLM gives its processes
OTHER_RANKS_WAIT_LONGER_S = (
    30.0  # so that the local main process, whose error explains more, fails first
)


class EngineFleet:
    """Engines of one node, as one of its ranks uses them.

    ```python
    fleet = EngineFleet(topology, watch, store, settings, logs, report)
    if topology.is_local_main:
        fleet.launch(engine_settings, num_engines, outline, processing_class)  # optional, before a model is loaded
        fleet.start(engine_settings, num_engines, model, processing_class)
    engines = fleet.connect(num_engines, window)    # every rank of the node, as often as it needs clients
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
        phases (`PhaseFile`, *optional*):
            File of this rank's phases. The engines record their states beside it.
    """

    def __init__(
        self,
        topology: Topology,
        watch: Watchdog,
        store: "Store | None",
        settings: NodeSettings,
        logs: Path,
        report: Callable[[str], None],
        phases: PhaseFile | None = None,
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
        # settings of the processes, and the folder of the model that they start with
        self._launched: tuple[EngineSettings, Path] | None = None
        self._has_early_engines = False
        self.restarts: EngineRestarts | None = None  # on the local main process

    def launch(
        self, engine_settings: EngineSettings, num_engines: int, model: Any, processing_class: Any
    ) -> None:
        """Start the node's engine processes without waiting for them. Local main process only.

        `start` takes them over. Until then the watch thread ends the run if an engine fails.
        """
        self._launch(engine_settings, num_engines, model, processing_class)
        self._has_early_engines = True

    def start(
        self, engine_settings: EngineSettings, num_engines: int, model: Any, processing_class: Any
    ) -> None:
        """Start the node's engines and wait until they are ready. Local main process only.

        Engines of `launch` go on if they were started with the same; otherwise they are started again.

        Raises:
            `EngineStartError`: if an engine ends, or is not ready within `engine_start_timeout`.
        """
        # from here on this thread raises the error of a failed start, which explains more than the watch thread's
        self._has_early_engines = False
        start = self._launch(engine_settings, num_engines, model, processing_class)
        settings = self._settings
        wait_until_ready(self._processes, settings.engine_start_timeout, self._report)
        self.restarts = EngineRestarts(
            self._processes,
            start,
            settings.engine_restarts,
            settings.engine_start_timeout,
            self._watch,
            self._report,
        )
        self.restarts.watch_engines()

    def _launch(
        self, settings: EngineSettings, num_engines: int, model: Any, processing_class: Any
    ) -> Callable[[int], EngineProcess]:
        """Start the processes unless the same run already, and return the function that starts one of them again."""
        if self._run_folder is None:
            remove_leftovers(self._report)
            self._run_folder = RunFolder(self._topology.node)
        model_folder = self.folder / ("model" if self._launched is None else "loaded_model")
        save_without_weights(model, processing_class, model_folder)
        if self._launched is not None:
            found = differences(self._launched, (settings, model_folder))
            if not found:
                shutil.rmtree(model_folder)
                return partial(self._start_engine, *self._launched)
            self._report(
                f"the loaded model differs from its outline in {', '.join(found)}, so its engines start again"
            )
        self._launched = settings, model_folder
        start = partial(self._start_engine, settings, model_folder)
        self._report(f"starting {num_engines} engine(s); logs in {self._logs}")
        if not self._processes:
            self._watch.add_cleanup(self._kill)
            self._watch.add_chore(self._follow_early_engines)
        for process in self._processes:
            process.kill()
        for index in range(num_engines):
            self._processes[index : index + 1] = [start(index)]
        return start

    def _follow_early_engines(self, _: "Store") -> None:
        """Note the stages of engines that start beside the model's load, and end the run if one fails.

        The watch thread calls it. A single process may be a notebook, where `start` raises once the model is loaded.
        """
        if not self._has_early_engines:
            return
        try:
            for process in self._processes:
                process.is_ready()
        except EngineStartError as error:
            self._has_early_engines = False
            self._report("\n".join([str(error), *error.__notes__]))
            if self._topology.launched:
                self._watch.report(f"{type(error).__name__}: {error}", code=ENGINE)

    def _start_engine(
        self, settings: EngineSettings, model_folder: Path, index: int
    ) -> EngineProcess:
        node = self._topology.node
        phases = self._phases
        states = (
            None
            if phases is None
            else phases.path.absolute().with_name(f"node{node}_engine{index}.jsonl")
        )
        spec = EngineSpec(
            index=index,
            folder=str(self.folder),
            owner_pid=os.getpid(),
            engine_args=settings.arguments(model_folder, index),
            start=self._processes[index].start + 1 if index < len(self._processes) else 0,
            state_path=str(states or ""),
            node=node,
            attempt=1 if phases is None else phases.attempt,
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

    def connect(self, num_engines: int, window: int) -> NodeEngines:
        """Connect this rank to the node's engines; wait until the local main process has started them.

        Raises:
            `EngineError`: if the local main process does not start them in time.
        """
        folder = self._folder_of_node()
        return NodeEngines(
            [folder / f"engine{index}.sock" for index in range(num_engines)],
            self._topology.node,
            self._topology.rank,
            folder / "load",
            self._settings.engine_stall_timeout,
            window=window,
            log_folder=self._logs,
            tolerant=self._settings.engine_restarts > 0,
        )

    def _folder_of_node(self) -> Path:
        if self._store is None:
            return self.folder
        key = f"folder/{self._topology.node}"
        if self._run_folder is not None:
            self._store.set(key, str(self._run_folder.path))
        seconds = self._settings.engine_start_timeout + OTHER_RANKS_WAIT_LONGER_S
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except Exception as error:
            raise EngineError(
                f"Rank {self._topology.rank} (node {self._topology.node}) got no engines from its local main process "
                f"within {seconds:.0f} s: {error}. See {self._logs}, or raise `engine_start_timeout`."
            ) from error
        folder = Path(self._store.get(key).decode())
        check_private(folder)
        return folder

    def close(self, engines: NodeEngines | None) -> None:
        """End the node's engines, cleanly if this rank is connected to them. A second call does nothing."""
        if self._run_folder is None:
            return
        self._has_early_engines = False
        if self.restarts is not None:
            self.restarts.close()
        if engines is not None:
            engines.shutdown(STOP_TIMEOUT_S)
        for process in self._processes:
            process.stop(STOP_TIMEOUT_S if engines is not None else 0.0)
        self._kill()
        self._processes.clear()
        self._launched = None

    def _kill(self) -> None:
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # the remaining engines must still be killed
                process.kill()
        folder, self._run_folder = self._run_folder, None
        if folder is not None:
            folder.remove()
