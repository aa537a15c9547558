"""Model card section about the run: nodes, ranks, reserved devices, versions, tokens per second."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from ..run.topology import EngineDevices, Topology, by_node
from ..run.versions import local_versions

# Names in `local_versions`, and in the card
LIBRARIES = {
    "trl_multinode": "trl_multinode",
    "trl": "TRL",
    "vllm": "vLLM",
    "torch": "PyTorch",
    "deepspeed": "DeepSpeed",
    "transformers": "Transformers",
    "accelerate": "Accelerate",
}
BEFORE = "\n## Citations"  # heading in TRL's template; without it the section goes to the end


def add_section(card: Path, section: str) -> None:
    """Insert `section` into the card that TRL has just written from its template."""
    head, citations, tail = card.read_text(encoding="utf-8").partition(BEFORE)
    card.write_text(f"{head.rstrip()}\n\n{section.strip()}\n{citations}{tail}", encoding="utf-8")


def run_section(topology: Topology, devices: EngineDevices, log_history: Sequence[dict]) -> str:
    """
    Return the section about the run, in Markdown.

    Args:
        topology (`Topology`), devices (`EngineDevices`):
            Topology and engine devices of the calling rank.
        log_history (`Sequence[dict]`):
            `trainer.state.log_history`.
    """
    rows = {
        "Nodes": str(topology.num_nodes),
        "Training ranks": f"{topology.world_size} ({topology.ranks_per_node} per node)",
        **device_rows(topology, devices),
        "Throughput": throughput(log_history, topology.num_devices),
    }
    versions = local_versions()
    for library, name in LIBRARIES.items():
        rows[name] = versions[library]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"## Machines and throughput\n\nTrained with trl_multinode on:\n\n| | |\n|---|---|\n{table}"
    )


def device_rows(topology: Topology, devices: EngineDevices) -> dict[str, str]:
    """Return the rows of the model card's table that describe devices and engines."""
    num_engines = sum(node.engines for node in topology.nodes)
    engines = f"{num_engines} ({topology.engines_per_node} per node)"
    if devices.sender is None:
        return {
            "Devices": "CPU only: no GPU trained, none was reserved",
            "vLLM engines": f"{engines}, on the CPU",
        }
    kind = torch.cuda.get_device_name()
    reserved = [node.reserved for node in topology.nodes]
    shared = "; engines use training GPUs" if devices.shared_with_training else ""
    return {
        "Training GPUs": f"{topology.world_size} ({topology.ranks_per_node} per node, {kind})",
        "Reserved GPUs": f"{sum(reserved)} ({by_node(reserved)} per node{shared})",
        "vLLM engines": engines,
    }


def throughput(log_history: Sequence[dict], num_devices: int) -> str:
    """Format the median of the logged tokens per second, in total and per device, reserved devices included.

    The first log contains the warm-up, so it counts only if there is no other one.
    """
    rates = [entry["perf/tokens_per_s"] for entry in log_history if "perf/tokens_per_s" in entry]
    if not rates:
        return "not logged yet"
    rate = median(rates[1:] or rates)
    return (
        f"{rate:.1f} tokens/s, {rate / num_devices:.1f} per device on {num_devices} devices, reserved ones included "
        "(prompts and completions in micro-batches)"
    )
