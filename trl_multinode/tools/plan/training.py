"""Memory of a training GPU under ZeRO-3: states, gathered parameters, activations."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from .model_size import ModelSize
from .task import Task

# Bytes per parameter as in DeepSpeed's `estimate_zero3_model_states_mem_needs`: 2 of bfloat16 parameters, 16 of
# gradients, float32 copies and Adam's two moments
STATE_BYTES, PARAMETER_BYTES = 18, 2
LAYER_BYTES = (
    4  # per parameter of the largest layer, gathered with its gradient; also the estimator's
)
OFFLOAD_FACTOR = 1.5  # of host memory; the estimator's
LIVE_PARAMETERS = 1e9  # DeepSpeed's default `stage3_max_live_parameters`
REDUCE_BUCKET = 5e8  # elements; DeepSpeed's default `reduce_bucket_size`
OTHER_BYTES = 2.5 * 2**30  # assumed: CUDA context, NCCL's channels, workspaces of cuBLAS
FREE_SHARE = 0.05  # assumed: holes between the blocks of torch's allocator
MOST_NODES = 1024
OFFLOADS = ("none", "optimizer", "all")


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one training GPU, and in the memory of its node with offloading."""

    states: float
    gather: float
    activations: float
    other: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """Peak of all parts. They are not all at their peaks at once, so this is an upper bound."""
        return self.states + self.gather + self.activations + self.other


def state_bytes(
    model: ModelSize, ranks: Sequence[int], offload: str = "none"
) -> tuple[float, float]:
    """Return the bytes of parameters, gradients and optimizer on one GPU, and on one node's host, without any layer.

    Args:
        ranks (`Sequence[int]`):
            Ranks of each node.
        offload (`str`, *optional*, defaults to `"none"`):
            What is in host memory: nothing, the `"optimizer"`, or `"all"` of optimizer and parameters.
    """
    share = model.parameters / sum(ranks)
    if offload == "none":
        return STATE_BYTES * share, 0.0
    kept = PARAMETER_BYTES if offload == "optimizer" else 0
    return kept * share, (STATE_BYTES - kept) * share * max(ranks) * OFFLOAD_FACTOR


def gather_bytes(model: ModelSize) -> float:
    """Return the bytes of parameters that are whole at one time, and of the bucket in which gradients are reduced."""
    live = PARAMETER_BYTES * min(model.parameters, LIVE_PARAMETERS)
    return max(live, LAYER_BYTES * model.largest_layer) + PARAMETER_BYTES * min(
        model.parameters, REDUCE_BUCKET
    )


def layer_bytes(model: ModelSize) -> float:
    """Return the bytes per token that autograd keeps of one layer in bfloat16, with an attention that keeps no scores.

    Two norms keep their input in float32 and bfloat16 and their output; attention keeps queries, keys, values and
    output; the MLP keeps four tensors of its width; each expert adds its input and output.
    """
    width = max(each.width for each in model.cache.attention)
    norms = 16 * model.hidden + (3 * width if model.has_norms else 0)
    return norms + 2 * width + 8 * model.mlp_width + 4 * model.hidden * model.experts.routed


def activation_bytes(model: ModelSize, rows: float, row_tokens: int) -> float:
    """Return the peak of activations of a micro-batch with gradient checkpointing, TRL's default.

    Each layer keeps its input. The backward pass computes one layer again, and has gradients of three widths of its
    MLP and of three inputs of its experts at a time. Before it the head has its gradient in float32 and in bfloat16,
    because TRL computes the log-probs in tiles.
    """
    tokens = rows * row_tokens
    head = 6 * model.vocabulary * model.hidden + 8 * tokens * model.hidden
    one_layer = tokens * (
        layer_bytes(model) + 6 * model.mlp_width + 6 * model.hidden * model.experts.routed
    )
    return 2 * tokens * model.hidden * model.layers + max(head, one_layer)


def training_memory(task: Task, ranks: Sequence[int], rows: int) -> TrainingMemory:
    """Return the memory of a training GPU for micro-batches of `rows` of the longest rows."""
    states, host = state_bytes(task.model, ranks, task.offload)
    activations = activation_bytes(task.model, rows, task.row_tokens)
    return TrainingMemory(states, gather_bytes(task.model), activations, OTHER_BYTES, host)


def fits(task: Task, ranks: Sequence[int], rows: int) -> bool:
    """Return whether micro-batches of `rows` rows fit into a training GPU."""
    limit = (1 - FREE_SHARE) * task.cluster.gpu.total
    return training_memory(task, ranks, rows).total <= limit


def largest_micro_batch(task: Task, ranks: Sequence[int]) -> int:
    """Return the rows of the largest micro-batch that fits; 0 if one row, or the rows that were asked for, do not."""
    share = -(-task.rows.number * len(ranks) // sum(ranks))  # rows of a round per rank
    most = min(share, task.micro_rows or share)
    first = most if task.micro_rows else 1
    return next((rows for rows in range(most, first - 1, -1) if fits(task, ranks, rows)), 0)


def nodes_needed(task: Task, ranks: Sequence[int]) -> int | None:
    """Return the fewest nodes on which a micro-batch of one row, or of the rows that were asked for, fits.

    Only the number of nodes with the most ranks differs from `ranks`.
    """
    most, rows = max(ranks), task.micro_rows or 1
    others = [each for each in ranks if each < most]
    # more ranks never need more memory
    enough = bisect_left(
        range(1, MOST_NODES + 1), True, key=lambda full: fits(task, [*others, *[most] * full], rows)
    )
    return None if enough == MOST_NODES else len(others) + enough + 1
