"""An agent waits for runs, starts engines from what a run sends, serves rows, and outlives the run."""

import itertools
import os
import signal
import socket
import sys
import tempfile
import threading
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from forks import forked
from joining import (
    CONTEXT,
    NODES,
    agent_of,
    free_port,
    new_store,
    run_of,
    settings_of,
)
from waiting import HANG_S, until

from multinode_kit.engines import FAKE, SyncDriver, running_engines
from multinode_kit.faults import HOOK, Faults
from multinode_kit.forking import from_template
from multinode_kit.models import tiny_qwen2
from trl_multinode.engine.node_port import pool_of_run
from trl_multinode.engine.stream import Request
from trl_multinode.errors import ConfigurationError
from trl_multinode.run.endings.exit_codes import CONFIGURATION, ENGINE
from trl_multinode.tools import main
from trl_multinode.tools.launch.attendance import State, encode
from trl_multinode.wire.messages import Await, Done
from trl_multinode.wire.secret import SECRET, SECRET_FILE
from trl_multinode.wire.supervisor import is_running

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
SAMPLING = {"temperature": 1.0, "ignore_eos": True}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv(SECRET, "secret of these tests")
    monkeypatch.setenv(HOOK, from_template(FAKE))


@pytest.fixture
def store():
    return new_store()


def rows_of(engines) -> list[tuple]:
    requests = [Request(prompt, 2, seed=index) for index, prompt in enumerate(PROMPTS)]
    groups = engines.generate(requests, 12, SAMPLING, min_update=1)
    return [
        (row.tokens.tolist(), row.logprobs.astype(np.float32).tobytes(), row.version)
        for rows in groups
        for row in rows
    ]


def test_an_agent_that_was_there_first_serves_a_run_as_a_local_engine_does(tmp_path):
    port = free_port()
    with agent_of(port, tmp_path / "agent") as agent:
        agent.wait_for(f"waits for a run at 127.0.0.1:{port}")
        store = new_store(port)
        with run_of(store, tmp_path) as run:
            number = run.agent()
            assert number == NODES
            assert run.serving[number].engines == 1
            with closing(run.engines_of(number, tmp_path / "load")) as engines:
                assert engines.max_model_len == CONTEXT
                got = rows_of(engines)
        until(lambda: run.left == [number])
        assert agent.process.is_alive()
    with running_engines(tiny_qwen2(), tmp_path / "local", max_model_len=CONTEXT) as local:
        SyncDriver(tiny_qwen2(seed=7), local).send()
        assert rows_of(local) == got


# ---- one run after the other


def engine_pid(run, number: int, load) -> int:
    with closing(run.engines_of(number, load)) as engines:
        return engines[0].ready.pid


def test_engines_stay_for_the_next_run_unless_it_differs(store, tmp_path):
    load = tmp_path / "load"
    with agent_of(store.port, tmp_path / "agent") as agent:
        pids = []
        for name, context in (("a", 64), ("b", 64), ("c", 48)):
            with run_of(store, tmp_path, settings_of(context), name) as run:
                number = run.agent()
                with closing(run.engines_of(number, load)) as engines:
                    assert number == NODES and engines.max_model_len == context
                    pids.append(engines[0].ready.pid)
        assert pids[0] == pids[1] != pids[2] and not is_running(pids[0])
        assert "max_model_len" in agent.text and agent.process.is_alive()


def test_a_run_that_the_agent_served_once_ends_it_with_once(store, tmp_path):
    with agent_of(store.port, tmp_path / "agent", "--once") as agent:
        with run_of(store, tmp_path) as run:
            pid = engine_pid(run, run.agent(), tmp_path / "load")
        assert agent.wait() == 0 and not is_running(pid)


def test_each_agent_has_a_number_and_seeds_of_its_own(store, tmp_path):
    with (
        run_of(store, tmp_path) as run,
        agent_of(store.port, tmp_path / "a"),
        agent_of(store.port, tmp_path / "b"),
    ):
        until(lambda: len(run.serving) == 2)
        assert sorted(run.serving) == [NODES, NODES + 1]


# ---- ends


