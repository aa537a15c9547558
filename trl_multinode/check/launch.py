"""Data classes of a launch: one node's share of it, the script's batch arguments, and a problem."""

import argparse
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """Reason why a launch would fail or would not do what its file requests, and the cure."""

    what: str
    cure: str


@dataclass(frozen=True)
class Batch:
    """Batch arguments of the script, with the defaults of TRL and transformers."""

    num_generations: int = 8
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None

    @property
    def steps(self) -> int:
        return self.steps_per_generation or self.gradient_accumulation_steps

    def world(self, num_ranks: int) -> int:
        """Return the number of completions that all ranks together generate in one round."""
        return self.generation_batch_size or self.per_device_train_batch_size * num_ranks * self.steps


@dataclass(frozen=True)
class Launch:
    """One node's share of a launch, as accelerate reads file and flags."""

    args: argparse.Namespace  # flags merged with the file, prepared for torchrun
    file: dict[str, Any]  # keys and values, corrected so that accelerate accepts them
    launcher: str  # name of accelerate's launcher function
    num_nodes: int
    ranks_per_node: int  # rounded down, as accelerate does
    started: int  # processes that the launcher starts on this node
    visible: list[str] | None  # GPUs that these processes see, as numbered on the node; `None` on CPU
    port: int | None  # requested port, before accelerate chooses one
    endpoint: str | None = None  # rendezvous backend, host and port; `None` without torchrun

    @property
    def num_ranks(self) -> int:
        """Ranks on all nodes as configured; the launcher may start fewer (`started`)."""
        return self.ranks_per_node * self.num_nodes

    @property
    def own_launcher(self) -> str | None:
        """Name of DeepSpeed's launcher if it replaces torchrun, else `None`."""
        name = self.args.deepspeed_multinode_launcher
        return name if self.args.use_deepspeed and self.num_nodes > 1 and name != "standard" else None

    @property
    def rank_in_file(self) -> bool:
        return self.file.get("machine_rank") is not None and "machine_rank" not in self.args.nondefault
