"""Nodes and devices of a launch, and the sentences and command lines that describe it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Number of nodes, their devices, and the share of the devices that generates."""

    nodes: int
    devices: int  # GPUs of a node; with `cpu` its training ranks
    engine_gpus: int = 1
    zero: int = 3
    cpu: bool = False

    @property
    def shared(self) -> bool:
        """Return whether the engine shares the node's only GPU with training."""
        return self.devices == 1 and not self.cpu

    @property
    def ranks(self) -> int:
        """Training ranks of a node."""
        return self.devices if self.cpu or self.shared else self.devices - self.engine_gpus

    @property
    def file_name(self) -> str:
        """Name of the config file. 8 GPUs a node, split 7+1, are the case that the name does not mention."""
        if self.cpu or self.shared:
            suffix = "_cpu" if self.cpu else "_1gpu"
        else:
            suffix = "" if (self.devices, self.engine_gpus) == (8, 1) else f"_{self.ranks}+{self.engine_gpus}"
        return f"{self.nodes}node{suffix}.yaml"

    @property
    def launch_flags(self) -> str:
        """Flags of `accelerate launch` that differ between nodes or runs, and are therefore not in the file."""
        if self.nodes == 1:
            return ""
        return " --machine_rank K" + ("" if self.cpu else " --main_process_ip HOST0")

    @property
    def script_flags(self) -> str:
        """Arguments that the training script needs under this layout."""
        if self.cpu:
            return " --use_cpu true --bf16 false"
        return " --vllm_devices 0" if self.shared else ""

    def launch_line(self, path: str) -> str:
        """Return the command that starts one node."""
        return f"accelerate launch --config_file {path}{self.launch_flags} train.py{self.script_flags}"

    def check_line(self, path: str) -> str:
        """Return the command that reports what a node would start."""
        gpus = "" if self.cpu or self.devices == 8 else f" --gpus_per_node {self.devices}"
        script = self.script_flags if self.shared else ""  # to share a GPU is the script's choice
        return f"trl-multinode check {path}{self.launch_flags}{gpus}{script}"

    def render_line(self, path: str) -> str:
        """Return the command that writes a job file."""
        gpus = "" if self.devices == 8 else f" --gpus_per_node {self.devices}"
        return f'trl-multinode render slurm|k8s|ssh|skypilot {path}{gpus} --script "train.py{self.script_flags}"'

    def summary(self) -> str:
        """Describe the nodes, without the last full stop."""
        nodes = count(self.nodes, "node")
        if self.cpu:
            return f"{nodes} of {count(self.ranks, 'rank')} without a GPU, for trying things out, all on this machine"
        if self.shared:
            return f"{nodes} of 1 GPU, which trains and generates"
        trains = f"{self.ranks} {'trains' if self.ranks == 1 else 'train'}"
        each = f"On each {trains}" if self.nodes > 1 else trains
        last, are = f"cuda:{self.ranks}", "is"
        if self.engine_gpus > 1:
            last, are = f"{last} {'and' if self.engine_gpus == 2 else 'to'} cuda:{self.devices - 1}", "are"
        return f"{nodes} of {self.devices} GPUs. {each}, {last} {are} left over for vLLM"

    def where(self) -> str:
        """Return on which nodes, and with which values, the launch line is run."""
        if self.nodes == 1:
            return "Start it:"
        ranks = "0 or 1" if self.nodes == 2 else f"0 to {self.nodes - 1}"
        if self.cpu:
            return f"In {self.nodes} terminals, with K = {ranks}:"
        return f"On every node, with its own K ({ranks}) and, everywhere the same, HOST0, the address of node 0:"


def count(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}" + ("s" if number != 1 else "")
