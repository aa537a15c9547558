"""What an engine does not serve: requests across an update, an old cache, workers that differ, truncated log-probs."""

import asyncio
from types import SimpleNamespace

import pytest
from waiting import HANG_S

from trl_multinode.engine_process import vllm_backend
from trl_multinode.engine_process.backend import CompletionBuffer, Growing
from trl_multinode.engine_process.gate import WeightGate
from trl_multinode.engine_process.server import EngineServer
from trl_multinode.engine_process.vllm_backend import VllmBackend
from trl_multinode.wire.connection import LENGTH, _reply_decoder
from trl_multinode.wire.messages import (
    EngineSpec,
    Failure,
    Generate,
    Score,
    UpdateWeights,
    WeightVersion,
    pack_ids,
)


@pytest.mark.parametrize(
    ("in_flight", "scores"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_an_update_waits_for_running_requests_but_in_flight_for_scores_only(in_flight, scores):
    async def story() -> bool:
        gate = WeightGate()
        await gate.begin(0)
        await gate.end(1, WeightVersion(1, 0))
        await gate.acquire(1, scores)
        update = asyncio.create_task(gate.begin(0, in_flight))
        for _ in range(10):  # turns of the event loop, in which nothing else runs
            await asyncio.sleep(0)
        began_beside_the_request = update.done()
        await gate.release(scores)
        await asyncio.wait_for(update, HANG_S)
        return began_beside_the_request

    assert asyncio.run(story()) is (in_flight and not scores)


@pytest.mark.parametrize("was_reset", [True, False])
def test_a_prefix_cache_that_vllm_keeps_is_an_error(was_reset, monkeypatch):
    # it imports vLLM, which takes 10 s
    monkeypatch.setattr(vllm_backend, "in_memory_adapter", lambda number: None)

    async def answer(value, *_, **__):
        return value

    backend = VllmBackend(SimpleNamespace())
    backend._llm = SimpleNamespace(
        finish_weight_update=lambda: answer(None),
        collective_rpc=lambda method: answer([(3, 7, 0, 2_000_000)]),
        reset_prefix_cache=lambda **keywords: answer(was_reset),
        resume_generation=lambda: answer(None),
    )
    assert asyncio.run(backend.commit_update()) == [WeightVersion(3, 7)] and backend.load_s == 2.0
    if was_reset:
        asyncio.run(backend.resume(WeightVersion(3, 7)))
    else:
        with pytest.raises(RuntimeError, match="prefix cache"):
            asyncio.run(backend.resume(WeightVersion(3, 7)))


class Divided:
    """A backend with a worker that missed the update."""

    async def begin_update(self, update): ...

    async def load_buckets(self, update): ...

    async def commit_update(self):
        return [WeightVersion(2, 20), WeightVersion(1, 10)]


class Refusing:
    """A backend that accepts no request during an update, as vLLM 0.33 in its pauses `wait` and `abort`."""

    load_s = 0.0

    def __init__(self):
        self.paused, self.served, self.refused = False, 0, 0

    async def begin_update(self, update):
        self.paused = True
        await self.arrival()

    async def load_buckets(self, update):
        self.version = update.version
        await self.arrival()

    async def commit_update(self):
        await self.arrival()
        return [self.version]

    async def take_kv_use(self):
        return 0.0

    async def resume(self, version):
        await self.arrival()
        self.paused = False

    async def generate(self, request, growing):
        growing.rows = [await self.score(request)]

    async def score(self, request):
        self.refused += self.paused
        self.served += 1
        return CompletionBuffer([1], [0.0])


@pytest.mark.parametrize("in_flight", [False, True])
def test_no_request_of_any_kind_reaches_an_engine_between_pause_and_resume(in_flight):
    backend = Refusing()

    async def story() -> None:
        server = EngineServer(EngineSpec(0, "", 0, {}), backend)
        requests: list[asyncio.Task] = []
        prompt = pack_ids([1, 2])

        async def arrival() -> None:
            """Let requests come in, and give them time to reach the backend."""
            row = Generate(prompt=prompt, num_completions=1, max_tokens=1, sampling={})
            for request in (row, Score(prompt=prompt)):
                requests.append(asyncio.create_task(server._rows(request, Growing())))
            for _ in range(10):  # turns of the event loop
                await asyncio.sleep(0)

        backend.arrival = arrival
        for number in range(1, 4):
            version = WeightVersion(number, 10)
            await server._apply(UpdateWeights(version=version, in_flight=in_flight))
            await asyncio.gather(*requests)

    asyncio.run(asyncio.wait_for(story(), HANG_S))
    assert (backend.served, backend.refused) == (24, 0)


def test_workers_that_committed_different_versions_fail_the_update():
    sent: list[bytes] = []
    rank = SimpleNamespace(write=sent.append, drain=lambda: asyncio.sleep(0))

    async def update() -> None:
        server = EngineServer(EngineSpec(0, "", 0, {}), Divided())
        request = UpdateWeights(version=WeightVersion(2, 20))
        await asyncio.wait_for(server._answer(request, rank), HANG_S)

    asyncio.run(update())
    (reply,) = (_reply_decoder.decode(data[LENGTH.size :]) for data in sent)
    assert isinstance(reply, Failure) and "step=10" in reply.message


@pytest.mark.parametrize(
    ("logprob", "reason"), [(-5.7, ""), (0.0, "log-prob 0.0"), (float("nan"), "log-prob nan")]
)
def test_the_engines_start_proves_with_a_row_that_the_sampler_is_extended(logprob, reason):
    backend = VllmBackend(SimpleNamespace())
    row = SimpleNamespace(outputs=[SimpleNamespace(logprobs=SimpleNamespace(logprobs=[logprob]))])

    async def collective_rpc(name):
        return {"extend_logprobs": ["", ""]}[name]

    async def outputs(prompt, params):
        assert params.allowed_token_ids == [1] and params.logprobs == 0
        yield row

    backend._llm, backend._params_cls = (
        SimpleNamespace(collective_rpc=collective_rpc),
        SimpleNamespace,
    )
    backend._outputs = outputs
    assert asyncio.run(backend._why_truncated()).endswith(reason)
