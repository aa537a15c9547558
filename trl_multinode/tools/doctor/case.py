"""Launch on this node, as the examinations need it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...wire.messages import NUM_SLOTS
from ..check.launch import Launch


@dataclass(frozen=True)
class Case:
    """A launch on this node, as the examinations need it.

    Args:
        launch ([`Launch`]):
            Launch of this node.
        environ (`Mapping[str, str]`, *optional*):
            Environment variables; those of this process by default.
    """

    launch: Launch
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @property
    def on_gpus(self) -> bool:
        return self.launch.visible is not None and not self.launch.script.use_cpu

    @property
    def many_nodes(self) -> bool:
        return self.launch.num_nodes > 1

    @property
    def rank(self) -> int:
        return self.launch.args.machine_rank

    @property
    def address(self) -> str:
        return (self.launch.args.main_process_ip or "").strip("[] ")

    def value(self, name: str, default: Any = None) -> Any:
        """Return an argument of the script, or `default` if it is not set or if there is no script."""
        found = self.launch.script.values.get(name)
        return default if found is None else found

    @property
    def engines(self) -> int:
        """Return the number of engines of this node."""
        engines = self.launch.script.engines
        if not self.launch.script.node_mode:
            return 0
        reserved = len(engines.vllm_devices or self.launch.reserved)
        return engines.num_engines or max(1, reserved // engines.size)

    @property
    def slots_bytes(self) -> int:
        """Return the bytes of the two slots that every weight sync needs."""
        return NUM_SLOTS * int(float(self.value("sync_bucket_mb", 512)) * 2**20)

    @property
    def wants_all_slots(self) -> bool:
        """Return whether the arguments ask for a slot for each bucket, as `weights/building.py: stages` decides."""
        ahead = self.launch.script.node_mode and self.value("max_staleness", 0) > 0
        sends_adapter = self.value("use_peft") and self.value("lora_sync") != "merged"
        return (
            ahead and not sends_adapter and self.value("weight_transport") in (None, "auto", "host")
        )
