"""Hooks into the model runner V2, which needs a GPU: here stand-ins call them as vLLM's own classes do.

The hooks of V1 run in `test_conformance.py`, in vLLM itself.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.engine

CHUNK = 3


class PromptScorer:
    """Part of vLLM's `PromptLogprobsWorker` that computes logits, in chunks of a step's tokens."""

    def compute_prompt_logprobs(self, logits_fn, hidden_states, batch, all_token_ids, num_computed, prompt_lens):
        states = hidden_states[: batch.num_tokens].split(CHUNK)
        return torch.cat([logits_fn(chunk) for chunk in states])


@pytest.fixture
def runner():
    temperature = SimpleNamespace(np=np.array([0.0, 2.0, 0.5, 1.0], dtype=np.float32))
    sampler = SimpleNamespace(sampling_states=SimpleNamespace(temperature=temperature))
    return SimpleNamespace(sampler=sampler, prompt_logprobs_worker=PromptScorer())


def test_v2_scores_each_prompt_of_a_step_at_its_own_temperature(runner):
    from trl_multinode.vllm_worker.logprobs import score_at_temperature_v2

    score_at_temperature_v2(runner)
    batch = SimpleNamespace(idx_mapping_np=np.array([2, 0, 1]), num_scheduled_tokens=np.array([4, 1, 2]), num_tokens=7)
    hidden = torch.arange(8.0)[:, None].expand(8, 5)  # the last row is padding
    got = runner.prompt_logprobs_worker.compute_prompt_logprobs(lambda rows: rows.bfloat16(), hidden, batch, 0, 0, 0)
    assert got.dtype == torch.float32
    assert torch.equal(got[:, 0], torch.tensor([0.0, 2.0, 4.0, 6.0, 4.0, 2.5, 3.0]))