@pytest.fixture(autouse=True)
def heeded_signals():
    """Agents heed the signals that `nohup` or a shell around the tests lets every process ignore."""
    ignored = [
        number
        for number in (signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_IGN
    ]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def places(monkeypatch):
    """A short temporary folder, in which runs of this test have theirs."""
    with tempfile.TemporaryDirectory(prefix="a", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 0),
        (signal.SIGINT, 128 + signal.SIGINT),
        (signal.SIGHUP, 128 + signal.SIGHUP),
    ],
)
def test_a_signal_ends_the_agent_and_its_engines(store, tmp_path, places, number, code):
    with run_of(store, tmp_path) as run, agent_of(store.port, tmp_path / "agent") as agent:
        member = run.agent()
        pid = engine_pid(run, member, tmp_path / "load")
        assert list(places.iterdir())
        os.kill(agent.process.pid, number)
        assert agent.wait() == code
        until(lambda: run.left == [member])
    assert not is_running(pid) and not list(places.iterdir())


def test_the_end_of_its_parent_ends_an_agent_that_waits(tmp_path):
    port = free_port()

    def parent(_: int) -> None:
        kept = sys.stdout, sys.stderr  # else their end would close the descriptors of the agent's
        with agent_of(port, tmp_path / "agent") as agent:
            agent.wait_for("waits for a run")
            print("AGENT", agent.process.pid, flush=True)
            agent.wait()
        del kept

    with forked(parent, 1, tmp_path) as (one,):
        one.wait_for("AGENT")
        pid = int(one.text.split("AGENT ")[1].split()[0])
        one.process.kill()
        until(lambda: not is_running(pid), "the end of the agent")


@pytest.mark.fault("agent_lost")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_frozen_agent_has_left(store, tmp_path, places, number):
    with run_of(store, tmp_path, limit_s=3.0) as run:
        with agent_of(store.port, tmp_path / "agent") as agent:
            member = run.agent()
            pid = engine_pid(run, member, tmp_path / "load")
            os.kill(agent.process.pid, number)
            until(lambda: run.left == [member])
            if number == signal.SIGSTOP:  # it joins again with the same engines
                os.kill(agent.process.pid, signal.SIGCONT)
                assert run.agent() == member
                assert engine_pid(run, member, tmp_path / "load") == pid
        until(lambda: not is_running(pid) and not list(places.iterdir()), "the engine's end")


def test_an_engine_that_dies_is_started_again_and_its_agent_joins_again(store, tmp_path):
    with (
        run_of(store, tmp_path, settings_of(engine_restarts=1)) as run,
        agent_of(store.port, tmp_path / "agent") as agent,
    ):
        member = run.agent()
        pid = engine_pid(run, member, tmp_path / "load")
        os.kill(pid, signal.SIGKILL)
        until(lambda: run.left == [member])
        assert run.agent() == member
        with closing(run.engines_of(member, tmp_path / "load")) as engines:
            again = engines[0].ready.pid
            assert again != pid and rows_of(engines)
        os.kill(again, signal.SIGKILL)
        assert agent.wait() == ENGINE


# ---- refusals


@pytest.mark.fault("agent_refused")
def test_a_run_with_another_secret_is_refused_by_name(store, tmp_path, monkeypatch):
    with run_of(store, tmp_path) as run:
        monkeypatch.setenv(SECRET, "another secret of these tests")
        with agent_of(store.port, tmp_path / "agent") as agent:
            assert agent.wait() == CONFIGURATION and SECRET_FILE in agent.text
    assert not run.serving


@pytest.mark.fault("agent_refused")
@pytest.mark.parametrize("name", ["trl_multinode", "vllm", "run"])
def test_a_run_with_another_version_or_name_is_refused_by_name(store, tmp_path, name):
    with (
        run_of(store, tmp_path, **{name: "another"}) as run,
        agent_of(store.port, tmp_path / "agent") as agent,
    ):
        assert agent.wait() == CONFIGURATION
        assert f"`{name}` is" in agent.text and "another" in agent.text
    assert not run.serving


@pytest.mark.fault("agent_refused")
def test_a_rank_of_another_run_is_refused_by_the_agent(store, tmp_path):
    with run_of(store, tmp_path) as run, agent_of(store.port, tmp_path / "agent"):
        member = run.agent()
        run.pool = pool_of_run("another")
        with pytest.raises(ConfigurationError) as found:
            run.engines_of(member, tmp_path / "load")
        error = found.value
        assert (error.setting, error.got, error.expected) == ("run", "another", "run-1")


def test_no_secret_and_too_few_gpus_are_errors_before_any_run(tmp_path, monkeypatch):
    monkeypatch.delenv(SECRET)
    with agent_of(free_port(), tmp_path / "agent") as agent:
        assert agent.wait() == CONFIGURATION and SECRET in agent.text


# ---- other programs


