"""An engine without vLLM: the same protocol and server with a transformers model. It is slow, small and correct.

`python -m multinode_kit.fake_engine SPEC.json` replaces `trl_multinode.engine_process.main` when
`TRL_MULTINODE_ENGINE_MODULE` names it; words of [`Faults`](faults.py) may stand before the spec. It starts in the time
of one import (vLLM: half a minute). It computes real log-probs, so the library's alarms work with it.
`tests/engine/test_conformance.py` runs the same tests on both.
"""

import asyncio
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from trl_multinode.engine_process.backend import (
    AgentApp,
    Backend,
    CompletionBuffer,
    Growing,
    Refused,
)
from trl_multinode.engine_process.main import main
from trl_multinode.transports.base import SELF_TEST_S, call_with_timeout
from trl_multinode.transports.opening import open_slots
from trl_multinode.wire.messages import (
    ADAPTER_TENSORS,
    EngineSpec,
    Generate,
    OpenSlots,
    Ready,
    Score,
    Serving,
    UpdateWeights,
    WeightVersion,
    unpack_ids,
)

from .fake_endpoint import fake_agent_app
from .fake_sampling import SAMPLING_KEYS, sample
from .faults import WEIGHTS, Faults

# single rows, counted from one, that `hold_rows` holds: those of four groups in eight
HELD_ROWS = range(8, 33, 8)


class FakeRow(CompletionBuffer):
    """Completion that a thread of the fake engine makes."""

    def __init__(self, prompt: list[int]):
        super().__init__()
        self.prompt = prompt
        self.aborted = False
        self.cache: Any = None  # keys and values that a swap left as they were

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.tokens]

    @property
    def is_swapped(self) -> bool:
        return bool(self._swaps)


