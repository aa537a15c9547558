"""Agents of other packages, unmodified, in sessions on a vLLM engine, whose parser finds their calls of tools."""

import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

sys.path.append(str(Path(__file__).parents[2] / "requirements"))
from install import index_settings

from multinode_kit.agent_packages import (
    MINI_SWE_AGENT_TURNS,
    MOST_STEPS,
    SMOLAGENTS_TURNS,
    MiniSweAgent,
    install_mini_swe_agent,
    smolagents_agent,
)
from multinode_kit.engines import FORKED, SyncDriver, running_engines, sessions_on
from multinode_kit.tool_model import tool_model, tool_tokenizer
from trl_multinode import GRPOTrainer  # noqa: F401  sets variables when it is imported: before the tests
from trl_multinode.sessions.chaining import rows_of
from trl_multinode.sessions.harness import Harness
from trl_multinode.sessions.running import Finished

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
SEEDS = [0, 1, 2, 3]
CONTEXT = 2048


def played(run, turns: tuple[str, str], folder: Path, count: int) -> list[Finished]:
    """Run sessions of an agent with a model that takes one of two turns by the toss of a coin."""
    tokenizer = tool_tokenizer(*turns)
    model = tool_model(tokenizer=tokenizer)
    with running_engines(
        model, folder, FORKED, processing_class=tokenizer, max_model_len=CONTEXT
    ) as engines:
        driver = SyncDriver(model, engines)
        driver.send()
        harness = Harness(run, session_timeout=HANG_S, tool_call_parser="hermes")

        sessions = sessions_on(driver, harness, raises=True)
        rows = [{"number": number} for number in range(count)]
        return sessions.run(rows, SEEDS[:count], lambda waits: None)


def check_sessions(found: list[Finished]) -> None:
    """Check that agents have ended in time, and that each sampled token is in one row."""
    for one in found:
        assert 1 <= len(one.calls) <= MOST_STEPS + 1
        assert one.counts["failed"] == one.counts["refused"] == 0
        sampled = sum(sum(row.sampled) for row in rows_of(one.calls))
        assert sampled == sum(len(call.rollout.tokens) for call in one.calls) > 0
    assert max(len(one.calls) for one in found) > 1
    assert 1.0 in {one.value for one in found}


def test_smolagents_writes_its_turns_anew_so_each_call_is_a_row(tmp_path):
    found = played(smolagents_agent, SMOLAGENTS_TURNS, tmp_path, count=4)
    check_sessions(found)
    assert [len(rows_of(one.calls)) for one in found] == [len(one.calls) for one in found]


@pytest.fixture
def mini_swe_agent(tmp_path) -> MiniSweAgent:
    try:
        return MiniSweAgent(install_mini_swe_agent(tmp_path / "venv", index_settings()))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"mini-swe-agent cannot be installed: {error.stderr[-300:]}")


def test_mini_swe_agent_sends_its_turns_back_so_a_session_is_a_row(mini_swe_agent, tmp_path):
    found = played(mini_swe_agent, MINI_SWE_AGENT_TURNS, tmp_path, count=2)
    check_sessions(found)
    assert [len(rows_of(one.calls)) for one in found] == [1, 1]
    # tokenized anew they would be others
    assert [one.counts["replaced"] for one in found] == [
        sum(range(len(one.calls))) for one in found
    ]
