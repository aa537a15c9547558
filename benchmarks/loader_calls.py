"""Seconds that vLLM's loaders take per tensor, or per matrix of an expert, whatever its size.

    python benchmarks/loader_calls.py

Two depths of a model with tiny tensors go through `WeightSync` into a real vLLM on this machine's CPU, one after the
other. The difference of their loading divided by the difference of their tensors is the cost of one call: Python, not
bytes, so a faster core is faster. `Rates.call_s` of the projection is rounded from the model with experts, whose
matrices are nearly all calls of a large model; dense ones have 300 to 1200 tensors, which take 0.6 s at most.
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from multinode_kit.engines import REAL, SyncDriver, running_engines
from trl_multinode.tools.plan.model_size import size_of

RESULTS = Path(__file__).parent / "results" / "loader_calls.json"
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": None,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 64, "num_experts_per_tok": 2, "head_dim": 32}
MODELS = {
    "dense": (lambda layers: Qwen2Config(num_hidden_layers=layers, **TINY), (8, 48)),
    "experts": (
        lambda layers: Qwen3MoeConfig(num_hidden_layers=layers, **TINY, **EXPERTS),
        (4, 12),
    ),
}
SYNCS = 7  # the first one is a warm-up


def loading(config) -> tuple[int, list[float]]:
    """Return the calls and the seconds of loading of some syncs of a model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    took = []
    with (
        tempfile.TemporaryDirectory() as folder,
        running_engines(model, Path(folder), REAL, max_num_seqs=4) as engines,
    ):
        driver = SyncDriver(model, engines, 512 << 20)
        for _ in range(SYNCS):
            driver.perturb(0.01)
            driver.send()
            took.append(driver.timings.load_s)
    return size_of(model).loader_calls, took[1:]


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    for kind, (config, depths) in MODELS.items():
        (few, short), (many, long) = (loading(config(layers)) for layers in depths)
        found[kind] = {
            "calls": [few, many],
            "load_s": [
                {"low": round(min(took), 4), "median": round(median(took), 4)}
                for took in (short, long)
            ],
            # other work only adds to a time
            "call_s": round((min(long) - min(short)) / (many - few), 6),
        }
        print(kind, found[kind])
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
