"""Code of vLLM on which this package relies, looked up in the installed sources: no import, which takes 10 s.

`test_upgrading.py` looks up the internal names.

`make versions` runs this on both ends of the range. Workers on GPUs run other files than those on a CPU (Model Runner
V2), so the files of both are looked at.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from trl_multinode.engine_keys import (
    FOREIGN_GENERATION_KEYS,
    REFUSED_GENERATION_KEYS,
    fields_in_vllm,
)
from trl_multinode.libraries import installed

pytestmark = [pytest.mark.engine, pytest.mark.nightly]  # the lock pins what it looks at

PACKAGE = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
RUNNERS = {"v1": "v1/worker/gpu_model_runner.py", "v2": "v1/worker/gpu/model_runner.py"}
SAMPLER_V2 = "v1/worker/gpu/sample/sampler.py"
RELOAD = "model_executor/model_loader/reload"
EXPERTS = "model_executor/layers/fused_moe"


def v2_can_be_extended() -> bool:
    """Return whether vLLM's V2 sampler has the list of processors to which `vllm_worker/logprobs.py` adds its own.

    It was seen in 0.31 and 0.32 and was missing in 0.26; a later version without it is an error.
    """
    found = "self.logits_processors" in source(SAMPLER_V2)
    assert found or Version(installed("vllm")) < Version("0.31"), "vLLM's V2 sampler has moved"
    return found


def source(file: str) -> str:
    return (PACKAGE / file).read_text()


def test_the_sampling_settings_that_are_read_from_the_source_are_those_of_the_real_class():
    code = "import inspect, vllm.sampling_params as s; print('KEYS', *inspect.signature(s.SamplingParams).parameters)"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    (real,) = [line.split()[1:] for line in printed.splitlines() if line.startswith("KEYS")]
    read = fields_in_vllm("sampling_params.py", "SamplingParams")
    assert len(real) > 25 and read == {key for key in real if not key.startswith("_")}
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
    # `load_experts_together` has all experts of a layer loaded in one call
    (f"{EXPERTS}/runner/moe_runner.py", r"self\.routed_experts\.load_weights\(weights\)"),
    (f"{EXPERTS}/routed_experts.py", r"experts_shard\.unbind\(\)"),
    (f"{EXPERTS}/routed_experts.py", r"full_load = len\(loaded_weight\.shape\) == 3"),
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
    theirs = "def load_weights" in source("lora/layers/base.py")
    assert theirs or "BaseLayerWithLoRA.load_weights = load_base_layer" in ours.read_text()