@contextmanager
def program(port: int, first: bytes, answer: bytes | None):
    """A program that is no store: what it says first, and what it answers before it closes; `None`: nothing."""
    listener = socket.create_server(("127.0.0.1", port))
    with listener:
        count = itertools.count(1)
        seen = [0]

        def serve() -> None:
            with suppress(OSError):
                while True:
                    stream, _ = listener.accept()
                    seen[0] = next(count)
                    threading.Thread(target=talk, args=(stream,), daemon=True).start()

        def talk(stream: socket.socket) -> None:
            with stream, suppress(OSError):
                stream.sendall(first)
                while stream.recv(4096):
                    if answer is not None:
                        stream.sendall(answer)
                        return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield seen
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(HANG_S)


ROLL_CALL = encode(State())


@pytest.mark.parametrize(
    ("first", "answer"),
    [(b"", None), (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"), (b"", b""), (ROLL_CALL, b"")],
    ids=["silent", "http", "closes", "roll-call"],
)
def test_an_agent_waits_while_another_program_has_the_port(tmp_path, first, answer):
    port = free_port()
    with agent_of(port, tmp_path / "agent") as agent:
        with program(port, first, answer) as seen:
            until(lambda: seen[0] >= 2, "two attempts to reach a store")
            fds = Path(f"/proc/{agent.process.pid}/fd")
            few = len(list(fds.iterdir()))
            until(lambda: seen[0] >= 5, "three further attempts")
            # between two attempts; a connection that stays would add one each time
            until(lambda: len(list(fds.iterdir())) <= few + 1, "no connection is left")
        store = new_store(port)
        with run_of(store, tmp_path) as run:
            assert run.agent() == NODES


# ---- leaving in order


@contextmanager
def open_rows(run, number: int, load: Path, max_tokens: int):
    """A stream of a rank on the engines of an agent, with three rows under way."""
    with closing(run.engines_of(number, load)) as engines:
        stream = engines.open_stream(max_tokens, SAMPLING)
        stream.add([Request(prompt, 1, seed=1, min_update=1) for prompt in PROMPTS])
        stream.poll(0.1)
        assert stream.rows_under_way == len(PROMPTS)
        # on their connection, so that the engine has them before it is asked to take no more
        reply = engines[0].ask(Await(min_update=0))
        assert isinstance(reply, Done) and reply.num_open == len(PROMPTS)
        yield stream


def slow(monkeypatch, seconds: float, module: str) -> None:
    monkeypatch.setenv(HOOK, Faults().slow_tokens(seconds).engine(module))


def test_an_agent_that_is_asked_to_leave_ends_its_open_rows_first(store, tmp_path, monkeypatch):
    slow(monkeypatch, 0.1, from_template(FAKE))
    logs = tmp_path / "agent" / "logs"
    with (
        run_of(store, tmp_path) as run,
        agent_of(store.port, tmp_path / "agent", "--grace", str(HANG_S)) as agent,
    ):
        number = run.agent()
        with open_rows(run, number, tmp_path / "load", max_tokens=12) as stream:
            assert main(["engines", "--leave", "--logs", str(logs), "--why", "less to do"]) == 0
            until(lambda: number not in run.serving, "the end of its membership")
            assert f"{number} leaves: less to do" in run.lines
            # it is no engine for this row any more, and for no other one
            stream.add([Request([5], 1, seed=9, min_update=1)])
            ended = []
            while len(ended) < len(PROMPTS):
                ended += stream.poll()
            assert [len(row.tokens) for _, rows in ended for row in rows] == [12] * len(PROMPTS)
            until(lambda: stream.poll(0.1) or stream.stopped, "no engine for the fourth row")
            assert stream.rows_left == 1
        assert agent.wait() == 0
    assert main(["engines", "--leave", "--logs", str(logs)]) == CONFIGURATION


@pytest.mark.parametrize("frozen", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_rows_that_do_not_end_within_the_grace_end_with_the_agent(
    store, tmp_path, monkeypatch, frozen
):
    # one of the template is no child of the process that the agent kills
    slow(monkeypatch, 1.0, FAKE if frozen else from_template(FAKE))
    with (
        run_of(store, tmp_path) as run,
        agent_of(store.port, tmp_path / "agent", "--grace", "2") as agent,
    ):
        number = run.agent()
        with open_rows(run, number, tmp_path / "load", max_tokens=50) as stream:
            pid = stream._lanes[0].client.ready.pid
            if frozen:
                os.kill(pid, signal.SIGSTOP)
            os.kill(agent.process.pid, signal.SIGTERM)
            assert agent.wait() == 0 and not is_running(pid)
            until(lambda: stream.poll(0.1) or stream.stopped, "the loss of all rows")
            assert stream.rows_left == len(PROMPTS)
