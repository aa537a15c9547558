"""vLLM's own V2 sampler and prompt scorer with our extensions, on a CPU. Prints JSON for `test_logprob_hooks.py`."""

import json
from types import SimpleNamespace

import numpy as np
import torch
import triton_on_cpu  # noqa: F401  (changes vLLM)
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from trl_multinode.vllm_worker.logprobs import extend_logprobs

VOCABULARY, PROMPT, EOS, BAD = 300, [5, 6, 7], 1, 9
CPU = torch.device("cpu")
ROWS = {
    "plain": {},
    "temperature": {"temperature": 2.0},
    "top_p": {"temperature": 0.7, "top_p": 0.5},
    "top_k": {"top_k": 1},
    "min_p": {
        "temperature": 1.3,
        "min_p": 0.5,
        "logit_bias": {5: 2.0, 20: 1.0},
        "repetition_penalty": 1.3,
    },
    "allowed_token_ids": {
        "allowed_token_ids": [3, 4, 5],
        "logit_bias": {3: 1.0, 50: 3.0},
        "repetition_penalty": 1.5,
    },
    "min_tokens": {
        "temperature": 0.7,
        "min_tokens": 4,
        "stop_token_ids": [EOS],
        "logit_bias": {EOS: 7.0},
    },
    "bad_words": {"bad_words": ["?"], "presence_penalty": 1.0, "logit_bias": {BAD: 7.0}},
    "regex": {"structured_outputs": StructuredOutputsParams(regex="?")},
    "structured_outputs": {
        "temperature": 0.5,
        "structured_outputs": StructuredOutputsParams(regex="?"),
    },
}


class Grammar:
    """Stand-in for vLLM's `StructuredOutputsWorker`, which needs streams of a GPU: allows 40 tokens of some rows."""

    def apply_grammar_bitmask(self, logits, batch, rows, allowed):
        mask = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, allowed, False)
        logits[rows] = logits[rows].masked_fill(mask, -torch.inf)


class EvenTokensOnly:
    """A user's logits processor: it masks odd tokens of every request."""

    def add_request(self, slot, params):
        return True

    def apply_staged_writes(self): ...

    def apply(self, logits, context):
        logits[:, 1::2] = -torch.inf
        return logits


def build_runner(*custom: EvenTokensOnly) -> SimpleNamespace:
    """What of vLLM's V2 model runner samples and scores prompts."""
    config = SimpleNamespace(
        reasoning_config=None, speculative_config=None, use_v2_model_runner=True
    )
    states = RequestState(16, 64, 64, 0, VOCABULARY, CPU)
    sampler = Sampler(config, 16, VOCABULARY, CPU, states, logprobs_mode="processed_logprobs",
                      custom_logits_processors=custom)  # fmt: skip
    scorer = PromptLogprobsWorker(16, CPU, logprobs_mode="processed_logprobs")
    return SimpleNamespace(
        vllm_config=config, states=states, sampler=sampler, prompt_logprobs_worker=scorer,
        structured_outputs_worker=Grammar(),
    )  # fmt: skip


def add_requests(runner: SimpleNamespace, names: list[str]) -> SimpleNamespace:
    """Begin a request for each name, and return the batch of a step in which all of them sample."""
    for number, name in enumerate(names):
        params = SamplingParams(seed=number, logprobs=0, prompt_logprobs=0, **ROWS[name])
        params._bad_words_token_ids = [[BAD]] if params.bad_words else None
        runner.states.add_request(name, len(PROMPT), PROMPT, 0, 20)
        runner.sampler.add_request(runner.states.req_id_to_index[name], params)
        runner.prompt_logprobs_worker.add_request(name, runner.states.req_id_to_index[name], params)
    runner.states.apply_staged_writes()
    runner.sampler.apply_staged_writes()
    slots = np.array([runner.states.req_id_to_index[name] for name in names], dtype=np.int32)
    rows, count, length = torch.from_numpy(slots), len(names), len(PROMPT)
    ends = torch.arange(count + 1, dtype=torch.int32)
    return SimpleNamespace(
        req_ids=names, num_reqs=count, num_tokens=count * length, num_scheduled_tokens=np.full(count, length),
        idx_mapping=rows, expanded_idx_mapping=rows, idx_mapping_np=slots, logits_indices=torch.arange(count),
        cu_num_logits=ends, cu_num_logits_np=ends.numpy(), expanded_local_pos=torch.zeros(count, dtype=torch.int32),
        positions=torch.full((count,), length - 1), input_ids=torch.full((count,), PROMPT[-1], dtype=torch.int32),
        seq_lens=torch.full((count,), length, dtype=torch.int32), query_start_loc=ends * length,
        seq_lens_cpu_upper_bound=torch.full((count,), length), query_start_loc_np=(ends * length).numpy(),
        num_computed_prefill_tokens_np=np.zeros(count, dtype=np.int32), prefill_len_np=np.full(count, length),
    )  # fmt: skip


