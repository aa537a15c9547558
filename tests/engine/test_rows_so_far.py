"""Rows under way that a checkpoint reads: a completion that has just ended is not taken for a beginning."""

import asyncio

import pytest
from waiting import HANG_S

from trl_multinode.engine_process.backend import CompletionBuffer
from trl_multinode.engine_process.server import EngineServer
from trl_multinode.wire.connection import LENGTH, _reply_decoder, frame
from trl_multinode.wire.messages import (
    Completions,
    EngineSpec,
    Generate,
    Hello,
    Peek,
    Ready,
    WeightVersion,
    pack_ids,
    unpack_ids,
)

pytestmark = pytest.mark.nightly  # test_conformance.py reads rows under way on both engines
LAST = 1  # end-of-sequence token


class Backend:
    """The row of prompt [5] ends, and its reply comes later; that of [6] runs until the test ends."""

    def __init__(self):
        self.reply = asyncio.Event()
        self.num_shown = 0

    async def generate(self, request, growing):
        prompt = unpack_ids(request.prompt).tolist()
        row = CompletionBuffer(
            [7, LAST] if prompt == [5] else [7], [-1.0, -1.0] if prompt == [5] else [-1.0]
        )
        row.complete = prompt == [5]
        growing.rows = [row]
        self.num_shown += 1
        await self.reply.wait() if row.complete else await asyncio.Event().wait()

    def tokens_done(self) -> int:
        return 0

    def ready(self) -> Ready:
        return Ready(pid=0, max_model_len=256)


class Writer:
    def __init__(self):
        self.replies: list = []

    def write(self, data: bytes) -> None:
        self.replies.append(_reply_decoder.decode(data[LENGTH.size :]))

    async def drain(self) -> None: ...

    def close(self) -> None: ...


async def peek_beside_an_ended_row() -> list:
    backend, reader, writer = Backend(), asyncio.StreamReader(), Writer()
    server = EngineServer(EngineSpec(0, "", 0, {}), backend)
    await server._weights.begin(0)
    await server._weights.end(1, WeightVersion(1, 10))
    serving = asyncio.create_task(server._connection(reader, writer))
    reader.feed_data(frame(Hello(request_id=0)))
    for number, prompt in ((1, [5]), (2, [6])):
        reader.feed_data(frame(Generate(
            request_id=number, prompt=pack_ids(prompt), num_completions=1, max_tokens=9, sampling={}, min_update=1,
        )))  # fmt: skip
    while backend.num_shown < 2:
        await asyncio.sleep(0.01)
    reader.feed_data(frame(Peek(request_id=3)))
    # turns of the event loop, in which the server takes the request and can do no more
    for _ in range(20):
        await asyncio.sleep(0)
    backend.reply.set()
    while len(writer.replies) < 3:
        await asyncio.sleep(0.01)
    serving.cancel()
    await asyncio.wait([serving])
    return writer.replies[1:]  # the first one is `Ready`


def test_the_reply_of_a_row_that_has_ended_goes_before_the_rows_under_way():
    ended, so_far = asyncio.run(asyncio.wait_for(peek_beside_an_ended_row(), HANG_S))
    assert isinstance(ended, Completions) and ended.request_id == 1
    assert [unpack_ids(row.tokens).tolist() for row in ended.rows] == [[7, LAST]]
    assert so_far.request_id == 3 and [row.request_id for row in so_far.rows] == [2]
    assert [unpack_ids(row.tokens).tolist() for row in so_far.rows] == [[7]]
