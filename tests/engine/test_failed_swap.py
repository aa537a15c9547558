"""An update in flight that fails: the frozen rows end with its reason, and the engine never lets them go on."""

import asyncio
import re

import pytest
from waiting import HANG_S

from trl_multinode.engine_process.server import EngineServer
from trl_multinode.wire.connection import LENGTH, _reply_decoder
from trl_multinode.wire.messages import (
    EngineSpec,
    Generate,
    UpdateWeights,
    WeightVersion,
    pack_ids,
)

# test_conformance.py loses a swap on both engines, and test_weight_gate.py has workers that differ
pytestmark = pytest.mark.nightly
FIRST, SECOND = WeightVersion(1, 10), WeightVersion(2, 20)


class Freezing:
    """A backend that generates for as long as nothing cancels it."""

    def __init__(self, committed: list[WeightVersion], fails: bool = False):
        self.calls: list[str] = []
        self._committed, self._fails = committed, fails

    async def generate(self, *_):
        self.calls.append("generate")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.calls.append("aborted")
            raise

    async def begin_update(self, update):
        self.calls.append("frozen" if update.in_flight else "begun")

    load_s = 0.0

    def tokens_done(self):
        return 0

    async def load_buckets(self, update):
        if self._fails:
            raise RuntimeError("The sender of the update ended before bucket 1.")

    async def commit_update(self):
        return self._committed

    async def take_kv_use(self):
        return 0.0

    async def resume(self, version):
        self.calls.append("resumed")


class Rank:
    """A rank's end of a connection to a server without a socket."""

    def __init__(self, server: EngineServer):
        self._server, self.replies = server, []

    def write(self, data: bytes) -> None:
        self.replies.append(_reply_decoder.decode(data[LENGTH.size :]))

    async def drain(self) -> None: ...

    async def ask(self, request):
        await self._server._answer(request, self)
        return self.replies[-1]


async def swap_beside_a_row(backend: Freezing) -> tuple[list, list]:
    """Return the replies to an update in flight, and those to the rank whose row was running."""
    server = EngineServer(EngineSpec(0, "", 0, {}), backend)
    await server._weights.begin(0)
    await server._weights.end(1, FIRST)
    row, sender = Rank(server), Rank(server)
    request = Generate(
        prompt=pack_ids([5]), num_completions=1, max_tokens=9, sampling={}, min_update=1
    )
    running = asyncio.create_task(row.ask(request))
    await asyncio.sleep(0)
    await sender.ask(UpdateWeights(version=SECOND, in_flight=True))
    if backend.calls[-1] == "resumed":
        running.cancel()
    await asyncio.wait([running], timeout=HANG_S)
    return sender.replies, row.replies


@pytest.mark.parametrize(
    ("backend", "error", "reason"),
    [
        (Freezing([SECOND], fails=True), "EngineError", "before bucket 1"),
        (Freezing([FIRST]), "WeightVersionError", r"update 1 \(step 10\).* update 2"),
        (Freezing([SECOND, FIRST]), "EngineError", "different"),
    ],
    ids=["load", "lost", "one-worker-lost"],
)
def test_a_failed_swap_aborts_the_running_rows_and_never_resumes_them(backend, error, reason):
    sent, row = asyncio.run(asyncio.wait_for(swap_beside_a_row(backend), HANG_S))
    assert backend.calls == ["generate", "frozen", "aborted"]
    assert sent[-1].error == error and row[0].error == "WeightSyncError"
    for reply in (sent[-1], row[0]):
        assert re.search(reason, reply.message)
    assert "mixed weights" in row[0].message


def test_a_swap_that_every_worker_committed_resumes_them():
    backend = Freezing([SECOND, SECOND])
    sent, row = asyncio.run(asyncio.wait_for(swap_beside_a_row(backend), HANG_S))
    assert backend.calls == ["generate", "frozen", "resumed", "aborted"] and not row
    assert sent[-1].version == SECOND
