"""Names of vLLM that this package uses or replaces, looked up in the installed sources: no import, which takes 10 s.

`make versions` runs this on both ends of the range. Workers on GPUs run other files than those on a CPU (Model Runner
V2), so the files of both are looked at.
"""

import ast
import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from packaging.version import Version

from trl_multinode.engine_keys import FOREIGN_GENERATION_KEYS, REFUSED_GENERATION_KEYS, sampling_keys
from trl_multinode.libraries import installed

pytestmark = [pytest.mark.engine, pytest.mark.nightly]  # the lock pins what it looks at

PACKAGE = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
RUNNERS = {"v1": "v1/worker/gpu_model_runner.py", "v2": "v1/worker/gpu/model_runner.py"}
SAMPLER_V2 = "v1/worker/gpu/sample/sampler.py"
RELOAD = "model_executor/model_loader/reload"
MANAGER = "lora/model_manager.py"

# File, class ("" for the module), names that it must have
NAMES = [
    ("config/weight_transfer.py", "WeightTransferConfig", "backend"),
    ("config/vllm.py", "VllmConfig", "use_v2_model_runner"),
    ("config/vllm.py", "", "set_current_vllm_config"),
    ("distributed/weight_transfer/base.py", "WeightTransferEngine", "update_weights parse_init_info shutdown"),
    ("distributed/weight_transfer/factory.py", "WeightTransferEngineFactory", "_registry register_engine"),
    ("v1/worker/gpu_worker.py", "Worker", "init_weight_transfer_engine start_weight_update update_weights "
     "finish_weight_update"),
    ("v1/engine/async_llm.py", "AsyncLLM", "from_engine_args generate collective_rpc pause_generation "
     "resume_generation start_weight_update finish_weight_update reset_prefix_cache shutdown"),
    ("v1/core/sched/scheduler.py", "Scheduler", "schedule"),
    ("v1/core/kv_cache_manager.py", "KVCacheManager", "usage"),
    ("v1/engine/core_client.py", "AsyncMPClient", "call_utility_async"),
    ("v1/engine/__init__.py", "EngineCoreOutput", "request_id new_token_ids"),
    ("usage/usage_lib.py", "UsageContext", "LLM_CLASS"),
    ("sampling_params.py", "SamplingParams", "n seed logprobs prompt_logprobs flat_logprobs detokenize output_kind "
     "structured_outputs"),
    ("engine/arg_utils.py", "EngineArgs", "logprobs_mode weight_transfer_config worker_extension_cls load_format "
     "kv_cache_memory_bytes max_lora_rank create_model_config kv_transfer_config kv_offloading_size "
     "kv_offloading_backend ec_transfer_config get_batch_defaults"),
    (f"{RELOAD}/layerwise.py", "", "initialize_layerwise_reload finalize_layerwise_reload get_layerwise_info"),
    (f"{RELOAD}/meta.py", "", "SKIP_TENSORS"),
    ("model_executor/models/utils.py", "AutoWeightsLoader", "load_weights"),
    ("model_executor/layers/vocab_parallel_embedding.py", "UnquantizedEmbeddingMethod",
     "process_weights_after_loading"),
    ("lora/lora_model.py", "LoRAModel", "from_lora_tensors"),
    (MANAGER, "LoRAModelManager", "remove_all_adapters add_adapter activate_adapter"),
    ("lora/peft_helper.py", "PEFTHelper", "r lora_alpha target_modules"),
    ("multimodal/processing/processor.py", "BaseMultiModalProcessor", "_apply_prompt_updates _find_mm_placeholders"),
    ("model_executor/model_loader/utils.py", "", "get_model_cls"),
    ("v1/sample/sampler.py", "Sampler", "forward apply_penalties sample compute_logprobs"),
    ("v1/sample/logits_processor/builtin.py", "LogitBiasLogitsProcessor", "apply"),
    ("v1/structured_output/utils.py", "", "apply_grammar_bitmask"),
    (SAMPLER_V2, "Sampler", "sample add_request"),
    ("v1/worker/gpu/sample/prompt_logprob.py", "PromptLogprobsWorker", "compute_prompt_logprobs"),
    ("v1/worker/gpu/structured_outputs.py", "StructuredOutputsWorker", "apply_grammar_bitmask"),
    (RUNNERS["v1"], "GPUModelRunner", "_get_prompt_logprobs_dict"),
]  # fmt: skip


