"""What rank and engine say to each other survives the stream, and a silent or dead other side is an error in time."""

import asyncio
import select
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
from waiting import HANG_S

from trl_multinode import errors
from trl_multinode.errors import EngineDiedError, EngineError, EngineStalledError
from trl_multinode.transports.broadcast import Broadcast
from trl_multinode.transports.cuda_ipc import DeviceMemory
from trl_multinode.transports.host_memory import HostMemory
from trl_multinode.wire import messages
from trl_multinode.wire.connection import LENGTH, connect, frame, read_request, reason_of_end
from trl_multinode.wire.messages import (
    Await,
    Call,
    Calls,
    CheckSlot,
    CloseSession,
    Completion,
    Completions,
    Done,
    Drain,
    Endpoint,
    EngineTimes,
    ErrorName,
    Failure,
    Generate,
    Hello,
    Image,
    OpenSession,
    OpenSlots,
    Peek,
    Progress,
    Ready,
    Score,
    Serving,
    Shutdown,
    TensorSpec,
    UpdateWeights,
    VersionSpan,
    WeightVersion,
    pack_ids,
    unpack_ids,
)

LOG = Path("logs/node1/engine0.log")
VERSION = WeightVersion(3, 21)
SPEC = TensorSpec("model.layers.0.weight", "bfloat16", (2, 3), 64, 12)


def memory(transport: str, message: msgspec.Struct) -> dict:
    return {"transport": transport, "memory": msgspec.Raw(msgspec.msgpack.encode(message))}


REQUESTS = [
    Hello(request_id=1),
    Generate(
        request_id=2, prompt=pack_ids([1, -1, 2**31 - 1]), num_completions=4, max_tokens=9,
        sampling={"temperature": 0.5, "stop": ["\n"], "structured_outputs": {"regex": "[0-9]"}}, seed=2**40 + 3,
        images=(Image(data=b"\0\xff", mode="RGB", size=(1, 2)),), min_update=3,
    ),
    Generate(request_id=3, prompt=b"", num_completions=1, max_tokens=1, sampling={}),
    Await(request_id=4, min_update=7),
    Score(request_id=5, prompt=pack_ids([4, 5])),
    OpenSlots(
        request_id=6, **memory("host", HostMemory("/proc/7/fd/9", (4096, 8192))), sizes=(2**40, 1),
        buckets=((SPEC,), (SPEC, SPEC)), signals="/run/signals", engine=1,
    ),
    OpenSlots(request_id=12, **memory("ipc", DeviceMemory(((b"\0h", 3, True),), 1)), sizes=(1,), buckets=()),
    OpenSlots(request_id=13, **memory("nccl", Broadcast("/run/store", 5, 3, 30.0)), sizes=(1,), buckets=()),
    CheckSlot(request_id=14, slot=1, num_bytes=2**20, crc=2**32 - 1),
    UpdateWeights(
        request_id=7, version=VERSION, turn=5, first_bucket=3, in_flight=True, recompute_kv=True
    ),
    Peek(request_id=15),
    Drain(request_id=16),
    OpenSession(
        request_id=17, key="k" * 64, max_calls=9, max_tokens=5, sampling={"top_k": 3}, seed=2**40, min_update=2,
        serving=Serving("hermes", "qwen3", {"enable_thinking": False}),
    ),
    CloseSession(request_id=18, key="k" * 64),
    Shutdown(request_id=10),
]  # fmt: skip
REPLIES = [
    Ready(request_id=1, pid=77, max_model_len=4096),
    Progress(),
    Completions(request_id=2, rows=(
        Completion(
            pack_ids([8, 9]), np.array([-0.5, np.nan], dtype=np.float32).tobytes(),
            (VersionSpan(3, 21, 1), VersionSpan(4, 28, 2)), request_id=7,
        ),
        Completion(b"", b"", (VersionSpan(4, 28, 0),), request_id=9),
    )),
    Endpoint(request_id=17, port=2**16 - 1, model="policy", forks_because="no end token"),
    Calls(
        request_id=18, num_refused=1, num_cancelled=2, overridden=("seed", "top_p"),
        calls=(Call(pack_ids([5]), Completion(b"", b"", ()), 3),),
    ),
    Done(
        request_id=3, version=VERSION, kv_use=0.25, num_open=2, tokens=2**40,
        times=EngineTimes(clock_s=9.0, busy_s=4.0, slot_s=2.5, frozen_s=0.5, load_s=1.5, commit_s=0.1),
    ),
    *(
        Failure(request_id=4, message="über 256", error=error)
        for error in get_args(ErrorName)
    ),
]  # fmt: skip


