"""A trainer that computes completions from prompts: the rollouts do not depend on how rows are spread or batched."""

import hashlib
from typing import Any

import numpy as np

from trl_multinode.trainer import MultiNodeGRPOTrainer


def seeded(*parts: object) -> np.random.Generator:
    """Return a random generator that depends on `parts` alone."""
    return np.random.default_rng(
        int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")
    )


def log_normal_length(
    prompt: list[int], generation: int, median: float = 120.0, longest: int = 768
) -> int:
    """Return a length. The prompt sets half of its spread, so that lengths in a group correlate as in real models."""
    spread = (
        0.6 * seeded("group", *prompt).normal() + 0.6 * seeded("row", *prompt, generation).normal()
    )
    return int(np.clip(median * np.exp(spread), 4, longest))


class ReplayTrainer(MultiNodeGRPOTrainer):
    """[`MultiNodeGRPOTrainer`] without an engine. Sampling log-probs are those of a uniform model plus some noise."""

    length_of = staticmethod(log_normal_length)
    vocabulary = 258

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: list | None,
        multimodal_fields: dict[str, Any],
        num_generations: int,
        **_: Any,
    ) -> tuple[list[list[int]], list[list[float]]]:
        completions, logprobs = [], []
        first = self.accelerator.process_index * len(prompt_ids)
        for row, prompt in enumerate(prompt_ids, start=first):
            random = seeded("tokens", *prompt, row % num_generations)
            ids = random.integers(2, self.vocabulary, self.length_of(prompt, row % num_generations))
            completions.append([*ids[:-1].tolist(), self._tokenizer.eos_token_id])
            logprobs.append((random.normal(0, 0.02, len(ids)) - np.log(self.vocabulary)).tolist())
        return completions, logprobs