def v2_can_be_extended() -> bool:
    """Return whether vLLM's V2 sampler has the list of processors to which `vllm_worker/logprobs.py` adds its own.

    It was seen in 0.31 and 0.32 and was missing in 0.26; a later version without it is an error.
    """
    found = "self.logits_processors" in source(SAMPLER_V2)
    assert found or Version(installed("vllm")) < Version("0.31"), "vLLM's V2 sampler has moved"
    return found


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text())


def names(file: str, owner: str) -> set[str]:
    """Functions, classes and assigned names in the body of a module, or of one of its classes."""
    body = tree(file).body
    if owner:
        (found,) = [node for node in body if isinstance(node, ast.ClassDef) and node.name == owner]
        body = found.body
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    targets = [t for node in body if isinstance(node, ast.Assign) for t in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return defined | {target.id for target in targets if isinstance(target, ast.Name)}


def source(file: str) -> str:
    return (PACKAGE / file).read_text()


def test_the_installed_vllm_has_the_names_that_are_used():
    lost = {(file, owner): set(wanted.split()) - names(file, owner) for file, owner, wanted in NAMES}
    assert not {place: gone for place, gone in lost.items() if gone}, "docs/upgrading.md says where they are used"


def test_the_sampling_settings_that_are_read_from_the_source_are_those_of_the_real_class():
    code = "import inspect, vllm.sampling_params as s; print('KEYS', *inspect.signature(s.SamplingParams).parameters)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    (real,) = [line.split()[1:] for line in printed.splitlines() if line.startswith("KEYS")]
    assert len(real) > 25 and sampling_keys() == {key for key in real if not key.startswith("_")}
    assert not FOREIGN_GENERATION_KEYS.keys() & set(real)
    assert REFUSED_GENERATION_KEYS.keys() <= set(real)


# File, what its source must have (an expression), where we rely on it
PHRASES = [
    # `BucketReceiver` loads into what `get_model` returns, and finds the LoRA manager on it
    *((file, "def get_model") for file in RUNNERS.values()),
    *((file, "load_lora_model") for file in RUNNERS.values()),
    ("v1/worker/gpu_worker.py", r"self\.model_runner\.get_model\(\)"),
    # The probe after the first sync scores a prompt, and TRL's importance sampling needs processed log-probs
    *((file, "prompt_logprobs") for file in RUNNERS.values()),
    *((file, "logprobs_mode") for file in ("v1/sample/sampler.py", SAMPLER_V2)),
    # `vllm_worker/logprobs.py` divides the logits of a scored prompt by the temperature of its request
    (RUNNERS["v1"], r"self\.sampler\.compute_logprobs\(logits\)"),
    (RUNNERS["v2"], r"self\.prompt_logprobs_worker\.compute_prompt_logprobs\(\s*"
     r"self\.model\.compute_logits,\s*hidden_states,"),
    ("v1/worker/gpu/sample/prompt_logprob.py",
     r"for start_idx in range\(0, prompt_token_ids\.shape\[0\], CHUNK_SIZE\)"),
    (RUNNERS["v1"], r"apply_grammar_bitmask\(\n"),
    # Captured graphs read the tensors into which a reload puts its values
    (f"{RELOAD}/layerwise.py", r"param\.data\.copy_\("),
]  # fmt: skip
# The places where log-probs are extended; `test_conformance.py` holds the order in which a sampler changes logits
PLACES_IN_V2 = [
    (RUNNERS["v2"], r"self\.structured_outputs_worker\.apply_grammar_bitmask\(\n +logits,"),
    *((SAMPLER_V2, rf"self\.{name}\b.* = ")
      for name in ("logits_processors", "penalties_state", "needs_logits_processing", "sampling_states")),
    (SAMPLER_V2, "logits = processed_logits"),
    (SAMPLER_V2, r"sampled, processed_logits = self\.sample\(\n +logits,"),
]  # fmt: skip


def test_the_installed_vllm_has_the_code_on_which_we_rely():
    # vLLM 0.26 has no places: node mode refuses the settings there that mask tokens
    wanted = PHRASES + PLACES_IN_V2 if v2_can_be_extended() else PHRASES
    assert not [(file, phrase) for file, phrase in wanted if not re.search(phrase, source(file))]


def test_a_layer_with_an_adapter_can_be_loaded_or_this_package_adds_how():
    ours = Path(__file__).parents[2] / "trl_multinode" / "vllm_worker" / "reloading.py"
    theirs = "load_weights" in names("lora/layers/base.py", "BaseLayerWithLoRA")
    assert theirs or "BaseLayerWithLoRA.load_weights = load_base_layer" in ours.read_text()
