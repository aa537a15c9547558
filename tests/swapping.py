"""Updates sent while an engine generates, and what transformers gives for rows that hold several versions."""

import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from trl_multinode.engine.client import Rollout
from trl_multinode.engine.dispatch import PromptRequest
from trl_multinode.testing.engines import SyncDriver, worst_difference

LIMIT = 1e-5  # mean difference of log-probs in fp32
NUM_TOKENS = (240, 900)  # of a row; the second number after a try in which no row saw an update


@dataclass
class MixedRows:
    """Rows that were running while updates were sent."""

    prompts: list[list[int]]
    rows: list[Rollout]
    models: dict[int, torch.nn.Module] = field(default_factory=dict)  # the trainer's model at each update

    @property
    def mixed_share(self) -> float:
        return sum(len(row.versions) > 1 for row in self.rows) / len(self.rows)

    def difference(self, recomputed: bool) -> float:
        """Mean |engine - transformers| over all tokens, each under the weights of its span."""
        found = [
            (self.expected(prompt, row, recomputed) - torch.from_numpy(row.logprobs.copy())).abs()
            for prompt, row in zip(self.prompts, self.rows, strict=True)
        ]
        return torch.cat(found).mean().item()

    @torch.no_grad()
    def expected(self, prompt: list[int], row: Rollout, recomputed: bool) -> torch.Tensor:
        """Log-probs of transformers: of each span's own weights, or, if the keys and values were not computed again,
        of weights that continue the `past_key_values` of those before them."""
        ids, cache, start, parts = torch.tensor([[*prompt, *row.tokens.tolist()]]), None, 0, []
        for span in row.versions:
            known = 0 if cache is None else cache.get_seq_length()
            end = len(prompt) + span.end - 1  # the last token of a span is sampled, and not yet fed
            output = self.models[span.update](ids[:, known:end], past_key_values=cache, use_cache=True)
            cache = None if recomputed else output.past_key_values
            parts.append(output.logits[0, len(prompt) + start - 1 - known :])
            start = span.end
        scores = torch.cat(parts).log_softmax(-1)
        return scores.gather(1, ids[0, len(prompt) :, None])[:, 0]


def generate_while_sending(
    trainer: SyncDriver, recompute_kv: bool, seeded: bool = False, change: Callable[[], None] | None = None
) -> MixedRows:
    """Send three updates in flight, each with changed weights, while eight rows run: one request per row.

    The models are made before, because a busy machine would let the rows end meanwhile. Try again if it lets them end
    before the first update, or begin after the last one.
    """
    models = [copy.deepcopy(trainer.model)]
    for _ in range(3):  # more perturbations would make logits, and their rounding errors, large
        (change or trainer.perturb)()
        models.append(copy.deepcopy(trainer.model))
    trainer.sync.in_flight, trainer.sync.recompute_kv = True, recompute_kv
    try:
        for num_tokens, held in zip(NUM_TOKENS, (models[0], models[-1]), strict=True):
            found = _generate(trainer, seeded, num_tokens, held, models[1:])
            if found.mixed_share > 0.3:
                break
        return found
    finally:
        trainer.sync.in_flight = trainer.sync.recompute_kv = False


def _generate(
    trainer: SyncDriver, seeded: bool, num_tokens: int, held: torch.nn.Module, models: list[torch.nn.Module]
) -> MixedRows:
    """Send `models` while rows run, to an engine that holds `held`."""
    prompts = [[5, 6, 7 + row] for row in range(8)]
    requests = [PromptRequest(prompt, 1, 7 * i if seeded else None) for i, prompt in enumerate(prompts)]
    sampling = {"temperature": 1.0, "ignore_eos": True} | slowed(trainer, 5e-4)
    sent = {trainer.version.update: held}
    other = trainer.engines.connect_again()
    try:
        with ThreadPoolExecutor(1) as thread:
            rows = thread.submit(other.generate, requests, num_tokens, sampling, trainer.version.update)
            try:
                for model in models:
                    trainer.model.load_state_dict(model.state_dict())
                    sent[trainer.send().update] = model
                    time.sleep(0.03)
            finally:
                groups = rows.result()
        return MixedRows(prompts, [row for (row,) in groups], sent)
    finally:
        other.close()


def slowed(trainer: SyncDriver, seconds: float) -> dict:
    """Settings with which vLLM sleeps for so long at each token of a row. Without them a row of the tiny model can end
    on a busy machine before the engine's front end has read the next message. The engine needs `SlowTokens`."""
    is_fake = trainer.engines[0].ready.vllm_version == "fake"
    return {} if is_fake else {"extra_args": {"seconds_a_token": seconds}}


def differences_with_a_cached_prefix(trainer: SyncDriver, change: Callable[[], None]) -> tuple[float, float]:
    """Difference to transformers of a row whose prompt the engine has cached: with the weights that cached it, and
    after an update in flight, which leaves the cache of running rows as it is."""
    prompt, sampling = [5 + i % 290 for i in range(200)], {"temperature": 1.0}

    def difference() -> float:
        for seed in (1, 2):  # the second row has the prefix of the first
            groups = trainer.engines.generate([PromptRequest(prompt, 1, seed)], 8, sampling, trainer.version.update)
        return worst_difference(trainer, groups, [prompt])

    before = difference()
    change()
    trainer.sync.in_flight = True
    try:
        trainer.send()
    finally:
        trainer.sync.in_flight = False
    return before, difference()
