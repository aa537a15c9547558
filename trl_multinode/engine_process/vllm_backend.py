"""Backend on vLLM's asynchronous engine; weights arrive through vLLM's own weight-transfer interface."""

import asyncio
import gc
import hashlib
import itertools
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from ..vllm_worker.core import TAKE_KV_USE
from ..vllm_worker.plugin import BACKEND
from ..vllm_worker.quiet import quiet_vllm
from ..wire.messages import (
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
from ..wire.messages import Image as WireImage
from ..wire.stop_signals import ignore_stop_signals, obey_stop_signals
from ..wire.supervisor import descendants, is_resource_tracker
from .backend import AgentApp, Backend, CompletionBuffer, Growing, Refused

# Freeing vLLM's 8 Python objects per token took 31 ms for 224 rows of 1024 tokens, so the reply is sent first
FREE_AFTER_S = 0.25
# A garbage collection visits them too (43 ms for 224 rows of 2048 tokens); Python's default, 700, is too frequent
NEW_OBJECTS_PER_COLLECTION = 100_000
OBEY_S = 5.0  # longest wait for all of vLLM's processes, which respond between two steps
MIN_BATCH_TOKENS = 8192  # of prompts and rows, computed in one step


class VllmBackend(Backend):
    """Backend on vLLM's asynchronous engine; weights arrive through vLLM's own weight-transfer interface."""

    worker_extension = "trl_multinode.vllm_worker.worker.WorkerExtension"

    def __init__(self, spec: EngineSpec):
        self._spec = spec
        self._tokens = 0
        self._numbers = itertools.count(1)  # of requests
        self._adapter: Any = (
            None  # vLLM's LoRARequest for the adapter that the workers hold, if any
        )
        self._salt = (
            "0"  # of the prefix cache: an entry serves only requests of the update that made it
        )
        # completions of the requests that vLLM is generating, by the request's number
        self._running: dict[int, Sequence[CompletionBuffer]] = {}
        self._update = UpdateWeights(version=WeightVersion())  # the last one

    async def start(self) -> None:
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import SamplingParams
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        args = AsyncEngineArgs(
            **self._spec.engine_args,
            load_format="dummy",  # the trainer is the only source of weights: vLLM needs no hub, token or checkpoint
            logprobs_mode="processed_logprobs",  # after temperature, as TRL's importance sampling needs them
            enable_log_requests=False,
            disable_log_stats=True,  # Prometheus metrics took 2 ms per 224 rows, and no process reads them
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            worker_extension_cls=self.worker_extension,
        )
        args.enable_lora = args.enable_lora and has_lora(args)
        # The context of offline inference has the largest batches: 8192 to 16384 tokens a step on a GPU. Without one,
        # vLLM takes 2048 on every device, and does not start with more rows than that
        context = UsageContext.LLM_CLASS
        defaults, _ = args.get_batch_defaults(args.tensor_parallel_size)
        args.max_num_batched_tokens = batch_tokens(args, defaults[context])
        self._llm = AsyncLLM.from_engine_args(args, usage_context=context)
        if self._llm.vllm_config.model_config.is_multimodal_model:
            take_expanded_prompts(self._llm.renderer.get_mm_processor())
        await self._call_everywhere(ignore_stop_signals)
        count_tokens(self._llm.engine_core, self._running)
        self._params_cls = SamplingParams
        await self._llm.collective_rpc("keep_seeds")
        self._truncated = await self._why_truncated()
        quiet_vllm()
        await self._call_everywhere(quiet_vllm)
        gc.freeze()
        gc.set_threshold(NEW_OBJECTS_PER_COLLECTION)

    async def _why_truncated(self) -> str:
        """Extend the workers' log-probs; return why they are not over the whole vocabulary, or an empty string.

        The proof is a row that may contain one token only: over the tokens that are left its log-prob is 0.
        """
        if any(reasons := await self._llm.collective_rpc("extend_logprobs")):
            return max(reasons)
        params = self._params_cls(
            max_tokens=1, logprobs=0, flat_logprobs=True, allowed_token_ids=[1]
        )
        # several tokens, because vLLM's CPU kernel of a causal convolution refuses a prompt of one
        prompt = self._prompt([1] * 8, ())
        *_, output = [output async for output in self._outputs(prompt, params)]
        logprob = output.outputs[0].logprobs.logprobs[0]
        return "" if logprob < -1e-3 else f"a row with one allowed token got the log-prob {logprob}"

    def tokens_done(self) -> int:
        return self._tokens

    def ready(self) -> Ready:
        config = self._llm.vllm_config
        return Ready(
            pid=os.getpid(),
            max_model_len=config.model_config.max_model_len,
            model_runner="v2" if config.use_v2_model_runner else "v1",
            slots=config.scheduler_config.max_num_seqs,
            serves_lora=config.lora_config is not None,
            truncated_logprobs=self._truncated,
        )

    async def generate(self, request: Generate, growing: Growing) -> None:
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        keywords = dict(request.sampling)
        if isinstance(keywords.get("structured_outputs"), dict):
            keywords["structured_outputs"] = StructuredOutputsParams(
                **keywords["structured_outputs"]
            )
        try:
            params = self._params_cls(
                n=request.num_completions,
                seed=request.seed,
                max_tokens=request.max_tokens,
                logprobs=0,
                flat_logprobs=True,
                **(
                    {
                        "detokenize": bool(keywords.get("stop")),
                        "output_kind": RequestOutputKind.CUMULATIVE,
                    }
                    | keywords
                    | dict(growing.text)
                ),
            )
        except (TypeError, ValueError, client_error()) as error:
            raise Refused(
                "EngineRefusedError", f"vLLM refuses the sampling settings: {error}"
            ) from error
        rows = growing.rows = [CompletionBuffer() for _ in range(request.num_completions)]
        # an agent's stream gets the new tokens only
        start = 0 if params.output_kind == RequestOutputKind.DELTA else None
        kept = {}  # vLLM's lists, freed after the reply is sent
        prompt = unpack_ids(request.prompt).tolist()
        async for output in self._outputs(self._prompt(prompt, request.images), params, rows):
            for row in output.outputs:
                kept[row.index] = row
                self._tokens += rows[row.index].grow(row.token_ids, row.logprobs.logprobs, start)
                if row.finished():
                    rows[row.index].complete = True
                    growing.end_row()
            growing.on_output(output)
        asyncio.get_running_loop().call_later(FREE_AFTER_S, kept.clear)

    async def agent_app(self, serving: Serving) -> AgentApp:
        from .endpoint import build_agent_app

        return await build_agent_app(self._llm, serving)

    async def score(self, request: Score) -> CompletionBuffer:
        params = self._params_cls(
            max_tokens=1, prompt_logprobs=0, detokenize=False, temperature=request.temperature
        )
        prompt = unpack_ids(request.prompt).tolist()
        *_, output = [
            output async for output in self._outputs(self._prompt(prompt, request.images), params)
        ]
        rows = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        return CompletionBuffer(prompt[1:], [position[token].logprob for token, position in rows])

    def _prompt(self, prompt: list[int], images: Sequence[WireImage]) -> dict:
        request: dict[str, Any] = {"prompt_token_ids": prompt, "cache_salt": self._salt}
        if images:
            from PIL import Image

            opened = [Image.frombytes(image.mode, image.size, image.data) for image in images]
            request["multi_modal_data"] = {"image": opened}
            # by which vLLM finds the embedding of an image again, which may not serve requests after an update
            names = [f"{self._salt}-{digest_of(image)}" for image in images]
            request["multi_modal_uuids"] = {"image": names}
        return request

    async def _outputs(
        self, prompt: dict, params: Any, rows: Sequence[CompletionBuffer] = ()
    ) -> AsyncIterator:
        number = next(self._numbers)
        self._running[number] = rows
        try:
            async for output in self._llm.generate(
                prompt, params, request_id=str(number), lora_request=self._adapter
            ):
                yield output
        except (ValueError, client_error()) as error:
            raise Refused("EngineRefusedError", f"vLLM refuses the prompt: {error}") from error
        finally:
            self._running.pop(number, None)

    async def open_slots(self, request: OpenSlots) -> None:
        info = {"request": msgspec.msgpack.encode(request)}
        await self._llm.collective_rpc("init_weight_transfer_engine", args=(info,))

    async def check_slot(self, slot: int, num_bytes: int) -> list[int]:
        return await self._llm.collective_rpc("crc_of_slot", args=(slot, num_bytes))

    async def begin_update(self, update: UpdateWeights) -> None:
        self._update = update
        if update.in_flight:
            # `clear_cache` would compute the keys and values of frozen requests again
            await self._llm.pause_generation(mode="keep", clear_cache=False)
        else:
            await self._llm.pause_generation(mode="wait")
        await self._llm.start_weight_update()

    async def load_buckets(self, update: UpdateWeights) -> None:
        version = [update.version.update, update.version.step]
        info = {"turn": update.turn, "version": version, "first": update.first_bucket}
        await self._llm.collective_rpc("update_weights", kwargs={"update_info": info})

    async def commit_update(self) -> list[WeightVersion]:
        await self._llm.finish_weight_update()
        committed = await self._llm.collective_rpc("commit_weights")
        self._adapter = in_memory_adapter(committed[0][2])
        self.load_s = max(microseconds for *_, microseconds in committed) / 1e6
        return [WeightVersion(update, step) for update, step, *_ in committed]

    async def take_kv_use(self) -> float:
        return await self._llm.engine_core.call_utility_async(TAKE_KV_USE)

    async def resume(self, version: WeightVersion) -> None:
        if not self._update.in_flight:
            await self._drop_cache()
        elif self._update.recompute_kv:
            await self._drop_cache(reset_running_requests=True)
            # no request is running: all begin again with their prompts
            await self._llm.reset_encoder_cache()
        # keeps what frozen requests have computed from all later requests
        self._salt = str(version.update)
        for rows in self._running.values():
            for row in rows:
                row.swap(row.made, version)  # although some of these tokens may not be read yet
        await self._llm.resume_generation()

    async def _drop_cache(self, **keywords: bool) -> None:
        """Drop the keys and values of the old weights."""
        if not await self._llm.reset_prefix_cache(**keywords):
            raise RuntimeError(
                "vLLM kept a prefix cache of older weights, because requests hold blocks of it"
            )

    async def stop(self) -> None:
        with suppress(Exception):  # a process that does not respond is killed
            # vLLM's own shutdown ends its processes by SIGTERM
            await asyncio.wait_for(self._call_everywhere(obey_stop_signals), OBEY_S)
        self._llm.shutdown(timeout=12)  # two workers need 5 s; later vLLM kills them with a warning

    async def _call_everywhere(self, function: Callable[[], None]) -> None:
        """Call a function in vLLM's workers and in its core, which have it as a method of that name."""
        await self._llm.collective_rpc(function.__name__)
        await self._llm.engine_core.call_utility_async(function.__name__)


def digest_of(image: WireImage) -> str:
    """Return a name for an image, the same for equal images."""
    return hashlib.sha256(f"{image.mode} {image.size} ".encode() + image.data).hexdigest()


def count_tokens(core: Any, running: Mapping[int, Sequence[CompletionBuffer]]) -> None:
    """Count the tokens of running requests as they arrive from vLLM's core.

    The core's answer to a pause comes through the same socket after all earlier tokens, so when a pause returns, the
    numbers are exact. vLLM itself only sleeps 20 ms, in which not every token has reached its request.
    """
    put = core.outputs_queue.put_nowait

    def count(outputs: Any) -> None:
        for output in getattr(outputs, "outputs", ()):  # an exception has none
            # our number, with a suffix of vLLM's and, for several completions, the completion's index in front
            index, _, name = output.request_id.rpartition("_")
            rows = running.get(int(name.partition("-")[0]))
            if rows:  # a score has none
                rows[int(index or 0)].made += len(output.new_token_ids)
        put(outputs)

    core.outputs_queue.put_nowait = count


def client_error() -> type[Exception]:
    """Return vLLM's exception class for a refused request; in 0.26 it is a `ValueError`."""
    from vllm import exceptions

    return getattr(exceptions, "VLLMClientError", ValueError)


def take_expanded_prompts(processor: Any) -> None:
    """Make the processor accept prompts that already hold all tokens of their images, as TRL's do.

    vLLM 0.31 would expand an image's first token into all of them again and embed the others as text. The patched
    method returns a prompt unchanged if all tokens are there.
    """
    expand = processor._apply_prompt_updates

    def find_or_expand(
        token_ids: list[int], updates: Mapping[str, Any]
    ) -> tuple[list[int], Mapping[str, Any]]:
        found = processor._find_mm_placeholders(token_ids, updates)
        if all(len(found.get(kind, ())) == len(items) for kind, items in updates.items()):
            return token_ids, found
        return expand(token_ids, updates)

    processor._apply_prompt_updates = find_or_expand


def batch_tokens(args: Any, default: int) -> int | None:
    """Return the tokens that an engine computes in one step, `None` for vLLM's default.

    Twice the rows, so that prompts are computed while all rows generate: 1792 rows left them 256 of 2048 tokens.

    Args:
        args (`vllm.AsyncEngineArgs`):
            Arguments of the engine; the user's own number wins.
        default (`int`):
            vLLM's default on this machine, which vLLM adapts to the model unless a number is given.
    """
    if args.max_num_batched_tokens is not None:
        return args.max_num_batched_tokens
    at_least = max(MIN_BATCH_TOKENS, 2 * (args.max_num_seqs or 0))
    return at_least if default < at_least else None


def has_lora(args: Any) -> bool:
    """Return whether vLLM's class of this model supports adapters; a rank would have to import vLLM to find out."""
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.model_executor.models import supports_lora

    return supports_lora(get_model_cls(args.create_model_config()))


def in_memory_adapter(number: int) -> Any:
    """Return vLLM's request for adapter `number`, which all workers hold. vLLM requires a path; it must not exist."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", number, f"/held/in/memory/{number}") if number else None


def vllm_processes() -> list:
    """Return the descendants that run vLLM: all but multiprocessing's resource tracker."""
    return [process for process in descendants() if not is_resource_tracker(process)]
