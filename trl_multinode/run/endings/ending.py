"""The ending file of a node: how the run ended, for programs that start runs, because launchers make every code 1."""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..topology import Topology
from .fatal import Fatal

RESUMING = "`trainer.train(resume_from_checkpoint=trainer.last_checkpoint())`"  # the cure in several messages
ALSO_TO = "TRL_MULTINODE_ENDING_FILE"  # variable with the path of a second copy


class Ending:
    """Contents of `_multinode/ending-node<k>.json`. The local main process writes it, at every ending.

    The file is best effort: a full disk, a lost file system or an error in a function never disturbs the end.

    Args:
        topology (`Topology`):
            Topology of this rank.
    """

    def __init__(self, topology: Topology):
        self._topology = topology
        self._path: Path | None = None
        self.phase: Callable[[], str] = lambda: "before the trainer"
        self.step: Callable[[], int] = lambda: 0
        self.checkpoint: Callable[[], Path | None] = lambda: None  # the last whole one
        self.preempted: Fatal | None = None  # of a run that has saved a checkpoint for a signal
        # whether the script continues from it when it is launched again; `None`: it has not begun to train
        self.resumes: bool | None = None

    def begin(self, folder: Path) -> None:
        """Write into `folder` from now on, and delete the file of an earlier run there.

        Raises:
            `OSError`: if the folder cannot be written.
        """
        self._path = folder / f"ending-node{self._topology.node}.json"
        if self._topology.is_local_main:
            self._path.unlink(missing_ok=True)

    def write_good(self) -> None:
        """Write the file of a run whose ranks have all ended as they should."""
        if self.preempted is not None:
            self.write(self.preempted)
            return
        end = {"code": 0, "cause": "", "phase": "end", "continues": False}
        self._write({**self._place(), **end})

    def write(self, fatal: Fatal) -> None:
        """Write the file of a run that failed."""
        place = self._place()
        continues = (
            None if self.resumes is None else self.resumes and place["checkpoint"] is not None
        )
        end = {"code": fatal.code, "cause": fatal.line, "continues": continues}
        self._write({**place, **end})

    def _place(self) -> dict[str, Any]:
        checkpoint = or_default(self.checkpoint, None)
        return {
            "phase": or_default(self.phase, "unknown"),
            "step": or_default(self.step, 0),
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "node": self._topology.node,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def _write(self, content: dict[str, Any]) -> None:
        if not self._topology.is_local_main:
            return
        paths = [] if self._path is None else [self._path]
        if also := os.environ.get(ALSO_TO):
            paths.append(Path(also))
        for path in paths:
            with suppress(Exception):
                write_whole(path, content)


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(content) + "\n")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def or_default(call: Callable[[], Any], default: Any) -> Any:
    """Return the result of a call, or `default` if it raises."""
    try:
        return call()
    except Exception:
        return default
