"""Files of rank 0 with a run's settings and its logs, for `trl-multinode timeline`: a tracker may be elsewhere."""

import re
import time
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from ..node_settings import NodeSettings
from ..run.reporter import warn
from ..run.values import is_secret, plain
from ..run.versions import local_versions
from ..wire.line_file import LineFile
from ..wire.secret_names import HIDDEN

LONGEST = 200  # characters of a value; a chat template has thousands
# Settings that the configs set from others
DERIVED = ("disable_tqdm", "dataloader_pin_memory", "generation_batch_size")
NODE_METRIC = re.compile(r"node\d+/")


class RunRecord:
    """`_multinode/settings.jsonl` with a line per start of a trainer, and `_multinode/log.jsonl` with a line per log.

    Args:
        host ([`~trl_multinode.host.NodeHost`]):
            Host of rank 0.
        args ([`~trl.GRPOConfig`]):
            Config of the trainer.
        model (`torch.nn.Module`):
            Trained model.
    """

    def __init__(self, host: Any, args: Any, model: Any):
        folder = Path(args.output_dir).absolute() / "_multinode"
        self._log = LineFile(folder / "log.jsonl", self._warn)
        self._attempt = host.rank.phase_file.attempt
        settings = LineFile(folder / "settings.jsonl", self._warn)
        settings.add(
            {
                "attempt": self._attempt,
                "time": time.time(),
                "model": getattr(getattr(model, "config", None), "_name_or_path", "")
                or type(model).__name__,
                "nodes": host.topology.num_nodes,
                "ranks_per_node": host.topology.ranks_per_node,
                "engines_per_node": host.topology.engines_per_node,
                "engine_gpus": [list(gpus) for gpus in host.devices.per_engine if gpus],
                "versions": local_versions(),
                **chosen(args),
            }
        )
        settings.close()

    def add_log(self, logs: Mapping[str, Any]) -> None:
        """Write the line of a log. Metrics of single nodes are left out: the files of the phases have their seconds,
        and at 64 nodes they are five sixths of all metrics."""
        kept = {name: value for name, value in logs.items() if not NODE_METRIC.match(name)}
        self._log.add({"attempt": self._attempt, "time": round(time.time(), 3)} | kept)

    def _warn(self, error: Exception) -> None:
        warn(f"the record of this run in `_multinode` lacks lines ({error}). The run goes on.")


def chosen(args: Any) -> dict[str, Any]:
    """Return the settings of a config that differ from its defaults, and node mode's others; secrets are hidden."""
    of_node_mode = {field.name for field in fields(NodeSettings)}
    found: dict[str, dict[str, Any]] = {"settings": {}, "defaults": {}}
    for field in sorted(fields(args), key=lambda field: field.name):
        is_own = _is_own(args, field)
        if is_own or field.name in of_node_mode:
            value = shown(field.name, getattr(args, field.name))
            found["settings" if is_own else "defaults"][field.name] = value
    return found


def _is_own(args: Any, field: Field) -> bool:
    """Return whether a value is the user's: no default, and nothing that the configs made of one."""
    value, default = getattr(args, field.name), field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    if value in (None, [], {}, default) or is_dataclass(value) or field.name in DERIVED:
        return False
    return field.name != "steps_per_generation" or value != args.gradient_accumulation_steps


def shown(name: str, value: Any) -> Any:
    """Return a value as JSON may have it, without secrets."""
    value = plain(value)
    if isinstance(value, dict):
        return {key: shown(key, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shown(name, inner) for inner in value]
    if not isinstance(value, str):
        return value
    if is_secret(name, value):
        return HIDDEN
    return value if len(value) <= LONGEST else f"{value[:LONGEST]}..."
