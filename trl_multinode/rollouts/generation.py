"""`NodeGeneration`: the object that TRL's trainers call for `sync_weights()` and `generate()`, on this node's engines.

TRL's `GRPOTrainer` builds one `VLLMGeneration` with 25 keywords and afterwards calls only these two methods. This
class takes its place; a contract test pins the keywords and the shape of what is returned.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from typing import Any

from ..engine.node_engines import NodeEngines, PromptRequest, Rollout
from ..engine.protocol import WeightVersion
from ..errors import ConfigurationError, PromptTooLongError
from ..weights.sync import SyncTimings, check_version
from .look_ahead import LookAhead, Rollouts
from .rows import FloatRow, RowSeeds, TokenRow, raw_image

Prompts = list[list[int]]  # token ids, a row per completion wanted


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
        self._weights_changed = True  # since the last sync that went well
        self.seeds = RowSeeds(host.rollout_seed, accelerator.process_index)
        self._host = host
        self._phases = host.phases
        self.engines: NodeEngines = host.start_engines(model, processing_class, engine_keywords)
        self.last_sync = SyncTimings()
        self.look_ahead = LookAhead(f"Rank {accelerator.process_index}")
        self._returns_logprobs = logprobs is not None
        self.rows: list[Rollout] = []  # of the last call
        self.used = Rollouts(0, [], [], self.version)  # first turn of the present round
        self.on_stale: Callable[[Rollouts], None] = lambda made: None  # called before the engines get busy again
        self.begin_round("train", 0)

    def begin_round(self, mode: str, number: int, following: Callable[[], Prompts | None] | None = None) -> None:
        """A new batch of prompts; every rank calls it, with the same `mode` and `number`.

        Args:
            mode (`str`):
                `"train"` or `"eval"`.
            number (`int`):
                Of the round, counted by the mode.
            following (`Callable`, *optional*):
                Asked in the first `generate` of the round for the prompts of the next one, which are then generated
                ahead; `None`, or an answer of `None`: nothing runs ahead.
        """
        self.seeds.begin_round(mode, number)
        self._number = number
        self._following = following
        self._takes_ahead = mode == "train"
        self.generated = False  # in this round; trainers that mix in other data may not

    @property
    def lag(self) -> tuple[int, int]:
        """How old the present round's completions are: generation rounds, optimizer steps."""
        version = self.used.version
        return int(version != self.version), self._host.step() - version.step

    @property
    def must_sync(self) -> bool:
        """Whether the engines have no weights yet, or others than the trainer for another reason than a step."""
        return self._weights_changed

    def weights_changed(self) -> None:
        """The weights, frozen ones too, became others without an optimizer step; all training ranks call it, before a
        sync."""
        self._weights_changed = True
        self._host.send_everything()

    def sync_weights(self) -> None:
        """Bring the trainer's weights into this node's engines: a collective of all training ranks, unless the engines
        have the weights of this optimizer step already.

        Raises:
            `WeightVersionError`, `WeightSyncError`: see [`WeightSync.run`].
        """
        if self.version.step == self._host.step() and not self._weights_changed:
            return
        self._weights_changed = True  # until it went well
        with self._phases("generate"):
            self.look_ahead.wait()  # before the barrier: an engine takes no weights while it generates
        with self._phases("wait"):
            self.accelerator.wait_for_everyone()  # nobody generates any more, and nobody gathers ahead of the others
        with self._phases("sync"):
            self.version = WeightVersion(self.version.update + 1, self._host.step())
            self.last_sync = self._host.sync(self.version)
        self._weights_changed = False

    def generate(
        self,
        prompts: Prompts,
        images: list[list | None] | None,
        num_generations: int,
        profiler=None,
    ) -> tuple[list, list, list | None, list | None]:
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
            of shape `(B, T, 1)`, or `None` if built with `logprobs=None`, as by trainers that do not read them.

        Raises:
            `PromptTooLongError`: naming the row.
            `WeightVersionError`: if a row was made with other weights than the last sync's.
            `EngineError`: if the engine failed or stalled.
        """
        self._check_lengths(prompts)
        self.generated = True
        with self._phases("generate"), profiler or nullcontext():
            rows = self._first_turn(prompts, images) if self._takes_ahead else self._fresh(prompts, images)
        self.rows = rows
        completion_ids = [row.tokens.tolist() for row in rows]
        if not self._returns_logprobs:
            return prompts, completion_ids, None, None
        return (
            prompts,
            completion_ids,
            [FloatRow(row.logprobs) for row in rows],
            [TokenRow(row.tokens) for row in rows],
        )

    def _first_turn(self, prompts: Prompts, images) -> list[Rollout]:
        """This round's completions, made ahead if they were; then the next round's begin."""
        self._takes_ahead = False
        made = self.look_ahead.take(self._number, prompts)
        if made is None or images is not None:
            made = Rollouts(self._number, prompts, self._fresh(prompts, images), self.version)
        else:
            self.seeds.of_call(len(prompts))  # counts as the round's first call
            if made.version != self.version:  # not if two rounds train one optimizer step
                self.on_stale(made)
        self.used = made
        if self._following is not None and (following := self._following()) is not None:
            self._submit(self._number + 1, following)
        return made.rows

    def _submit(self, number: int, prompts: Prompts) -> None:
        if max(map(len, prompts)) >= self.engines.max_model_len:
            return  # the round itself will say so, with the row
        requests = self._requests(prompts, None, self.seeds.of_round("train", number, len(prompts)))
        self.look_ahead.submit(
            number, prompts, self.version, partial(self._ask, self._host.ahead_engines, requests, self.version)
        )

    def _fresh(self, prompts: Prompts, images) -> list[Rollout]:
        requests = self._requests(prompts, images, self.seeds.of_call(len(prompts)))
        return self._ask(self.engines, requests, self.version)

    def _ask(self, engines: NodeEngines, requests: list[PromptRequest], version: WeightVersion) -> list[Rollout]:
        """Completions of exactly these weights, in the order of the rows; also called by the look-ahead's thread."""
        groups = engines.generate(requests, self.max_tokens, self.sampling, version.update)
        rows = [row for group in groups for row in group]
        for row in rows:
            check_version(row.version, version, engines.connections[row.engine].name)
        return rows

    @staticmethod
    def _requests(prompts: Prompts, images: list[list | None] | None, seed: int | None) -> list[PromptRequest]:
        """One request per run of equal rows. Never a stride: a group may straddle ranks and nodes."""
        rows = list(zip(prompts, images or [None] * len(prompts), strict=True))
        requests, start = [], 0
        for (prompt, pictures), run in groupby(rows):
            count = len(list(run))
            first = None if seed is None else seed + start
            requests.append(PromptRequest(prompt, count, first, tuple(map(raw_image, pictures or ()))))
            start += count
        return requests

    def _check_lengths(self, prompts: Prompts) -> None:
        limit = self.engines.max_model_len
        for row, prompt in enumerate(prompts):
            if len(prompt) >= limit:
                raise PromptTooLongError(
                    f"Row {row} of rank {self.accelerator.process_index}: its prompt has {len(prompt)} tokens, the "
                    f"engine's context is {limit} and must hold at least one more. Filter long prompts out of the "
                    "dataset, or raise `vllm_max_model_length`."
                )
