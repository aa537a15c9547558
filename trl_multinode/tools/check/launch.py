"""Data classes of a launch: one node's share of it, DeepSpeed's config, the script's arguments, and a problem."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.run import get_rdzv_endpoint

from ...run.topology import Topology


@dataclass(frozen=True)
class Problem:
    """Reason why a launch would fail or would not do what its file requests, and the cure."""

    what: str
    cure: str

    @property
    def line(self) -> str:
        """Return problem and cure as one sentence."""
        what = self.what.rstrip(".")
        return f"{what}{'' if what.endswith('?') else ':'} {self.cure}"


def problem_of(error: ValueError) -> Problem:
    """Return an error, such as a `ConfigurationError`, as a problem."""
    cure = getattr(error, "cure", "")
    what = str(error).removesuffix(cure).rstrip(" .:")
    return Problem(what, cure or "correct this argument of the script")


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
        return (
            self.generation_batch_size or self.per_device_train_batch_size * num_ranks * self.steps
        )


@dataclass(frozen=True)
class Engines:
    """Arguments of the script that set the engines of a node, with the defaults of this library."""

    vllm_tensor_parallel_size: int = 1
    num_engines: int | None = None
    vllm_devices: list[int] | None = None

    @property
    def size(self) -> int:
        """Return the GPUs of one engine; 1 for an invalid number, which the config's own check reports."""
        return max(1, self.vllm_tensor_parallel_size)

    @property
    def chosen(self) -> bool:
        """Return whether the script chooses its engines or their GPUs, instead of taking all reserved ones."""
        return self.num_engines is not None or self.vllm_devices is not None


@dataclass(frozen=True)
class Script:
    """Arguments of the training script, as far as the rules need them."""

    name: str | None = None  # `None` if the arguments come from the check's own flags
    batch: Batch | None = None
    engines: Engines = Engines()
    model: str | None = None
    revision: str | None = None
    node_mode: bool = True
    # trainer that it imports from TRL, if it imports none of this library
    trainer_of_trl: str | None = None
    begins_anew: bool = False  # at every launch, because it never resumes
    use_cpu: bool = False
    ignored: tuple[str, ...] = ()  # arguments that have no effect in node mode
    notes: tuple[str, ...] = ()
    # all arguments by name, as the script's parser returns them
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DeepSpeed:
    """DeepSpeed's config as accelerate builds it on every rank."""

    config: dict[str, Any]
    # JSON file that it comes from, `None` if it comes from accelerate's file and flags
    path: str | None

    @property
    def zero(self) -> dict[str, Any]:
        return self.config.get("zero_optimization") or {}

    @property
    def where(self) -> str:
        """Return the place of its keys."""
        return f"in `{self.path}`" if self.path else "under `deepspeed_config:`"

    @property
    def stage(self) -> int:
        return int(self.zero.get("stage", 0))

    @property
    def precision(self) -> str | None:
        """Mixed precision that the JSON file sets, `None` if it leaves it to the script."""
        enabled = {
            name: self.config[name].get("enabled")
            for name in ("bf16", "fp16")
            if name in self.config
        }
        if (
            self.path is None
            or not enabled
            or ("auto" in enabled.values() and True not in enabled.values())
        ):
            return None
        return next((name for name, value in enabled.items() if value is True), "no")


@dataclass(frozen=True)
class Launch:
    """One node's share of a launch, as accelerate reads file and flags."""

    args: argparse.Namespace  # flags merged with the file, prepared for torchrun
    file: dict[str, Any]  # keys and values, corrected so that accelerate accepts them
    launcher: str  # name of accelerate's launcher function
    ranks_per_node: int  # of this node, rounded down, as accelerate does
    # GPUs that these processes see, as numbered on the node; `None` on CPU
    visible: list[str] | None
    gpus_per_node: int
    port: int | None  # requested port, before accelerate chooses one
    torchrun: argparse.Namespace | None = None  # torchrun's arguments, `PET_*` variables included
    deepspeed: DeepSpeed | None = None
    # of the ranks, with the variables that accelerate sets
    environment: dict[str, str] = field(default_factory=dict)
    script: Script = field(default_factory=Script)
    # ranks of each node, as `--ranks` gives them; empty if all nodes are to have the same number
    table: tuple[int, ...] = ()

    @property
    def num_nodes(self) -> int:
        return max(1, self.args.num_machines)

    @property
    def endpoint(self) -> str | None:
        """Backend, host and port of the rendezvous; `None` without torchrun."""
        run = self.torchrun
        return f"{run.rdzv_backend}, {get_rdzv_endpoint(run)}" if run else None

    @property
    def started(self) -> int:
        """Processes that the launcher starts on this node."""
        return 1 if self.launcher == "simple_launcher" else self.ranks_per_node

    @property
    def reserved(self) -> list[str]:
        """GPUs of this node that no rank uses."""
        return (self.visible or [])[self.started :]

    @property
    def num_ranks(self) -> int:
        """Ranks on all nodes as configured; the launcher may start fewer (`started`)."""
        return sum(self.table) or self.ranks_per_node * self.num_nodes

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of each node."""
        return self.table or (self.started,) * self.num_nodes

    def topology(self, node: int) -> Topology:
        """Return the topology of a node's local main process."""
        return Topology(
            rank=sum(self.ranks[:node]),
            world_size=self.num_ranks,
            local_rank=0,
            # `rank_problems` reports a node that is out of range
            local_world_size=self.ranks[node % self.num_nodes],
            node=node,
            num_nodes=self.num_nodes,
            launched=True,
        )

    def setting(self, ranks: int) -> str:
        """Return the setting with which so many ranks start on this node."""
        if self.table:
            return f"`--ranks` with {ranks} for node {self.args.machine_rank}"
        return f"`num_processes: {ranks * self.num_nodes}` ({ranks} a node)"

    @property
    def ranks_by_arrival(self) -> bool:
        """Return whether the rendezvous numbers the nodes itself, so that none of them needs a `machine_rank`."""
        return self.torchrun is not None and self.torchrun.rdzv_backend != "static"

    @property
    def own_launcher(self) -> str | None:
        """Name of DeepSpeed's launcher if it replaces torchrun, else `None`."""
        name = self.args.deepspeed_multinode_launcher
        return (
            name if self.args.use_deepspeed and self.num_nodes > 1 and name != "standard" else None
        )

    @property
    def rank_in_file(self) -> bool:
        return self.has_rank and "machine_rank" not in self.args.nondefault

    @property
    def has_rank(self) -> bool:
        """Return whether file or flags have the rank of this node."""
        return "machine_rank" in self.args.nondefault or self.file.get("machine_rank") is not None


def safely(
    rule: Callable[["Launch"], Iterable[Any]], launch: "Launch", about: str = ""
) -> tuple[list[Any], list[str]]:
    """Return what a rule yields, and a note in a list if it raises, so that the other rules run."""
    try:
        return list(rule(launch)), []
    except Exception as error:
        about = about or rule.__name__.replace("_", " ")
        return [], [f"could not check {about} ({type(error).__name__}: {error})"]
