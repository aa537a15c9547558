"""Extensions of vLLM's V2 model runner, which needs a GPU: here its own sampler runs in Triton's interpreter.

The extensions of V1 run in `test_conformance.py`, in vLLM itself.
"""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from test_vllm_names import v2_can_be_extended

from trl_multinode.wire.sampling import TRUNCATING

# V2 runs on GPUs alone; the lock pins its sampler, and `make versions` runs this file on both ends of the range
pytestmark = [pytest.mark.engine, pytest.mark.nightly]

SCRIPT = Path(__file__).parent / "v2_on_cpu.py"
# vLLM's own log-probs are over the whole vocabulary
UNCHANGED = {
    "plain",
    "temperature",
    "score plain",
}


@pytest.fixture(scope="module")
def v2() -> dict | None:
    """Differences to the closed form, before and after the extension; `None` for a sampler without its place.

    That of vLLM 0.26 is one. Node mode refuses settings that mask tokens there, by the reason that is tested below.
    """
    if not v2_can_be_extended():
        return None
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_v2_returns_log_probs_over_the_whole_vocabulary_and_scores_at_a_temperature(v2):
    if v2 is not None:
        assert v2["reason"] == "" and max(v2["after"].values()) < 1e-5
        before = v2["before"]
        assert all(
            (difference < 1e-5) == (name in UNCHANGED) for name, difference in before.items()
        ), before
        # no other setting in the step; a user's processor
        for step in (
            "only_grammar",
            "only_plain",
            "custom",
        ):
            assert max(v2[step].values()) < 1e-5, step


@patch.dict(os.environ)  # vLLM's runner sets variables when it is imported
def test_v1_scores_a_long_prompt_in_parts_with_the_same_result(monkeypatch):
    """vLLM's own method; two prompts, one of which takes three steps, in parts of three tokens and as a whole."""
    import torch
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from trl_multinode.vllm_worker import logprobs

    torch.manual_seed(0)
    prompts = {"a": torch.randint(0, 40, (17,)).tolist(), "b": torch.randint(0, 40, (5,)).tolist()}
    hidden = {name: torch.randn(len(ids), 40) for name, ids in prompts.items()}
    steps = [{"a": 7}, {"a": 8, "b": 5}, {"a": 2}]

    def scored(at_once: int) -> tuple[dict, int]:
        monkeypatch.setattr(logprobs, "SCORED_AT_ONCE", at_once)
        sizes, found = [], {}

        def compute_logits(states):
            sizes.append(len(states))
            return states

        state = {
            name: SimpleNamespace(
                prompt_token_ids=ids, num_computed_tokens=0, in_progress_prompt_logprobs_cpu=None,
                sampling_params=SimpleNamespace(temperature=0.5),
            )
            for name, ids in prompts.items()
        }  # fmt: skip
        runner = SimpleNamespace(
            num_prompt_logprobs={"a": 0, "b": 0}, requests=state, sampler=Sampler(), device=torch.device("cpu"),
            model=SimpleNamespace(compute_logits=compute_logits),
            model_config=SimpleNamespace(logprobs_mode="processed_logprobs"), _sync_device=lambda: None,
        )  # fmt: skip
        runner._get_prompt_logprobs_dict = partial(GPUModelRunner._get_prompt_logprobs_dict, runner)
        logprobs.score_at_temperature_v1(runner)
        for step in steps:
            names, starts = list(step), np.cumsum([0, *step.values()])
            runner.input_batch = SimpleNamespace(
                req_id_to_index={n: i for i, n in enumerate(names)}
            )
            runner.query_start_loc = SimpleNamespace(np=starts)
            batch = torch.cat(
                [hidden[name][state[name].num_computed_tokens :][: step[name]] for name in names]
            )
            found |= runner._get_prompt_logprobs_dict(batch, step)
            for name in names:
                state[name].num_computed_tokens += step[name]
        assert runner.num_prompt_logprobs == {}
        return {name: scores.logprobs[:, 0] for name, scores in found.items()}, max(sizes)

    whole, largest = scored(1 << 20)
    parts, most = scored(3)
    assert (largest, most) == (8, 3)
    for name, ids in prompts.items():
        exact = (hidden[name][:-1] / 0.5).log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
        assert torch.equal(whole[name], parts[name])
        torch.testing.assert_close(parts[name], exact[:, 0])


def test_v1_undoes_the_masks_of_custom_processors_and_keeps_their_finite_changes():
    """vLLM's own V1 sampler; the request has no setting that masks tokens."""
    import torch
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker import gpu_model_runner

    from trl_multinode.vllm_worker.logprobs import extend_logprobs

    class Custom:
        def is_argmax_invariant(self):
            return False

        def apply(self, logits):
            logits[:, 10:] = -torch.inf
            logits[:, :5] += 1.0
            return logits

    def sampled(custom: list) -> torch.Tensor:
        processors = LogitsProcessors(custom)
        one, none = torch.ones(1), torch.zeros(1)
        metadata = SamplingMetadata(
            temperature=0.5 * one, all_greedy=False, all_random=True, top_p=None, top_k=None, generators={},
            max_num_logprobs=0, no_penalties=True, prompt_token_ids=None, frequency_penalties=none,
            presence_penalties=none, repetition_penalties=one, output_token_ids=[[]], allowed_token_ids_mask=None,
            bad_words_token_ids={}, logitsprocs=processors,
        )  # fmt: skip
        config, sampler = (
            SimpleNamespace(use_v2_model_runner=False, speculative_config=None),
            Sampler(),
        )
        sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = "processed_logprobs"
        settings = SimpleNamespace(sampling_params=SimpleNamespace(**dict.fromkeys(TRUNCATING)))
        model_runner = SimpleNamespace(
            sampler=sampler, requests={"a": settings}, _get_prompt_logprobs_dict=None,
            input_batch=SimpleNamespace(req_ids=["a"], logitsprocs=processors),
        )  # fmt: skip
        assert extend_logprobs(config, model_runner) == ""
        return sampler(logits.clone(), metadata).logprobs_tensors

    mask_grammar = gpu_model_runner.apply_grammar_bitmask
    logits = torch.randn(1, 40)
    biased = logits + (torch.arange(40) < 5)
    try:
        for custom, expected in ([], logits), ([Custom()], biased):
            found = sampled(custom)
            token = found.logprob_token_ids[0, 0]
            whole = (expected / 0.5).log_softmax(-1)[0, token]
            assert torch.allclose(found.logprobs[0, 0], whole, atol=1e-5), custom
    finally:
        gpu_model_runner.apply_grammar_bitmask = mask_grammar


def runner(**changes) -> tuple[SimpleNamespace, SimpleNamespace]:
    """vLLM's config and a model runner with as little as the extensions of V2 need before they fail."""
    config = SimpleNamespace(
        use_v2_model_runner=True, speculative_config=changes.get("speculative_config")
    )
    sampler = SimpleNamespace(sampling_states=SimpleNamespace(temperature=None))
    scorer = SimpleNamespace(compute_prompt_logprobs=None)
    return config, SimpleNamespace(
        sampler=changes.get("sampler", sampler),
        prompt_logprobs_worker=scorer,
        structured_outputs_worker=None,
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
