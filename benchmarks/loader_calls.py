"""Seconds that vLLM's loaders take per call, whatever the size of the tensor.

    python benchmarks/loader_calls.py

Two depths of a model with tiny tensors go through `WeightSync` into a real vLLM on this machine's CPU, one after the
other. The difference of their loading divided by the difference of their calls is the cost of one call: Python, not
bytes, so a faster core is faster. `Rates.call_s` of the projection is rounded from the dense model. That with experts
has few calls too, because a layer takes three for all its experts.

`layer` are the CPU seconds of one layer of experts, vLLM's own class without an engine, with these three calls and as
vLLM loads it itself: with a call for each matrix of an expert.
"""

import json
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from multinode_kit.engines import REAL, SyncDriver, running_engines
from multinode_kit.expert_layer import expert_layer, fused_weights
from trl_multinode.tools.plan.model_size import size_of

RESULTS = Path(__file__).parent / "results" / "loader_calls.json"
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": None,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32}
MODELS = {
    "dense": (lambda layers: Qwen2Config(num_hidden_layers=layers, **TINY), (8, 48)),
    "experts": (
        lambda layers: Qwen3MoeConfig(num_hidden_layers=layers, **TINY, **EXPERTS),
        (8, 48),
    ),
}
SYNCS = 7  # the first one is a warm-up
LAYER_EXPERTS, LAYER_LOADS = 128, 40


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


def layer_s(together: bool) -> float:
    """Return the least CPU seconds of loading a layer of experts, with all of them in a call or one by one."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from trl_multinode.vllm_worker import reloading

    took, sent = [], fused_weights(LAYER_EXPERTS)
    batching = nullcontext() if together else patch.object(reloading, "load_experts_together")
    with set_current_vllm_config(VllmConfig()), batching:
        model = torch.nn.ModuleList([expert_layer(LAYER_EXPERTS)])
        record_metadata_for_reloading(model)
        writes = None
        for _ in range(LAYER_LOADS):
            writes = reloading.begin_reload(model, torch.device("cpu"), writes)
            start = time.process_time()
            with writes.watched():
                list(model[0].load_weights(sent.items()))
            took.append(time.process_time() - start)
            reloading.end_reload(model, SimpleNamespace(hf_text_config=None), writes)
    return min(took)


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
    layer = {"together_s": layer_s(True), "one_by_one_s": layer_s(False)}
    found["layer"] = {"experts": LAYER_EXPERTS} | {k: round(v, 5) for k, v in layer.items()}
    print("layer", found["layer"])
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
