"""Memory of an engine's GPU: weights, what a forward pass needs, and the key-value cache in the rest."""

from dataclasses import dataclass

from ...node_settings import GPU_SHARE_OF_RESERVED
from .model_size import ModelSize
from .task import Task

BLOCK_TOKENS = 16  # vLLM's block on GPUs
WEIGHT_BYTES = 2  # bfloat16
BATCHED_TOKENS = 8192  # least of this library's `max_num_batched_tokens`
# Assumed: CUDA context, NCCL's channels, CUDA graphs
GRAPH_BYTES = 1.5 * 2**30
SAMPLER_BYTES = (
    10  # assumed, per row and word of the vocabulary: logits in bfloat16, twice in float32
)


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU of an engine, and the rows that its cache holds."""

    tensor_parallel: int
    engines: int  # of a node
    weights: float
    other: float
    cache: float  # not negative
    tokens: int  # in the caches of all engines of a node

    def rows(self, row_tokens: int) -> int:
        """Return the rows of this length that a node's engines hold at once."""
        return self.engines * (self.tokens // self.engines // row_tokens)


def cache_blocks(
    model: ModelSize,
    budget: float,
    tensor_parallel: int = 1,
    element_bytes: int = 2,
    block_tokens: int = BLOCK_TOKENS,
    row_tokens: int = 1,
) -> int:
    """Return the blocks of cache of an engine whose GPUs each have `budget` bytes for it.

    Args:
        row_tokens (`int`, *optional*, defaults to 1):
            Tokens of a row. Windows and recurrent states take less per token in a longer one.
    """
    elements = model.cache.cache_elements(row_tokens, tensor_parallel) / row_tokens
    return int(budget // (block_tokens * elements * element_bytes))


def forward_bytes(model: ModelSize, tensor_parallel: int, rows: int) -> float:
    """Return the bytes of the largest forward pass, which vLLM measures before it takes the rest for the cache."""
    mlp = BATCHED_TOKENS * (
        6 * model.mlp_width / tensor_parallel + 8 * model.hidden * max(1, model.experts.routed)
    )
    return max(mlp, SAMPLER_BYTES * rows * model.vocabulary) + GRAPH_BYTES


def engine_memory(
    task: Task, gpus: int, tensor_parallel: int, taken: float | None = None
) -> EngineMemory:
    """Return the memory of the engines on `gpus` GPUs of a node.

    Args:
        taken (`float`, *optional*):
            Bytes that training keeps on the same GPU. If given, the engine takes all of the rest, else vLLM's share.
    """
    model, total = task.model, task.cluster.gpu.total
    engines = gpus // tensor_parallel
    weights = WEIGHT_BYTES * model.parameters / tensor_parallel
    other = forward_bytes(model, tensor_parallel, min(1024, -(-task.rows.number // engines)))
    room = GPU_SHARE_OF_RESERVED * total if taken is None else total - taken
    cache = max(0.0, room - weights - other)
    blocks = cache_blocks(model, cache, tensor_parallel, row_tokens=task.row_tokens)
    tokens = engines * BLOCK_TOKENS * blocks
    return EngineMemory(tensor_parallel, engines, weights, other, cache, tokens)


def parallel_degrees(model: ModelSize, gpus: int) -> list[int]:
    """Return the tensor-parallel degrees that use all of `gpus` GPUs and divide the model's heads."""
    return [n for n in range(1, gpus + 1) if gpus % n == 0 and model.cache.splits_into(n)]