@pytest.fixture
def pair(tmp_path):
    """A rank's connection and the engine's bare socket."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        connection = connect(str(tmp_path / "s"), "engine 0 of node 1", LOG)
        engine, _ = server.accept()
        with engine:
            yield connection, engine
        connection.close()


@contextmanager
def sending(engine: socket.socket, pieces: list[bytes]):
    def send() -> None:
        for piece in pieces:
            engine.sendall(piece)
            time.sleep(0.002)  # so that pieces are read one by one; nothing depends on it

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join(HANG_S)
    assert not thread.is_alive()


def read_all(data: bytes) -> list:
    async def read() -> list:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        messages = []
        while (message := await read_request(reader)) is not None:
            messages.append(message)
        return messages

    return asyncio.run(read())


def test_every_request_reaches_the_engine_as_it_was_sent(pair):
    assert {type(message) for message in REQUESTS} == set(messages.Request.__args__)
    connection, engine = pair
    for message in REQUESTS:
        connection.send(message, HANG_S)
    sent = b"".join(frame(message) for message in REQUESTS)
    assert engine.recv(1 << 20) == sent
    assert read_all(sent) == REQUESTS
    assert read_all(sent[:-1]) == REQUESTS[:-1]  # a request cut off is the end of the rank


@pytest.mark.parametrize("size", [1, 3, 7, 1 << 20])
def test_every_reply_reaches_the_rank_however_the_stream_is_cut(pair, size):
    assert {type(message) for message in REPLIES} == set(messages.Reply.__args__)
    connection, engine = pair
    stream = b"".join(map(frame, REPLIES))[: 220 if size == 1 else None]
    with sending(engine, [stream[i : i + size] for i in range(0, len(stream), size)]):
        count = 2 if size == 1 else len(REPLIES)
        for reply in REPLIES[:count]:  # those of one piece stay where a selector sees them
            assert select.select([connection], [], [], HANG_S)[0]
            assert connection.receive(HANG_S) == reply
    assert size == 1 or not select.select([connection], [], [], 0)[0]


def test_a_failure_names_an_error_class():
    assert all(
        issubclass(getattr(errors, name), errors.MultiNodeError) for name in get_args(ErrorName)
    )


def test_a_reply_larger_than_any_buffer_arrives_whole(pair):
    connection, engine = pair
    tokens = np.arange(2_000_000, dtype=np.int32)
    reply = Completions(rows=(Completion(pack_ids(tokens), b"", ()),))
    with sending(engine, [frame(reply)]):
        assert np.array_equal(unpack_ids(connection.receive(HANG_S).rows[0].tokens), tokens)


def test_end_of_file_is_the_death_notice(pair):
    connection, engine = pair
    engine.sendall(frame(REPLIES[0])[:-1])
    engine.close()
    with pytest.raises(EngineDiedError, match=f"engine 0 of node 1 .*{LOG}"):
        connection.receive(HANG_S)
    with pytest.raises(EngineDiedError, match=f"engine 0 of node 1 .*{LOG}"):
        connection.send(REQUESTS[0], 1.0)
    with pytest.raises(EngineDiedError, match=f"engine 1 of node 0.*{LOG}"):
        connect("/tmp/no-such-socket", "engine 1 of node 0", LOG, 1.0)


@pytest.mark.parametrize("piece", [b"", frame(REPLIES[0])[:20]])
def test_silence_is_a_stall_after_the_deadline(pair, piece):
    connection, engine = pair
    engine.sendall(piece)
    start = time.monotonic()
    with pytest.raises(EngineStalledError, match=f"engine 0 of node 1 .*{LOG}"):
        connection.receive(0.2)
    assert time.monotonic() - start > 0.15
    with pytest.raises(EngineStalledError, match=f"engine 0 of node 1 .*{LOG}"):
        connection.send(Score(prompt=bytes(8 << 20)), 0.2)  # the engine does not read either


def test_the_reason_of_an_engine_that_is_started_again_may_be_gone(tmp_path):
    """The rank that starts it again removes the file while other ranks of the node look for it."""

    class Removed(type(tmp_path)):
        def exists(self) -> bool:
            return True  # a moment ago

    assert reason_of_end(Removed(tmp_path / "engine0.failure")) is None


def test_a_corrupt_length_is_an_error_and_not_an_allocation_and_a_body_must_be_a_message(pair):
    connection, engine = pair
    engine.sendall(LENGTH.pack(3) + b"\x93\x01\x02")
    with pytest.raises(EngineError, match="engine 0 of node 1"):
        connection.receive(HANG_S)
    engine.sendall(b"\xff" * 8)
    with pytest.raises(EngineDiedError, match="18446744073709551615"):
        connection.receive(HANG_S)
    with pytest.raises(EngineDiedError, match="18446744073709551615"):
        read_all(b"\xff" * 8)
    body = msgspec.msgpack.encode({"type": "Await", "min_update": "x"})
    with pytest.raises(msgspec.ValidationError, match="min_update"):
        read_all(LENGTH.pack(len(body)) + body)