def closed_form(logits: torch.Tensor, settings: dict) -> torch.Tensor:
    """Log-probs after `logit_bias`, penalties and temperature."""
    logits = logits.float().clone()
    for token, bias in settings.get("logit_bias", {}).items():
        logits[token] += bias
    penalty = settings.get("repetition_penalty", 1.0)
    logits[PROMPT] = torch.where(
        logits[PROMPT] > 0, logits[PROMPT] / penalty, logits[PROMPT] * penalty
    )
    return (logits / settings.get("temperature", 1.0)).log_softmax(-1)


def sampled(runner: SimpleNamespace, names: list[str]) -> dict[str, float]:
    """Sample a token of each request; return |log-prob - closed form| by name."""
    batch = add_requests(runner, names)
    raw = torch.randn(len(names), VOCABULARY) * 2
    logits = raw.clone()
    if masked := [row for row, name in enumerate(names) if "structured_outputs" in ROWS[name]]:
        runner.structured_outputs_worker.apply_grammar_bitmask(
            logits, batch, masked, torch.arange(100, 140)
        )
    output = runner.sampler(logits, batch)
    found = {}
    for row, name in enumerate(names):
        token = output.sampled_token_ids[row, 0]
        expected = closed_form(raw[row], ROWS[name])[token]
        found[name] = (output.logprobs_tensors.logprobs[row, 0] - expected).abs().item()
        runner.states.remove_request(name)
    return found


def scored(runner: SimpleNamespace, names: list[str]) -> dict[str, float]:
    """Score the prompt of each request; return |log-probs - those at its temperature| by name."""
    batch = add_requests(runner, names)
    # the last 3 are padding
    hidden, head = (
        torch.randn(batch.num_tokens + 3, 16),
        torch.randn(16, VOCABULARY),
    )
    states = runner.states
    rows = runner.prompt_logprobs_worker.compute_prompt_logprobs(
        lambda chunk: chunk @ head, hidden, batch, states.all_token_ids.gpu, states.num_computed_tokens.gpu,
        states.prompt_len.np,
    )  # fmt: skip
    found = {}
    for number, name in enumerate(names):
        start = number * len(PROMPT)
        logits = hidden[start : start + len(PROMPT) - 1] @ head
        expected = (logits / ROWS[name].get("temperature", 1.0)).log_softmax(-1)
        expected = expected.gather(1, torch.tensor(PROMPT[1:])[:, None])
        found[name] = (rows[name].logprobs - expected).abs().max().item()
        states.remove_request(name)
    return found


torch.manual_seed(0)
scores = ["plain", "temperature", "structured_outputs"]
before, after = build_runner(), build_runner()
reason = extend_logprobs(after.vllm_config, after)
custom = build_runner(EvenTokensOnly())
extend_logprobs(custom.vllm_config, custom)
result = {
    "reason": reason,
    "before": sampled(before, list(ROWS))
    | {f"score {name}": x for name, x in scored(before, scores).items()},
    "after": sampled(after, list(ROWS))
    | {f"score {name}": x for name, x in scored(after, scores).items()},
    # vLLM's sampler then returns the logits that it was given
    "only_grammar": sampled(after, ["regex"]),
    "only_plain": sampled(after, ["plain", "temperature"]),
    "custom": sampled(custom, ["plain", "temperature"]),
}
print(json.dumps(result))
