"""`NodeGeneration`: the object that TRL's trainers call for `sync_weights()` and `generate()`, on this node's engines.

TRL's `GRPOTrainer` builds one `VLLMGeneration` with 25 keywords and afterwards calls only these two methods. This
class takes its place; a contract test pins the keywords and the shape of what is returned.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import numpy as np

from .config import REFUSED_GENERATION_KEYS
from .engine import NodeEngines, PromptRequest, Rollout
from .errors import ConfigurationError, PromptTooLongError
from .protocol import Image, WeightVersion
from .weight_sync import SyncTimings, check_version


class FloatRow(Sequence):
    """Log-probs of one completion: behaves like `list[list[float | None]]` of shape `(T, 1)` over a float32 array.

    Real nested lists cost 0.48 s per million tokens. NaN reads as `None`, as in TRL.
    """

    def __init__(self, values: np.ndarray):
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return FloatRow(self.values[index])
        return [_none_if_nan(float(self.values[index]))]

    def __iter__(self) -> Iterator:
        return ([_none_if_nan(value)] for value in self.values.tolist())

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented


def _none_if_nan(value: float) -> float | None:
    return None if value != value else value


class TokenRow(FloatRow):
    """Token ids of one completion, shape `(T, 1)`, in the same manner."""

    def __getitem__(self, index):
        return TokenRow(self.values[index]) if isinstance(index, slice) else [int(self.values[index])]


class NodeGeneration:
    """Generation on the engines of this rank's node. Built on every training rank.

    Args:
        host ([`~trl_multinode.host.NodeHost`]):
            Starts and owns the engines, moves the weights; see there.
        **keywords:
            What TRL passes to its `VLLMGeneration`.

    Raises:
        `ConfigurationError`: for settings that node mode cannot serve.
    """

    def __init__(
        self,
        *,
        host,
        model,
        accelerator,
        processing_class,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float | None = 0.0,
        max_completion_length: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: dict | None = None,
        **engine_keywords: Any,
    ):
        if logprobs not in (0, None):
            raise ConfigurationError(f"Node mode returns the sampled token's log-prob only, got logprobs={logprobs}.")
        refused = set(generation_kwargs or {}) & set(REFUSED_GENERATION_KEYS)
        if refused:
            raise ConfigurationError(f"`generation_kwargs` may not contain {sorted(refused)} in node mode.")
        self.model = model
        self.accelerator = accelerator
        self.sampling = {
            "repetition_penalty": repetition_penalty,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": 0.0 if min_p is None else min_p,
            **(generation_kwargs or {}),
        }
        self.max_tokens = self.sampling.pop("max_tokens", max_completion_length)
        if structured_outputs_regex is not None:
            self.sampling["structured_outputs"] = {"regex": structured_outputs_regex}
        self.version = WeightVersion()
        self.seeds = RowSeeds(host.rollout_seed, accelerator.process_index)
        self._host = host
        self._phases = host.phases
        self.engines: NodeEngines = host.start_engines(model, processing_class, engine_keywords)
        self.last_sync = SyncTimings()

    def sync_weights(self) -> None:
        """Bring the trainer's weights into this node's engines. A collective of all training ranks.

        Raises:
            `WeightVersionError`, `WeightSyncError`: see [`WeightSync.run`].
        """
        with self._phases("wait"):
            self.accelerator.wait_for_everyone()  # nobody generates any more, and nobody gathers ahead of the others
        with self._phases("sync"):
            self.version = WeightVersion(self.version.update + 1, self._host.step())
            self.last_sync = self._host.sync(self.version)

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list | None] | None,
        num_generations: int,
        profiler=None,
    ) -> tuple[list, list, list, list]:
        """Completions of this rank's prompts from its node's engines. Not a collective.

        Args:
            prompts (`list[list[int]]`):
                Token ids, a row per completion wanted.
            images (`list[list | None]`, *optional*):
                PIL images per row.
            num_generations (`int`):
                Not needed: equal consecutive rows become one request, wherever a group begins.
            profiler (*optional*):
                TRL's timing context.

        Returns:
            `(prompt_ids, completion_ids, logprobs, logprob_token_ids)`, rows in the order of `prompts`; the last two
            of shape `(B, T, 1)`.

        Raises:
            `PromptTooLongError`: naming the row.
            `WeightVersionError`: if a row was made with other weights than the last sync's.
            `EngineError`: if the engine failed or stalled.
        """
        self._check_lengths(prompts)
        requests = self._requests(prompts, images)
        with self._phases("generate"), profiler or nullcontext():
            groups = self.engines.generate(requests, self.max_tokens, self.sampling, self.version.update)
        rows = [row for group in groups for row in group]
        self._check_versions(rows)
        return (
            prompts,
            [row.tokens.tolist() for row in rows],
            [FloatRow(row.logprobs) for row in rows],
            [TokenRow(row.tokens) for row in rows],
        )

    def _requests(self, prompts: list[list[int]], images: list[list | None] | None) -> list[PromptRequest]:
        """One request per run of equal rows. Never a stride: a group may straddle ranks and nodes."""
        seeds = self.seeds.of_call(len(prompts))
        rows = list(zip(prompts, images or [None] * len(prompts), strict=True))
        requests, start = [], 0
        for (prompt, pictures), run in groupby(rows):
            count = len(list(run))
            seed = None if seeds is None else seeds + start
            requests.append(PromptRequest(prompt, count, seed, tuple(map(_raw_image, pictures or ()))))
            start += count
        return requests

    def _check_lengths(self, prompts: list[list[int]]) -> None:
        limit = self.engines.max_model_len
        for row, prompt in enumerate(prompts):
            if len(prompt) >= limit:
                raise PromptTooLongError(
                    f"Row {row} of rank {self.accelerator.process_index}: its prompt has {len(prompt)} tokens, the "
                    f"engine's context is {limit} and must hold at least one more. Filter long prompts out of the "
                    "dataset, or raise `vllm_max_model_length`."
                )

    def _check_versions(self, rows: list[Rollout]) -> None:
        for row in rows:
            if row.version.update != self.version.update:
                check_version(row.version, self.version, self.engines.connections[row.engine].name)


class RowSeeds:
    """Seeds that depend on the row, not on where it is generated.

    seed(row) = hash(seed, mode, round, call of this rank in the round) + global row: affine in the row, because vLLM
    gives completion i of a request seed + i.

    Args:
        seed (`int`, *optional*):
            `rollout_seed`; `None` leaves the engines to their own random streams.
        rank (`int`):
            Its rows come after those of the lower ranks.
    """

    def __init__(self, seed: int | None, rank: int):
        self._seed = seed
        self._rank = rank
        self.begin_round("train", 0)

    def begin_round(self, mode: str, number: int) -> None:
        """A new batch of prompts; every rank calls it with the same arguments."""
        self._round = (mode, number)
        self._call = 0
        self._rows_per_rank: int | None = None

    def of_call(self, num_rows: int) -> int | None:
        """Seed of this rank's first row in the next `generate` call."""
        if self._seed is None:
            return None
        if self._rows_per_rank is None:
            self._rows_per_rank = num_rows  # later calls of a tool loop have fewer rows; keep the ranks apart
        text = f"{self._seed}/{self._round}/{self._call}".encode()
        self._call += 1
        base = int.from_bytes(hashlib.blake2b(text, digest_size=5).digest(), "little")
        return base + self._rank * self._rows_per_rank


def _raw_image(picture) -> Image:
    return Image(data=picture.tobytes(), mode=picture.mode, size=picture.size)
