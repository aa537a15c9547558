"""`Task`: everything that a plan depends on."""

from dataclasses import dataclass

from .hardware import Cluster
from .measured import MeasuredRun
from .model_size import ModelSize


@dataclass(frozen=True)
class Rows:
    """Completions of a round of one node."""

    number: int
    prompt: int  # tokens
    mean: float  # tokens of a completion
    longest: int


@dataclass(frozen=True)
class Task:
    """A model, a cluster, the rows of a round and the settings of training."""

    model: ModelSize
    cluster: Cluster
    rows: Rows
    offload: str = "none"
    micro_rows: int | None = None  # rows of a micro-batch; `None`: as many as fit
    run: MeasuredRun | None = None

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row."""
        return self.rows.prompt + self.rows.longest

    @property
    def timed(self) -> bool:
        """Return whether seconds can be given: they were measured, or the GPU's rates are known."""
        gpu = self.cluster.gpu
        return self.run is not None or (gpu.memory_rate is not None and gpu.peak is not None)
