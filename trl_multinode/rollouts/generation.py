"""`NodeGeneration`: the object that TRL's trainers call for `sync_weights()` and `generate()`, on this node's engines.

TRL's `GRPOTrainer` builds one `VLLMGeneration` with 25 keywords and afterwards calls only these two methods. This
class replaces it; a contract test pins the keywords and the shape of the return value.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

from torch import nn

from ..engine.client import Rollout
from ..engine.node_engines import NodeEngines
from ..engine.stream import Request
from ..errors import ConfigurationError
from ..weights.timings import SyncTimings
from ..wire.messages import WeightVersion
from .groups import Group
from .recorded import Recorded, Turn
from .recorded_groups import RecordedGroups
from .requests import Prompts, check_lengths, check_logprobs, merged, requests_of
from .rounds import BatchAhead, Rounds
from .rows import trls_rows
from .seeds import RowSeeds
from .stand_in import Ask
from .token_ages import TokenAges
from .upcoming import Batch

# Attributes of TRL's `VLLMGeneration` that it reads at every `generate`, and those that only its start reads
SAMPLING = (
    "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_completion_length", "generation_kwargs",
    "structured_outputs_regex",
)  # fmt: skip
OF_THE_START = (
    "mode", "tensor_parallel_size", "gpu_memory_utilization", "max_model_length", "max_num_seqs", "enable_sleep_mode",
    "model_impl", "trust_remote_code", "logprobs", "server_base_url", "server_host", "server_port", "group_port",
    "server_timeout", "processing_class",
)  # fmt: skip


class NodeGeneration:
    """Generation on the engines of this rank's node. Every training rank builds one.

    Args:
        host ([`~trl_multinode.host.NodeHost`]):
            Owner of the node's engines: it starts them and sends the weights.
        **keywords:
            Keywords that TRL passes to its `VLLMGeneration`.

    Raises:
        `ConfigurationError`: for settings that node mode cannot serve.
    """

    def __init__(
        self,
        *,
        host: Any,
        model: nn.Module,
        accelerator: Any,
        processing_class: Any,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float | None = 0.0,
        max_completion_length: int | None = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: dict | None = None,
        **engine_keywords: Any,
    ):
        if logprobs not in (0, None):
            raise ConfigurationError(
                f"Node mode returns the sampled token's log-prob only, got logprobs={logprobs}.",
                setting="logprobs",
                got=logprobs,
            )
        self.accelerator = accelerator
        # TRL's names: a callback may change them between two rounds
        self.repetition_penalty = repetition_penalty
        self.temperature = temperature
        self.top_p = top_p
        self.top_k = top_k
        self.min_p = min_p
        self.generation_kwargs = dict(generation_kwargs or {})
        self.structured_outputs_regex = structured_outputs_regex
        self.version = WeightVersion()
        self.must_sync = True  # for a reason other than an optimizer step, as before the first sync
        self.seeds = RowSeeds(host.settings.rollout_seed, accelerator.process_index)
        self._host = host
        self._phases = host.phases
        self.engines: NodeEngines = host.start_engines(model, processing_class, engine_keywords)
        max_tokens = self.generation_kwargs.pop("max_tokens", max_completion_length)
        # an engine ends a completion where its context ends, so this number limits nothing else
        self.max_completion_length: int = (
            self.engines.max_model_len if max_tokens is None else max_tokens
        )
        self.last_sync = SyncTimings()
        # one stream, which from then on is the only user of these connections
        self._stream = cache(
            lambda: host.updates.ahead_engines.open_stream(
                self.max_completion_length, self.sampling
            )
        )
        host.updates.on_lost = self._restore
        self.rounds: Rounds | None = None
        if host.settings.max_staleness:
            self.rounds = Rounds(self, host.settings, self._stream())
        self._returns_logprobs = logprobs is not None
        if self._returns_logprobs:
            check_logprobs(self.engines, self.sampling, str(host.topology))
        self.rows: list[Rollout] = []  # completions of the last `generate` call
        # called before the next round's requests are sent
        self.on_stale: Callable[[Turn], None] = lambda made: None
        self.on_generated: Callable[[], None] | None = None  # called at the end of every `generate`
        self.begin_round("train", 0)

    def __setattr__(self, name: str, value: Any) -> None:
        """Let a callback change what TRL's object would read at its next `generate`, and refuse what has no effect."""
        if self._is_fixed(name) and value != getattr(self, name):
            raise ConfigurationError(
                f"`vllm_generation.{name}` cannot change (got {value!r}) while rounds run ahead: rows that "
                "are open were sampled with the setting before.",
                setting=name,
                got=value,
                cure="Use `max_staleness=0`.",
            )
        if name in OF_THE_START:
            raise ConfigurationError(
                f"`vllm_generation.{name}` has no effect in node mode after the engines have started (got {value!r}).",
                setting=name,
                got=value,
                cure=f"{', '.join(SAMPLING)} can change; for anything else set the config and build the trainer anew.",
            )
        super().__setattr__(name, value)

    def _is_fixed(self, name: str) -> bool:
        """Return whether a sampling attribute cannot change now, because open rows have the setting before."""
        if name not in SAMPLING or vars(self).get("rounds") is None:
            return False
        # a round that is generated ahead may end with the old limit, which needs no correction
        return name != "max_completion_length" or self._host.settings.in_flight

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling settings of the next requests, by vLLM's names."""
        found = {
            "repetition_penalty": self.repetition_penalty,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0.0 if self.min_p is None else self.min_p,
            **self.generation_kwargs,
        }
        if self.structured_outputs_regex is not None:
            found["structured_outputs"] = {"regex": self.structured_outputs_regex}
        return found

    def record(self, make: Callable[[Group, Ask], Recorded]) -> None:
        """Let `make` produce the whole rollouts of a group in a thread of the group, from now on."""
        groups = partial(RecordedGroups, make, lambda: self.version.update)
        self.rounds = Rounds(self, self._host.settings, self._stream(), groups)

    def begin_round(self, mode: str, number: int) -> None:
        """Start the round of a new batch of prompts. Every rank calls it, with the same `mode` and `number`.

        Args:
            mode (`str`):
                `"train"` or `"eval"`.
            number (`int`):
                Number of the round, counted per mode.
        """
        self.seeds.begin_round(mode, number)
        self._number = number
        self._trains = mode == "train"
        self._takes_ahead = self._trains and self.rounds is not None
        self.generated = False  # in this round; trainers that mix in other data may not generate

    def take_groups(self, num_rows: int, group_size: int, batch_ahead: BatchAhead) -> Batch | None:
        """Take the groups that this round trains, and return their rows of the dataset. Only for rounds ahead.

        It returns `None` if the prompts of the batch are not known before TRL scores it, as those with images of a
        stream: `generate` then makes the completions.

        The first round of an epoch syncs first, which is a collective of all training ranks; a later sync of the same
        round does nothing.

        Args:
            num_rows (`int`):
                Rows that a round of this rank trains.
            group_size (`int`):
                Completions per prompt.
            batch_ahead (`Callable`):
                Function that returns the batch so many rounds ahead, and its prompts; `None` if none follows.
        """
        assert self.rounds is not None
        self.rounds.begin_round(self._number, num_rows // group_size, group_size, batch_ahead)
        if self.rounds.must_sync:
            self.sync_weights()
            self.rounds.begin_following(self.version)
        if not (self.rounds.groups.ids or self._host.settings.in_flight):
            return None
        with self._phases("generate"):
            while (rows := self.rounds.take()) is None:
                self._recover()
            return rows

    def take_seconds_ahead(self) -> tuple[float, float]:
        """Return the seconds of generating ahead since the last call, and those of them in which the rank waited."""
        return (0.0, 0.0) if self.rounds is None else self.rounds.groups.take_seconds()

    @property
    def ages(self) -> TokenAges:
        """Return the ages of the current round's tokens."""
        if self.rounds is not None:
            return self.rounds.ages(self.version)
        steps = self._host.step() - self.version.step
        return TokenAges(steps_mean=steps, steps_max=steps)

    @property
    def stale(self) -> bool:
        """Return whether older weights took part in this training round's completions, if only by their caches."""
        return self._trains and self.rounds is not None and self.rounds.stale(self.version)

    @property
    def used_version(self) -> WeightVersion:
        """The oldest weights that began one of the rows of the last `generate` call."""
        return min((row.version for row in self.rows), default=self.version)

    def weights_changed(self) -> None:
        """Make the next sync send all weights, frozen ones too, because they changed without an optimizer step. All
        training ranks call it, before a sync."""
        self.must_sync = True
        self._host.updates.send_everything()

    def sync_weights(self) -> None:
        """Send the trainer's weights to this node's engines, unless they already have those of this optimizer step.
        Sending is a collective of all training ranks.

        Raises:
            `WeightVersionError`, `WeightSyncError` or `EngineError`: see [`WeightSync.run`].
        """
        if self._engines_are_current:
            return
        if self.version.update:
            self._host.updates.wait_for_engines()
        self.must_sync = True  # until the sync has succeeded
        if not self._host.settings.in_flight:
            with self._phases("generate"):
                self.wait_for_open()  # before the barrier: an engine loads no weights while it generates
        self._host.updates.expect_after(self.version)
        # the barrier's limit is `ddp_timeout`, and completions may take longer
        while self._host.updates.meet(self._host.updates.engines_to_restore()):
            self._restore()
            if self._engines_are_current:
                return
        with self._phases("wait"):
            self.accelerator.wait_for_everyone()  # then no rank generates, and all ranks start to gather together
        self._send_weights()

    def wait_for_open(self) -> None:
        """Wait for all completions under way, in recorded rounds also for their tools and rewards."""
        while self.rounds is not None and self.rounds.groups.wait_for_all():
            self._recover()

    @property
    def _engines_are_current(self) -> bool:
        """Return whether the engines have the weights of this optimizer step. The same on every rank."""
        return self.version.step == self._host.step() and not self.must_sync

    def _restore(self) -> None:
        """Send the weights to engines that were started again, after a meeting that asked for it. All ranks call it.

        If the others have the weights of an earlier optimizer step, all engines get the present ones, or with
        a slot for each bucket those that were started again get the earlier ones.
        """
        if self._engines_are_current or self._host.updates.slots_have_all:
            with self._phases("sync"):
                self._host.updates.restore(self.version)
        else:
            self._host.updates.restore_all()
            self._send_weights()

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """Let `generate` wait for engines that are started again. All ranks then come to `NodeHost.align`."""
        engines = self.engines
        engines.recover = self._recover
        try:
            yield
        finally:
            engines.recover = None

    def _recover(self) -> None:
        """Meet all ranks, and send the weights to this node's engines, of which none serves.

        Raises:
            `EngineError`: the end of the first engine, if the weights of these rows are gone: a trainer with
                `vllm_sync_frequency` has taken optimizer steps since then, and the slots have not all of them.
        """
        if self.rounds is None and not (
            self._engines_are_current or self._host.updates.slots_have_all
        ):
            raise next(client.lost for client in self.engines if client.lost is not None)
        updates = self._host.updates
        updates.expect_after(self.version)
        if lost := updates.lost_engines():
            if updates.meet(lost):
                self._restore()
            return
        # only the connections of the rows in flight have ended, or no agent serves
        updates.find_agents()
        if updates.ahead_engines is not None:
            updates.ahead_engines.renew_later(range(len(updates.ahead_engines)))
        time.sleep(0.1)

    def _send_weights(self) -> None:
        self.must_sync = True
        with self._phases("sync"):
            self.version = WeightVersion(self.version.update + 1, self._host.step())
            if self.rounds is not None:
                self.rounds.add_update(self.version, self._trains)
            self.last_sync = self._host.updates.sync(self.version)
        self.must_sync = False

    def generate(
        self,
        prompts: Prompts,
        images: list[list | None] | None,
        num_generations: int,
        profiler: AbstractContextManager | None = None,
    ) -> tuple[list, list, list | None, list | None]:
        """Generate completions of this rank's prompts on its node's engines. Not a collective.

        Args:
            prompts (`list[list[int]]`):
                Token ids, one row per requested completion.
            images (`list[list | None]`, *optional*):
                PIL images of each row.
            num_generations (`int`), profiler (*optional*):
                Group size, unused because equal consecutive rows become one request; TRL's timing context.

        Returns:
            `(prompt_ids, completion_ids, logprobs, logprob_token_ids)`, rows in the order of `prompts`. The last two
            have shape `(B, T, 1)`, or are `None` if the trainer does not read them and passed `logprobs=None`.

        Raises:
            `PromptTooLongError`: if a prompt leaves no room for a completion; the message names its row.
            `WeightVersionError`: if a completion's weights are not those of the last sync before its request.
            `EngineError`: if an engine failed or stalled.
        """
        check_lengths(self, prompts)
        self.generated = True
        with self._phases("generate"), profiler or nullcontext():
            rows = (
                self._first_call(prompts, images)
                if self._takes_ahead
                else self._fresh(prompts, images)
            )
        self.rows = rows
        if self.on_generated is not None:
            self.on_generated()
        completion_ids, logprobs, logprob_ids = trls_rows(rows)
        self.seeds.add_completions(completion_ids)
        if not self._returns_logprobs:
            return prompts, completion_ids, None, None
        return prompts, completion_ids, logprobs, logprob_ids

    def rehearse(self, prompts: Prompts, num_tokens: int) -> None:
        """Let the engines generate `num_tokens` for each prompt, and drop them. Not a collective.

        Every row has a seed, so an engine's own random numbers are not used, and later rounds stay the same.
        """
        requests = [Request(prompt, 1, seed=row) for row, prompt in enumerate(prompts)]
        self.engines.generate(
            requests, num_tokens, self.sampling | {"ignore_eos": True}, self.version.update
        )

    def _first_call(self, prompts: Prompts, images: list[list | None] | None) -> list[Rollout]:
        """Return this round's completions, made ahead if possible, and submit the next round's prompts."""
        assert self.rounds is not None
        self._takes_ahead = False
        made = self.rounds.made(prompts)
        if made is None or (any(images or ()) and made.images is None):
            self.rounds.taken = []
            rows = self._fresh(prompts, images)
        else:
            self.seeds.of_call(prompts)  # count the rows made ahead as the round's first call
            rows = self._use(made)
        self.rounds.begin_following(self.version)
        return rows

    def _use(self, made: Turn) -> list[Rollout]:
        if self.stale:  # it is not if both rounds belong to one optimizer step
            self.on_stale(made)
        return made.rows

    def use_first_turns(self) -> None:
        """Use the recorded rows of this round's `rollout_func`, which replace `generate`, and begin what follows."""
        assert self.rounds is not None
        self._takes_ahead = False
        made = self.rounds.first_turns()
        self.rows, self.generated = made.rows, any(len(row.tokens) for row in made.rows)
        if self.generated:
            self._use(made)
        self.rounds.begin_following(self.version)

    # ---- sessions of a harness, in the main call --------------------------------------------------------------------

    def begin_sessions(self, num_rows: int) -> list[int] | None:
        """Return the seed of each session of a round."""
        return self.seeds.of_call([[] for _ in range(num_rows)])

    def look(self, waits: bool) -> None:
        """Do what a session that waits for an engine needs: meet all ranks, which send the weights to those that were
        started again."""
        if waits and self.engines.recover is not None:
            self.engines.recover()

    def end_sessions(self, calls: Turn) -> None:
        """Take the calls of a round's sessions as its completions."""
        self.rows, self.generated = calls.rows, bool(calls.rows)

    def _fresh(self, prompts: Prompts, images: list[list | None] | None) -> list[Rollout]:
        """Return completions of exactly the current weights, in row order."""
        version = self.version  # a recovery inside may send newer ones
        requests = merged(requests_of(prompts, images, self.seeds.of_call(prompts)))
        groups = self.engines.generate(
            requests, self.max_completion_length, self.sampling, version.update
        )
        rows = [row for group in groups for row in group]
        for row in rows:
            self.engines[row.engine].check_version(row.version, version)
        return rows
