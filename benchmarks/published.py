"""Seconds of weight syncs that others published, each with its source, for `benchmarks/projection.py`.

Only pages that were read have figures here.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A published sync, and the model and the number of nodes for which ours is calculated beside it."""

    who: str
    model: str
    gb: float  # of the weights, in the dtype of the engine
    gpus: str  # training + engines
    low_s: float
    high_s: float
    way: str
    source: str
    parameters: float  # billions
    calls: int  # of vLLM's loaders
    nodes: int  # of ours; those of the others at least hold their engines


TRL = "https://github.com/huggingface/trl/pull/7131"
VERL = "https://github.com/verl-project/verl"
VERL_README = f"{VERL}/blob/main/verl/checkpoint_engine/README.md"
VERL_MATRIX = f"{VERL}/issues/7060"  # comment of 2026-07-20, H100
VERL_235B = f"{VERL}/pull/7085"
NEMO = "https://github.com/NVIDIA-NeMo/RL/pull"
MOONSHOT = "https://github.com/MoonshotAI/checkpoint-engine/blob/main/README.md"
# billions of parameters, calls if a layer takes three for its experts: vLLM 0.31 takes more for Kimi-K2
QWEN_30B, QWEN_235B, KIMI = (
    (30.5, 579),
    (235.1, 1131),
    (1000.0, 1100),
)

PUBLISHED = (
    Published("TRL AsyncGRPO", "Qwen3-32B", 65.5, "16 + 16 H200", 2.3, 2.3,
              "gathered from FSDP2, then NCCL from rank 0", TRL, 32.8, 707, 4),
    Published("verl nccl", "Qwen2.5-7B", 15.2, "8 + 8", 3.6, 7.0,
              "gather, NCCL broadcast, load; with and without a mended export", f"{VERL}/pull/6974", 7.6, 339, 2),
    Published("verl delta_sharded", "Qwen2.5-7B", 15.2, "8 + 8", 2.4, 3.2,
              "only the 2.4 % of elements that changed", f"{VERL}/pull/6974", 7.6, 339, 2),
    Published("verl nccl", "27B", 54.0, "8 + 8, EFA", 3.01, 3.01,
              "one training rank sends", f"{VERL}/pull/7263", 27.0, 707, 2),
    Published("verl nccl_parallel", "27B", 54.0, "8 + 8, EFA", 2.51, 2.51,
              "every training rank sends a stripe", f"{VERL}/pull/7263", 27.0, 707, 2),
    Published("verl nccl", "32B", 65.5, "H100", 14.2, 14.2,
              "rank 0 gathers, packs and broadcasts; not offloaded", VERL_MATRIX, 32.8, 707, 4),
    Published("verl delta_sharded", "32B", 65.5, "H100", 6.2, 6.2,
              "only the elements that changed", VERL_MATRIX, 32.8, 707, 4),
    Published("verl nccl", "72B", 145.4, "32 + TP 8 engines", 28.5, 29.1,
              "rank 0 gathers, packs and broadcasts; packing takes 23.5 of its 24 s", VERL_MATRIX, 72.7, 963, 8),
    Published("verl delta_sharded", "72B", 145.4, "32 + TP 8 engines", 12.0, 13.0,
              "only the 2.1 to 2.6 % of elements that changed", VERL_MATRIX, 72.7, 963, 8),
    Published("verl nccl", "Qwen3-235B", 470.2, "64 + 16", 246.5, 266.1,
              "the same with experts; offloaded", VERL_235B, *QWEN_235B, 10),
    Published("verl delta_sharded", "Qwen3-235B", 470.2, "64 + 16", 11.4, 14.9,
              "only the 0.02 to 0.05 % of elements that changed; offloaded", VERL_235B, *QWEN_235B, 10),
    Published("verl nccl, nixl", "Qwen3-30B-A3B", 61.0, "2 + 30 H100", 7.0, 7.0,
              "received, not loaded into an engine", VERL_README, *QWEN_30B, 4),
    Published("NeMo-RL NCCL-Reshard", "30B", 61.0, "TP 4 x DP 4 engines", 1.13, 1.53,
              "each rank sends its shards to the ranks that need them; merged", f"{NEMO}/2971", *QWEN_30B, 4),
    Published("NeMo-RL NCCL-Xfer", "30B", 61.0, "TP 4 x DP 4 engines", 0.54, 0.67,
              "the same, closed in favour of NCCL-Reshard", f"{NEMO}/2808", *QWEN_30B, 4),
    Published("NeMo-RL NCCL-Xfer", "235B", 470.2, "TP 8 x DP 16 engines", 4.56, 4.85,
              "the same", f"{NEMO}/2808", *QWEN_235B, 16),
    Published("Moonshot checkpoint-engine", "Qwen3-235B", 470.2, "8 H800, colocated", 6.22, 6.22,
              "from host memory into 8 GPUs at once, NCCL broadcast, load", MOONSHOT, *QWEN_235B, 2),
    Published("Moonshot checkpoint-engine", "Kimi-K2, FP8", 1000.0, "256 H20, colocated", 16.04, 16.04,
              "the same", MOONSHOT, *KIMI, 32),
    Published("LMSYS, SGLang", "Kimi-K2", 1000.0, "not known", 7.2, 7.2,
              "RDMA into the ranks that need them; 53 s by NCCL broadcast",
              "https://lmsys.org/blog/2026-04-29-p2p-update", *KIMI, 32),
    Published("Perplexity", "Kimi-K2, FP8", 1000.0, "256 + 128", 1.2, 1.3,
              "RDMA from every training GPU into the engines' GPUs, by a fixed schedule",
              "https://le.qun.ch/en/blog/2025/09/17/rl-weight-transfer-2", *KIMI, 48),
)  # fmt: skip

# Designs of which no seconds of one sync were read
OTHERS = (
    ("Fireworks", "about 2 % of 1 TiB per step, the elements that changed, over links between regions",
     "https://fireworks.ai/blog/frontier-rl-is-cheaper-than-you-think"),
    ("TRL, delta weight sync", "20 to 35 MB of 1.2 GB per step, the elements that changed, through the Hub",
     "https://huggingface.co/blog/delta-weight-sync"),
)  # fmt: skip
