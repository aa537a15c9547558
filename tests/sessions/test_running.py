"""Sessions of one rank on a fake engine: what agents do, and do wrong, stays inside of their session."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from waiting import HANG_S, until

from multinode_kit.engines import SAMPLING, SyncDriver, running_engines, sessions_on
from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from trl_multinode.errors import ConfigurationError, RolloutError
from trl_multinode.sessions.chaining import rows_of
from trl_multinode.sessions.harness import Harness, Session
from trl_multinode.sessions.running import Finished, HarnessThread, Sessions
from trl_multinode.wire.messages import OpenSession

pytestmark = pytest.mark.engine
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROW = {"prompt": [{"role": "user", "content": "hello"}]}


class Rig:
    """Sessions on engines, with the settings that a trainer would give them."""

    def __init__(self, driver: SyncDriver):
        self.driver = driver

    def sessions(self, run, raises: bool = False, returns_text: bool = False, **limits) -> Sessions:
        return sessions_on(self.driver, Harness(run, **limits), raises, returns_text)

    def run(self, run, count: int = 1, seeds=None, **how) -> list[Finished]:
        return self.sessions(run, **how).run(
            [ROW | {"number": n} for n in range(count)], seeds, lambda waits: None
        )


def tokenizer():
    found = tiny_tokenizer()
    found.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="module")
def rig(tmp_path_factory) -> Iterator[Rig]:
    with running_engines(
        tiny_qwen2(),
        tmp_path_factory.mktemp("logs"),
        processing_class=tokenizer(),
        stall_timeout_s=5.0,
    ) as engines:
        driver = SyncDriver(tiny_qwen2(seed=1), engines)
        driver.send()
        yield Rig(driver)


async def ask(
    session: Session, messages: list[dict], key: str | None = None, **body
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {session.api_key if key is None else key}"}
    async with httpx.AsyncClient(timeout=HANG_S) as client:
        return await client.post(
            f"{session.base_url}/chat/completions",
            json={"model": session.model, "messages": messages, **body},
            headers=headers if key != "" else {},
        )


async def reply(session: Session, messages: list[dict], **body) -> dict:
    found = await ask(session, messages, **body)
    found.raise_for_status()
    return found.json()["choices"][0]["message"]


async def two_turns(session: Session) -> float:
    messages = [*session.row["prompt"]]
    messages.append(await reply(session, messages))
    messages.append({"role": "user", "content": "go on"})
    await reply(session, messages)
    return 0.5


def test_a_session_returns_its_reward_and_its_calls(rig):
    (found,) = rig.run(two_turns)
    assert found.value == 0.5
    assert found.counts["calls"] == 2
    first, second = found.calls
    assert [len(call.rollout.tokens) > 0 for call in found.calls] == [True, True]
    (row,) = rows_of(found.calls)  # the recorded tokens come back
    assert row.ids == [*second.prompt, *second.rollout.tokens.tolist()]
    assert second.prompt[: len(first.prompt)] == first.prompt


def test_sessions_with_seeds_do_not_depend_on_their_neighbours(rig):
    alone = rig.run(two_turns, seeds=[7])[0]
    among = rig.run(two_turns, count=4, seeds=[3, 7, 11, 12])[1]
    assert [call.prompt for call in alone.calls] == [call.prompt for call in among.calls]
    for one, other in zip(alone.calls, among.calls, strict=True):
        assert one.rollout.tokens.tolist() == other.rollout.tokens.tolist()
        assert one.rollout.logprobs.tolist() == other.rollout.logprobs.tolist()


def test_a_session_gets_its_row_and_a_private_folder_that_goes(rig):
    seen = []

    async def look(session: Session) -> float:
        (session.folder / "notes").write_text("kept for a while")
        seen.append((session.row, session.folder, session.folder.stat().st_mode & 0o777))
        return 0.0

    rig.run(look, count=2)
    assert sorted(row["number"] for row, *_ in seen) == [0, 1]
    assert {mode for *_, mode in seen} == {0o700}
    assert len({folder for _, folder, _ in seen}) == 2
    assert not any(folder.exists() for _, folder, _ in seen)


def test_the_environment_of_an_agent_has_no_secret_and_no_launch(rig, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "1")
    seen = {}

    async def look(session: Session) -> float:
        seen.update(session.environment)
        assert session.api_key not in repr(session)
        return 0.0

    rig.run(look)
    assert seen["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    assert (
        not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"} & seen.keys()
    )


# ---- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.fault("harness_hangs")
def test_a_harness_that_hangs_is_cancelled_and_its_session_left_out(rig):
    cancelled = []

    async def hang(session: Session) -> float:
        await reply(session, session.row["prompt"])
        if session.row["number"] == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(session.row["number"])
                raise
        return 1.0

    well, hung = rig.run(hang, count=2, session_timeout=2.0)
    assert well.value == 1.0 and len(well.calls) == 1
    assert hung.value is None and hung.calls == []
    assert (hung.counts["failed"], hung.counts["timed_out"]) == (1, 1)
    assert cancelled == [1]


@pytest.mark.fault("harness_hangs")
def test_a_harness_that_blocks_its_thread_holds_up_no_other(rig):
    free = threading.Event()

    async def block(session: Session) -> float:
        if session.row["number"] == 1:
            free.wait(HANG_S)
        await reply(session, session.row["prompt"])
        return 1.0

    try:
        well, blocked = rig.run(block, count=2, session_timeout=1.0)
    finally:
        free.set()
    assert well.value == 1.0
    assert (blocked.counts["failed"], blocked.counts["timed_out"]) == (1, 1)


def test_a_value_counts_although_a_call_in_a_thread_goes_on(rig):
    """`asyncio.run` would wait for it, and so would the end of the process."""
    free = threading.Event()

    async def give_up(session: Session) -> float:
        await reply(session, session.row["prompt"])
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(free.wait, HANG_S), 0.1)
        return 0.5

    async def add(session: Session) -> float:
        return await asyncio.to_thread(sum, [0.25, 0.5])

    try:
        (found,) = rig.run(give_up)
        (calls,) = [one for one in threading.enumerate() if one.name == "harness call"]
        assert calls.daemon
    finally:
        free.set()
    assert found.value == 0.5 and found.counts["timed_out"] == 0
    assert rig.run(add)[0].value == 0.75


def test_a_process_ends_although_a_call_of_a_harness_in_a_thread_does_not():
    code = (
        "import asyncio, threading\n"
        "from trl_multinode.sessions.harness import Harness\n"
        "from trl_multinode.sessions.running import HarnessThread\n"
        "begun = threading.Event()\n"
        "def hang():\n    begun.set()\n    threading.Event().wait()\n"
        "async def harness(session):\n    await asyncio.to_thread(hang)\n"
        "thread = HarnessThread(Harness(harness), None)\n"
        "thread.start()\nbegun.wait()\nthread.cancel()\nassert thread.ended.is_set()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)


def test_a_harness_that_is_cancelled_before_it_begins_does_not_run():
    ran = []

    async def harness(session: Session) -> float:
        ran.append(session)
        return 1.0

    thread = HarnessThread(Harness(harness), None)
    thread._was_cancelled = True
    thread.run()
    assert ran == [] and isinstance(thread.error, asyncio.CancelledError)


def test_an_exit_in_a_task_of_a_harness_and_a_loop_that_cannot_be_made_are_faults(monkeypatch):
    async def leave() -> None:
        sys.exit(3)

    async def harness(session: Session) -> float:
        await asyncio.gather(leave(), asyncio.Event().wait())
        return 1.0

    thread = HarnessThread(Harness(harness), None)
    thread.run()
    assert isinstance(thread.error, SystemExit) and thread.value is None

    def no_descriptor(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(asyncio.events, "new_event_loop", no_descriptor)
    thread = HarnessThread(Harness(harness), None)
    thread.run()
    assert isinstance(thread.error, OSError) and thread.ended.is_set()


def test_what_a_harness_returns_on_its_cancellation_counts(rig):
    async def give_up(session: Session) -> float:
        await reply(session, session.row["prompt"])
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return -1.0
        return 1.0

    (found,) = rig.run(give_up, session_timeout=1.0)
    assert found.value == -1.0
    assert len(found.calls) == found.counts["timed_out"] == 1


@pytest.mark.fault("harness_fails")
def test_a_harness_that_fails_leaves_its_session_out(rig):
    async def fail(session: Session) -> float:
        await reply(session, session.row["prompt"])
        if session.row["number"] == 0:
            raise KeyError("tool")
        return 1.0

    failed, well = rig.run(fail, count=2)
    assert (failed.value, failed.calls, failed.counts["failed"]) == (None, [], 1)
    assert (well.value, len(well.calls)) == (1.0, 1)


@pytest.mark.fault("harness_fails")
@pytest.mark.parametrize("error", [KeyError("tool"), SystemExit(3)])
def test_with_tool_errors_raise_it_ends_the_run(rig, error):
    async def fail(session: Session) -> float:
        raise error

    with pytest.raises(RolloutError) as found:
        rig.run(fail, raises=True)
    assert found.value.__cause__ is error


@pytest.mark.fault("harness_fails")
def test_a_harness_that_has_never_ended_well_ends_the_run(rig):
    async def fail(session: Session) -> float:
        raise NameError("a typing error")

    with pytest.raises(RolloutError):
        rig.run(fail, count=3)


@pytest.mark.fault("harness_floods")
def test_calls_above_the_limit_are_refused_and_not_recorded(rig):
    statuses = []

    async def flood(session: Session) -> float:
        answers = await asyncio.gather(*(ask(session, session.row["prompt"]) for _ in range(12)))
        statuses.extend(answer.status_code for answer in answers)
        return 1.0

    (found,) = rig.run(flood, max_calls=5)
    assert statuses.count(200) == 5
    assert len(found.calls) == 5 and found.counts["refused"] == 7


@pytest.mark.fault("harness_keys")
@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_call_without_a_valid_key_is_refused(rig, key):
    async def no_key(session: Session) -> float:
        answer = await ask(session, session.row["prompt"], key=key)
        assert answer.status_code == 401
        return 1.0

    (found,) = rig.run(no_key)
    assert found.value == 1.0 and found.calls == []


@pytest.mark.fault("harness_keys")
def test_the_key_of_a_session_that_has_ended_opens_nothing(rig):
    ended = {}

    async def keep(session: Session) -> float:
        ended["session"] = session
        return 1.0

    async def use(session: Session) -> float:
        answer = await ask(session, session.row["prompt"], key=ended["session"].api_key)
        assert answer.status_code == 401
        return 1.0

    rig.run(keep)
    (found,) = rig.run(use)
    assert found.value == 1.0 and found.calls == []


@pytest.mark.fault("harness_forks")
def test_calls_in_parallel_become_rows_of_their_own(rig):
    async def branch(session: Session) -> float:
        messages = [*session.row["prompt"], await reply(session, session.row["prompt"])]
        more = [[*messages, {"role": "user", "content": text}] for text in ("left", "right")]
        await asyncio.gather(*(reply(session, one) for one in more))
        return 1.0

    (found,) = rig.run(branch)
    rows = rows_of(found.calls)
    assert len(found.calls) == 3 and len(rows) == 2
    assert sum(map(sum, (row.sampled for row in rows))) == sum(
        len(call.rollout.tokens) for call in found.calls
    )


@pytest.mark.fault("harness_leftovers")
def test_processes_of_a_session_end_with_it(rig):
    pids: list[int] = []

    async def start(session: Session) -> float:
        # a process in a session of its own, whose parent has ended
        script = (
            "import os, time; os.fork() and os._exit(0); os.setsid(); "
            "print(os.getpid(), flush=True); time.sleep(600)"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            env=session.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            pids.append(int(process.stdout.readline()))
            process.stdout.close()
        return 1.0

    rig.run(start)
    until(lambda: not psutil.pid_exists(pids[0]) or psutil.Process(pids[0]).status() == "zombie")


@pytest.mark.fault("harness_leftovers")
def test_an_engine_ends_the_processes_of_a_rank_that_was_killed(rig):
    client = rig.driver.engines.reserve()
    client.ask(OpenSession(key="k" * 43, max_calls=1, max_tokens=1, sampling=SAMPLING))
    with subprocess.Popen(["sleep", "600"], env={"TRL_MULTINODE_SESSION": "k" * 43}) as process:
        rig.driver.engines.release(client)  # as the kernel does for a killed rank
        assert process.wait(HANG_S) == -signal.SIGKILL


def test_a_session_that_is_cancelled_from_outside_ends(rig):
    begun = threading.Event()

    async def wait(session: Session) -> float:
        begun.set()
        await asyncio.Event().wait()
        return 1.0

    sessions = rig.sessions(wait)
    errors = []

    def run() -> None:
        try:
            sessions.run([ROW], None, lambda waits: None)
        except RolloutError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(HANG_S)
    assert sessions.state()
    sessions.close()
    thread.join(HANG_S)
    assert len(errors) == 1 and sessions.state() == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("good", False),
        (1.0, True),
        (True, False),
        ([1.0], False),
        (float("-inf"), False),
        (np.float32("inf"), False),
        (10**400, False),
    ],
)
def test_a_harness_must_return_what_the_trainer_needs(rig, value, text):
    async def wrong(session: Session):
        return value

    with pytest.raises(RolloutError):
        rig.run(wrong, returns_text=text)


def test_a_session_without_a_value_is_left_out(rig):
    async def nothing(session: Session) -> float | None:
        await reply(session, session.row["prompt"])
        return None if session.row["number"] else np.float32("nan")

    found = rig.run(nothing, count=2)
    found += rig.run(nothing, count=2, returns_text=True)
    assert [(one.value, one.calls) for one in found] == [(None, [])] * 4


@pytest.mark.parametrize("limits", [{"session_timeout": 0}, {"max_calls": 0}, {"max_calls": True}])
def test_limits_are_checked(limits):
    async def run(session: Session) -> float:
        return 0.0

    with pytest.raises(ConfigurationError) as found:
        Harness(run, **limits)
    assert found.value.setting == next(iter(limits))


def test_a_harness_must_be_async():
    with pytest.raises(ConfigurationError) as found:
        Harness(lambda session: 1.0)
    assert found.value.setting == "harness"


# ---- engines that end -----------------------------------------------------------------------------------------------


@pytest.mark.fault("engine_of_session")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_session_whose_engine_is_lost_begins_again_on_another(tmp_path: Path, how):
    attempts: list[str] = []

    async def kill_first(session: Session) -> float:
        attempts.append(session.base_url)
        await reply(session, session.row["prompt"])
        if len(attempts) == 1:
            os.kill(victim[session.base_url], how)
            await asyncio.Event().wait()
        return 1.0

    with running_engines(
        tiny_qwen2(), tmp_path, num_engines=2, processing_class=tokenizer(), stall_timeout_s=2.0
    ) as engines:
        driver = SyncDriver(tiny_qwen2(seed=1), engines)
        driver.send()
        rig = Rig(driver)
        victim: dict[str, int] = {}

        async def where(session: Session) -> float:
            pids = {client.ready.pid for client in engines}
            port = int(session.base_url.split(":")[2].split("/")[0])
            for pid in pids:
                if any(one.laddr.port == port for one in psutil.Process(pid).net_connections()):
                    victim[session.base_url] = pid
            return 1.0

        rig.run(where, count=4)
        assert len(victim) == 2
        start = time.monotonic()
        (found,) = rig.run(kill_first, session_timeout=HANG_S)
        assert time.monotonic() - start < HANG_S
    assert found.value == 1.0 and found.counts["again"] == 1
    assert len(set(attempts)) == 2 and len(found.calls) == 1
