"""Nodes and devices of a launch."""

from dataclasses import dataclass

from .text import count, matching


@dataclass(frozen=True)
class Layout:
    """Number of nodes, their training ranks and their GPUs."""

    nodes: int
    ranks: int  # training processes of a node
    gpus: int  # of a node; 0: the ranks run on its CPU

    @property
    def spare(self) -> int:
        """Return the number of GPUs of a node on which no rank trains."""
        return self.gpus - self.ranks

    @property
    def gpus_flag(self) -> str:
        """Return the flag for a number of GPUs that is not the default."""
        return "" if self.gpus in (0, 8) else f" --gpus_per_node {self.gpus}"

    def summary(self) -> str:
        """Describe the nodes, without the last full stop."""
        nodes = count(self.nodes, "node")
        if not self.gpus:
            return f"{nodes} of {count(self.ranks, 'rank')} without a GPU"
        if self.gpus == 1:
            return f"{nodes} of 1 GPU, which trains and generates"
        trains = f"{self.ranks} {'trains' if self.ranks == 1 else 'train'}"
        left = {0: "none is", 1: f"cuda:{self.ranks} is"}.get(
            self.spare,
            f"cuda:{self.ranks} {'and' if self.spare == 2 else 'to'} cuda:{self.gpus - 1} are",
        )
        return f"{nodes} of {self.gpus} GPUs. {'On each ' * (self.nodes > 1)}{trains}, {left} left over for vLLM"


def nodes_and_gpus(text: str) -> tuple[int, int]:
    """Return the numbers of `4x8`, for a parser."""
    nodes, gpus = matching(r"([1-9]\d*)x([1-9]\d*)", "nodes x GPUs of a node, as in 4x8")(text)
    return int(nodes), int(gpus)