class Freezer:
    """Lock that stops all threads between two tokens."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frozen = False
        self._active = 0

    @contextmanager
    def token(self, row: FakeRow) -> Iterator[None]:
        """Make a token of `row`, as soon as the threads are not frozen."""
        with self._changed:
            self._changed.wait_for(lambda: row.aborted or not self._frozen)
            self._active += 1
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1

    def hold(self, row: FakeRow, limit_s: float) -> None:
        """Wait until the weights are swapped under `row`, until it is aborted, or until the limit."""
        with self._changed:
            self._changed.wait_for(lambda: row.aborted or row.is_swapped, limit_s)

    async def freeze(self) -> None:
        with self._changed:
            self._frozen = True
        while self._active:  # a thread for this wait might be missing while the rows have them all
            await asyncio.sleep(0.001)

    def thaw(self) -> None:
        self._frozen = False
        self.wake()

    def wake(self) -> None:
        """Let the threads of aborted rows end."""
        with self._changed:
            self._changed.notify_all()


def end_tokens(folder: str, config: Any) -> set[int]:
    """Return the tokens that end a completion in vLLM: those of the tokenizer and of the generation config.

    Those of the model's own config count only if the folder has no generation config.
    """
    has_file = Path(folder, "generation_config.json").exists()
    generation = (
        GenerationConfig.from_pretrained(folder)
        if has_file
        else GenerationConfig.from_model_config(config)
    )
    several = generation.eos_token_id
    found = {
        AutoTokenizer.from_pretrained(folder).eos_token_id,
        *(several if isinstance(several, list) else [several]),
    }
    return found - {None}


class FakeBackend(Backend):
    """Backend with a full forward pass per token; it ignores the settings `stop` and `stop_token_ids`.

    After a swap with `recompute_kv=False` a completion has a cache, as it would with vLLM: the keys and values of its
    earlier tokens stay those of the old weights.
    """

    def __init__(self, spec: EngineSpec):
        self._args = spec.engine_args
        self._faults = Faults.from_command_line()
        self._delay_s = self._faults.delay_s(spec.index)
        self._token_delay_s = self._faults.token_delay_s()
        self._hold_s = self._faults.hold_s()
        self._single_rows = count(1)
        self._start_delay_s = self._faults.restart_delay_s() if spec.start else 0.0
        self._tokens = 0
        self._version = WeightVersion()
        self._committed = WeightVersion()
        self._running: list[FakeRow] = []
        self._freezer = Freezer()
        self._pending: dict[str, torch.Tensor] = {}
        self._base: dict[str, torch.Tensor] = {}  # layers with an adapter: their weights without it

    async def start(self) -> None:
        torch.set_num_threads(1)
        await asyncio.sleep(self._start_delay_s)
        if self._token_delay_s:  # the rows' threads only wait, so all of them may run, as in vLLM
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(256))
        config = AutoConfig.from_pretrained(self._args["model"])
        torch.manual_seed(self._args["seed"])
        self._model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, self._args["dtype"])
        ).eval()
        self._tied = config.tie_word_embeddings
        self._eos = end_tokens(self._args["model"], config)
        self._context = self._args["max_model_len"] or config.max_position_embeddings
        self._random = torch.Generator().manual_seed(self._args["seed"])

    def ready(self) -> Ready:
        return Ready(
            pid=os.getpid(),
            max_model_len=self._context,
            model_runner="fake",
            slots=self._args.get("max_num_seqs") or 1,
            serves_lora=self._args.get("enable_lora", False),
        )

    def tokens_done(self) -> int:
        return self._tokens

    async def generate(self, request: Generate, growing: Growing) -> None:
        unknown = set(request.sampling) - SAMPLING_KEYS
        if unknown:
            raise Refused(
                "EngineRefusedError",
                f"the fake engine refuses the sampling settings {sorted(unknown)}",
            )
        prompt = self._checked(request.prompt)
        growing.rows = rows = [FakeRow(prompt) for _ in range(request.num_completions)]
        # Rounds in flight request single rows
        held = self._hold_s > 0 and len(rows) == 1 and next(self._single_rows) in HELD_ROWS
        self._running += rows
        try:
            await asyncio.sleep(self._delay_s)
            ended = partial(asyncio.get_running_loop().call_soon_threadsafe, growing.end_row)
            await asyncio.to_thread(self._complete, rows, request, ended, held)
            growing.on_output(rows[0])
        finally:
            for row in rows:
                self._running.remove(row)
                row.aborted = True  # the thread of a cancelled request is still there
            self._freezer.wake()

    async def agent_app(self, serving: Serving) -> AgentApp:
        return await asyncio.to_thread(fake_agent_app, self._args["model"], serving, self._eos)

    def _checked(self, packed: bytes) -> list[int]:
        prompt = unpack_ids(packed).tolist()
        if len(prompt) >= self._context:
            raise Refused(
                "EngineRefusedError",
                f"the prompt has {len(prompt)} tokens, the context is {self._context}",
            )
        return prompt

    def _complete(
        self, rows: list[FakeRow], request: Generate, ended: Callable[[], object], held: bool
    ) -> None:
        for index, row in enumerate(rows):
            random = (
                self._random
                if request.seed is None
                else torch.Generator().manual_seed(request.seed + index)
            )
            left = min(request.max_tokens, self._context - len(row.prompt))
            while left:
                with self._freezer.token(row):
                    if row.aborted:
                        return
                    left = self._sample(row, request.sampling, random, left - 1)
                if left and held:
                    self._freezer.hold(row, self._hold_s)
                    held = False
                if left and self._token_delay_s:
                    time.sleep(self._token_delay_s)
            ended()

    @torch.no_grad()
    def _sample(self, row: FakeRow, sampling: dict, random: torch.Generator, left: int) -> int:
        """Append a token to the row, and return how many of the `left` further ones may follow it."""
        ids = row.ids
        new = ids if row.cache is None else ids[row.cache.get_seq_length() :]
        logits = self._model(torch.tensor([new]), past_key_values=row.cache).logits[0, -1].float()
        stop = set(sampling.get("stop_token_ids") or ())
        token, logprob = sample(logits, ids, len(row.tokens), self._eos | stop, sampling, random)
        ends = stop if sampling.get("ignore_eos") else stop | self._eos
        left = 0 if token in ends else left
        row.complete = left == 0  # before the token, which another thread may read at once
        row.tokens.append(token)
        row.logprobs.append(logprob)
        self._tokens += 1
        return left

    async def score(self, request: Score) -> CompletionBuffer:
        prompt = self._checked(request.prompt)
        with torch.no_grad():
            ids = torch.tensor([prompt])
            scores = (self._model(ids).logits[0, :-1].float() / request.temperature).log_softmax(-1)
        return CompletionBuffer(prompt[1:], scores.gather(1, ids[0, 1:, None])[:, 0].tolist())

    async def open_slots(self, request: OpenSlots) -> None:
        self._slots = open_slots(request, torch.device("cpu"))

    async def check_slot(self, slot: int, num_bytes: int) -> list[int]:
        if slot == WEIGHTS:
            return [self._crc_of_weights()]
        return [call_with_timeout(SELF_TEST_S, lambda: self._slots.crc(slot, num_bytes))]

    def _crc_of_weights(self) -> int:
        crc = 0
        for name, tensor in (self._model.state_dict() | self._base).items():
            crc = zlib.crc32(name.encode(), crc)
            crc = zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy(), crc)
        return crc

    async def begin_update(self, update: UpdateWeights) -> None:
        self._version = update.version
        self._pending.clear()
        if update.in_flight:
            await self._freezer.freeze()
            for row in self._running:
                self._keep_cache(row, update.recompute_kv)

    @torch.no_grad()
    def _keep_cache(self, row: FakeRow, recompute: bool) -> None:
        """Give a frozen row the keys and values of the weights until now, unless it computes them again."""
        if recompute or not row.tokens:
            row.cache = None
        elif row.cache is None:
            row.cache = self._model(torch.tensor([row.ids[:-1]]), use_cache=True).past_key_values

    async def load_buckets(self, update: UpdateWeights) -> None:
        # not in the threads of the rows, which are all taken while many are frozen
        with ThreadPoolExecutor(1) as thread:
            await asyncio.get_running_loop().run_in_executor(thread, self._follow, update)

    def _follow(self, update: UpdateWeights) -> None:
        for tensors in self._slots.follow(update.turn, update.first_bucket):
            self._pending |= tensors
        self.load_s = self._slots.take_s

    async def commit_update(self) -> list[WeightVersion]:
        update = self._version.update
        if not self._faults.skips_load(update):
            self._load()
        if not self._faults.skips_commit(update):
            self._committed = self._version
        return [self._committed]

    async def resume(self, version: WeightVersion) -> None:
        for row in self._running:
            row.swap(len(row.tokens), version)
        self._freezer.thaw()

    def _load(self) -> None:
        if self._tied and self._faults.keeps_head(self._version.update):
            self._pending.pop("model.embed_tokens.weight")
        weights = {
            name: tensor
            for name, tensor in self._pending.items()
            if not name.endswith(ADAPTER_TENSORS)
        }
        result = self._model.load_state_dict(weights, strict=False)
        if result.unexpected_keys:
            raise RuntimeError(f"tensors that the model does not have: {result.unexpected_keys}")
        for name in weights:
            self._base.pop(name, None)
        self._add_adapter()

    @torch.no_grad()
    def _add_adapter(self) -> None:
        end_a, end_b = ADAPTER_TENSORS
        for name in [name.removesuffix(end_a) for name in self._pending if name.endswith(end_a)]:
            weight = self._model.get_parameter(f"{name}.weight")
            base = self._base.setdefault(f"{name}.weight", weight.clone())
            weight.copy_(base + self._pending[name + end_b] @ self._pending[name + end_a])

    async def stop(self) -> None:
        self._pending.clear()


if __name__ == "__main__":
    main(FakeBackend)
