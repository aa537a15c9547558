"""Memory of a training GPU under ZeRO-3: states, gathered parameters, activations."""

from dataclasses import dataclass

from .model_size import ModelSize

# Bytes per parameter as in DeepSpeed's `estimate_zero3_model_states_mem_needs`: 2 of bfloat16 parameters, 16 of
# gradients, float32 copies and Adam's two moments
STATE_BYTES, PARAMETER_BYTES = 18, 2
LAYER_BYTES = 4  # per parameter of the largest layer, gathered with its gradient; also the estimator's
OFFLOAD_FACTOR = 1.5  # of host memory; the estimator's
LIVE_PARAMETERS = 1e9  # DeepSpeed's default `stage3_max_live_parameters`
REDUCE_BUCKET = 5e8  # elements; DeepSpeed's default `reduce_bucket_size`
OTHER_BYTES = 2.5 * 2**30  # assumed: CUDA context, NCCL's channels, workspaces of cuBLAS
FREE_SHARE = 0.05  # assumed: holes between the blocks of torch's allocator
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


def state_bytes(model: ModelSize, nodes: int, ranks_per_node: int, offload: str = "none") -> tuple[float, float]:
    """Return the bytes of parameters, gradients and optimizer on one GPU, and on one node's host, without any layer.

    Args:
        offload (`str`, *optional*, defaults to `"none"`):
            What is in host memory: nothing, the `"optimizer"`, or `"all"` of optimizer and parameters.
    """
    ranks = nodes * ranks_per_node
    if offload == "none":
        return STATE_BYTES * model.parameters / ranks, 0.0
    kept = PARAMETER_BYTES if offload == "optimizer" else 0
    return kept * model.parameters / ranks, (STATE_BYTES - kept) * model.parameters / nodes * OFFLOAD_FACTOR


def gather_bytes(model: ModelSize) -> float:
    """Return the bytes of parameters that are whole at one time, and of the bucket in which gradients are reduced."""
    live = PARAMETER_BYTES * min(model.parameters, LIVE_PARAMETERS)
    return max(live, LAYER_BYTES * model.largest_layer) + PARAMETER_BYTES * min(model.parameters, REDUCE_BUCKET)


def layer_bytes(model: ModelSize) -> float:
    """Return the bytes per token that autograd keeps of one layer in bfloat16, with an attention that keeps no scores.

    Two norms keep their input in float32 and bfloat16 and their output; attention keeps queries, keys, values and
    output; the MLP keeps four tensors of its width; each expert adds its input and output.
    """
    queries, keys = model.heads * model.head_size, model.kv_heads * model.head_size
    norms = 16 * model.hidden + (6 * (queries + keys) if model.head_norms else 0)
    return norms + 4 * (queries + keys) + 8 * model.mlp_width + 4 * model.hidden * model.routed


def activation_bytes(model: ModelSize, rows: float, row_tokens: int) -> float:
    """Return the peak of activations of a micro-batch with gradient checkpointing, TRL's default.

    Each layer keeps its input. The backward pass computes one layer again, and has gradients of three widths of its
    MLP and of three inputs of its experts at a time. Before it the head has its gradient in float32 and in bfloat16,
    because TRL computes the log-probs in tiles.
    """
    tokens = rows * row_tokens
    head = 6 * model.vocabulary * model.hidden + 8 * tokens * model.hidden
    one_layer = tokens * (layer_bytes(model) + 6 * model.mlp_width + 6 * model.hidden * model.routed)
    return 2 * tokens * model.hidden * model.layers + max(head, one_layer)


def training_memory(
    model: ModelSize, nodes: int, ranks_per_node: int, rows: int, row_tokens: int, offload: str = "none"
) -> TrainingMemory:
    """Return the memory of a training GPU for micro-batches of `rows` rows of `row_tokens` tokens."""
    states, host = state_bytes(model, nodes, ranks_per_node, offload)
    return TrainingMemory(
        states, gather_bytes(model), activation_bytes(model, rows, row_tokens), OTHER_BYTES, host
    )  # fmt: skip


def largest_micro_batch(
    model: ModelSize, nodes: int, ranks_per_node: int, row_tokens: int, total: float, offload: str, most: int
) -> int:
    """Return the rows of the largest micro-batch that fits, at most `most`; 0 if one row does not fit."""
    fits = 0
    while fits < most:
        need = training_memory(model, nodes, ranks_per_node, fits + 1, row_tokens, offload)
        if need.total > (1 - FREE_SHARE) * total:
            break
        fits += 1
    return fits
