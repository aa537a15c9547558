"""Updates sent while an engine generates, and what transformers gives for rows that hold several versions."""

import copy
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from trl_multinode.engine.client import Rollout
from trl_multinode.engine.dispatch import PromptRequest
from trl_multinode.testing.engines import SyncDriver

LIMIT = 1e-5  # mean difference of log-probs in fp32


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
    trainer: SyncDriver, prompts: Sequence[list[int]], num_tokens: int, recompute_kv: bool, seeded: bool = False
) -> MixedRows:
    """Send up to three updates in flight, each with changed weights, while all rows run: one request per row."""
    models = {trainer.version.update: copy.deepcopy(trainer.model)}
    requests = [PromptRequest(prompt, 1, 7 * i if seeded else None) for i, prompt in enumerate(prompts)]
    sampling = {"temperature": 1.0, "ignore_eos": True}
    other = trainer.engines.connect_again()
    trainer.sync.in_flight, trainer.sync.recompute_kv = True, recompute_kv
    try:
        with ThreadPoolExecutor(1) as thread:
            rows = thread.submit(other.generate, requests, num_tokens, sampling, trainer.version.update)
            try:
                for _ in range(3):  # more perturbations would make logits, and their rounding errors, large
                    time.sleep(0.05)
                    if rows.done():
                        break
                    trainer.perturb()
                    models[trainer.version.update + 1] = copy.deepcopy(trainer.model)
                    trainer.send()
            finally:
                groups = rows.result()
        return MixedRows(list(prompts), [row for (row,) in groups], models)
    finally:
        trainer.sync.in_flight = trainer.sync.recompute_kv = False
        other.close()
