"""What a run sends to an agent, the numbers of agents, and the beats that tell a slow peer from a lost one."""

import argparse
import asyncio
import socket
import time
from contextlib import closing

import pytest
import torch
from joining import NODES, agent_of, free_port, settings_of
from ported import running
from waiting import HANG_S, until

from multinode_kit.faults import FAKE, HOOK
from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from trl_multinode.agent.agent import Agent
from trl_multinode.engine import agents
from trl_multinode.engine.agents import Agents, Beat, Start, exchange, start_of
from trl_multinode.engine.settings import save_without_weights, start_inputs
from trl_multinode.run.endings.exit_codes import CONFIGURATION
from trl_multinode.tools import main
from trl_multinode.tools.engines import address
from trl_multinode.wire.secret import SECRET


@pytest.fixture
def start(tmp_path) -> Start:
    save_without_weights(tiny_qwen2(), tiny_tokenizer(), tmp_path / "model")
    settings = settings_of(vllm_tensor_parallel_size=2, engine_kwargs={"enforce_eager": True})
    return start_of(settings, tmp_path / "model", ranks=6)


def test_an_agent_gets_all_that_engines_of_the_run_start_with(start, tmp_path):
    start.write_model(tmp_path / "copy")
    settings = settings_of(vllm_tensor_parallel_size=2, engine_kwargs={"enforce_eager": True})
    assert start.node_settings == settings.settings
    there, here = (start_inputs(settings, tmp_path / name) for name in ("model", "copy"))
    assert there == here and any("config.json" in key for key in here)


@pytest.mark.parametrize("name", ["../x", "a/x", "/tmp/x", "..", ""])
def test_a_file_outside_of_the_model_folder_is_refused(tmp_path, name):
    start = Start(2, 1, False, {}, "float32", {}, 0, {name: b"content"})
    with pytest.raises(ValueError, match="a file of its model"):
        start.write_model(tmp_path / "copy")
    assert not list((tmp_path / "copy").iterdir())


def agent_with(**flags) -> Agent:
    made = object.__new__(Agent)
    made._flags = argparse.Namespace(**{"engine_gpus": None, "tp": None, "num_engines": 2} | flags)
    return made


def test_engines_of_two_agents_never_have_the_same_seed(start):
    seeds = []
    for number, count in ((2, 8), (3, 1), (4, 8), (500, 8)):
        settings = agent_with(num_engines=count)._engine_settings(replaced(start, number))
        seeds += [settings.arguments("model", index)["seed"] for index in range(count)]
    assert len(set(seeds)) == len(seeds)


def replaced(start: Start, number: int) -> Start:
    return agents.msgspec.structs.replace(start, number=number)


@pytest.mark.parametrize(("tp", "workers"), [(None, 2), (1, 1), (4, 4)])
def test_an_engine_takes_the_rows_of_all_ranks_whatever_its_tensor_parallelism(start, tp, workers):
    settings = agent_with(tp=tp)._engine_settings(replaced(start, 5))
    arguments = settings.arguments("model", 0)
    assert arguments["tensor_parallel_size"] == workers
    # 4 // 2 rows of each of 6 ranks on two engines, and 8 at least
    assert arguments["max_num_seqs"] == 8
    start.keywords["max_num_seqs"] = 40
    assert agent_with(tp=tp)._engine_settings(start).max_num_seqs == 20 * 6 // 2


def test_an_agent_keeps_its_number_if_no_other_one_has_it(start):
    service = Agents(start, NODES, print, 1.0)
    assert [service._number_for(wanted) for wanted in (0, 1, 2, 7)] == [2, 2, 2, 7]
    service._taken |= {2, 3, 7}
    assert [service._number_for(wanted) for wanted in (0, 2, 7, 8)] == [4, 4, 4, 8]


# ---- beats


def beats(stream: socket.socket, own, limit_s: float):
    stream.setblocking(False)
    return exchange(stream, own, lambda beat: None, limit_s)


def test_a_process_that_was_stopped_does_not_blame_its_peer(monkeypatch):
    monkeypatch.setattr(agents, "BEAT_S", 0.02)
    turns = []

    def hold() -> Beat:
        turns.append(1)
        if len(turns) == 5:
            time.sleep(1.0)  # as a rank that holds the interpreter
        return Beat()

    ours, theirs = socket.socketpair()

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as found:
            await beats(ours, hold, 0.2)
        # the peer has closed its end
        assert not found.group_contains(TimeoutError)

    async def peer() -> None:
        # its own limit is no matter of this test
        await beats(theirs, Beat, HANG_S)

    with closing(ours), running(main()), closing(theirs), running(peer()):
        until(lambda: len(turns) > 50)


def test_a_silent_peer_is_noticed(monkeypatch):
    monkeypatch.setattr(agents, "BEAT_S", 0.02)
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs), pytest.raises(ExceptionGroup) as found:
        asyncio.run(beats(ours, Beat, 0.2))
    assert found.group_contains(TimeoutError)


# ---- the command


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node0", ("node0", 29500)),
        ("10.0.0.4:1234", ("10.0.0.4", 1234)),
        ("[fd00::1]", ("fd00::1", 29500)),
        ("[fd00::1]:7", ("fd00::1", 7)),
    ],
)
def test_an_address_has_a_port_or_gets_the_launchers(text, expected):
    assert address(text) == expected


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--join", "node0:port"],
        ["--join", "fd00::1"],
        ["--join", ""],
        ["--join", "node0", "--engine_gpus", "0,x"],
        ["--join", "node0", "--tp", "0"],
        ["--join", "node0", "--num_engines", "-1"],
        ["--join", "node0", "more"],
    ],
)
def test_a_wrong_command_line_is_a_configuration_error(words, capsys):
    assert main(["engines", *words]) == CONFIGURATION
    assert "usage: trl-multinode engines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--engine_gpus", "3"], "vllm_devices"),
        (["--engine_gpus", "0,0"], "vllm_devices"),
        (["--tp", "2"], "vllm_tensor_parallel_size"),
        (["--num_engines", "4"], "num_engines"),
    ],
)
def test_gpus_that_do_not_fit_are_an_error_before_any_run(tmp_path, monkeypatch, words, name):
    monkeypatch.setenv(SECRET, "secret of these tests")
    monkeypatch.setenv(HOOK, FAKE)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with agent_of(free_port(), tmp_path / "agent", *words) as agent:
        assert agent.wait() == CONFIGURATION and f"`{name}`" in agent.text
