"""Extensions of vLLM's V2 model runner, which needs a GPU: here its own sampler runs in Triton's interpreter.

The extensions of V1 run in `test_conformance.py`, in vLLM itself.
"""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_vllm_names import v2_can_be_extended

from trl_multinode.engine_process.vllm_backend import VllmBackend

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).parent / "v2_on_cpu.py"
UNCHANGED = {"plain", "temperature", "score plain"}  # vLLM's own log-probs are over the whole vocabulary


@pytest.fixture(scope="module")
def v2() -> dict | None:
    """Differences to the closed form, before and after the extension; `None` for a sampler without its place.

    That of vLLM 0.26 is one. Node mode refuses settings that mask tokens there, by the reason that is tested below.
    """
    if not v2_can_be_extended():
        return None
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_v2_returns_log_probs_over_the_whole_vocabulary_and_scores_at_a_temperature(v2):
    if v2 is not None:
        assert v2["reason"] == "" and max(v2["after"].values()) < 1e-5
        before = v2["before"]
        assert all((difference < 1e-5) == (name in UNCHANGED) for name, difference in before.items()), before


def test_v2_needs_no_other_setting_in_the_step(v2):
    if v2 is not None:
        assert max({**v2["only_grammar"], **v2["only_plain"]}.values()) < 1e-5


def runner(**changes) -> tuple[SimpleNamespace, SimpleNamespace]:
    """vLLM's config and a model runner with as little as the extensions of V2 need before they fail."""
    config = SimpleNamespace(use_v2_model_runner=True, speculative_config=changes.get("speculative_config"))
    sampler = SimpleNamespace(sampling_states=SimpleNamespace(temperature=None))
    scorer = SimpleNamespace(compute_prompt_logprobs=None)
    return config, SimpleNamespace(
        sampler=changes.get("sampler", sampler), prompt_logprobs_worker=scorer, structured_outputs_worker=None
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"speculative_config": {"method": "ngram"}}, "speculative_config"), ({}, "logits_processors"),
     ({"sampler": None}, "^$")],
)  # fmt: skip
def test_a_sampler_that_cannot_be_extended_is_a_reason_and_no_error(changes, reason):
    from trl_multinode.vllm_worker.logprobs import extend_logprobs

    config, stub = runner(**changes)
    assert re.search(reason, extend_logprobs(config, stub))


@pytest.mark.parametrize(("logprob", "reason"), [(-5.7, ""), (0.0, "log-prob 0.0"), (float("nan"), "log-prob nan")])
def test_the_engines_start_proves_with_a_row_that_the_sampler_is_extended(logprob, reason):
    backend = VllmBackend(SimpleNamespace())
    row = SimpleNamespace(outputs=[SimpleNamespace(logprobs=SimpleNamespace(logprobs=[logprob]))])

    async def collective_rpc(name):
        return {"extend_logprobs": ["", ""]}[name]

    async def outputs(prompt, params):
        assert params.allowed_token_ids == [1] and params.logprobs == 0
        yield row

    backend._llm, backend._params_cls = SimpleNamespace(collective_rpc=collective_rpc), SimpleNamespace
    backend._outputs = outputs
    assert asyncio.run(backend._why_truncated()).endswith(reason)
