"""Agents beside training: what ends a run, what does not, and which threads are left."""

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import agent_kinds
import pytest
import torch
from agent_kinds import SPEAKER, Kind, threads_of_groups, trained, wait_for_the_end_of_groups
from agents import GROUP, Seen, Speaker, call_of, chats, engines_here, ours
from forks import forked
from waiting import HANG_S

from trl_multinode.errors import RolloutError
from trl_multinode.rollouts.tool_calls import ToolCalls


class Stop(Exception):
    """Ends `train()` early."""


class Waiting(agent_kinds.Counter):
    """An environment whose tool waits, except for the rows of the first round."""

    hold, held = threading.Event(), threading.Event()

    def wait(self, number: int) -> str:
        """
        Waits.

        Args:
            number: A number.
        """
        if self.total > 1:
            self.held.set()
            self.hold.wait()
        return "at last"


WAITS = Speaker({"wait": [call_of("wait", number=1)]}, share=0.5)


class Releases(Seen):
    """A reward function whose second call releases the tools: all groups of the next round have begun by then."""

    def __call__(self, *args, **kwargs):
        if self.rounds:
            Waiting.hold.set()
        return super().__call__(*args, **kwargs)


def stopped(folder: Path):
    """A trainer that has stopped in its first step, while tools of the next round wait."""
    Waiting.hold.clear()
    Waiting.held.clear()
    seen = Releases()
    trainer = ours(
        folder, seen, chats(12, start=list(range(12))), {"environment_factory": Waiting}, max_staleness=1,
        shuffle_dataset=False,
    )  # fmt: skip

    def stop(*args, **kwargs):
        step(*args, **kwargs)
        assert Waiting.held.wait(HANG_S)
        raise Stop

    step, trainer.training_step = trainer.training_step, stop
    with pytest.raises(Stop):
        trainer.train()
    del trainer.training_step
    return trainer, seen


def test_a_run_that_stops_early_drops_its_tools_and_trains_again(tmp_path):
    """A group that is in a tool then ends at its next turn, and the next `train()` makes its rows again."""
    with engines_here(WAITS):
        trainer, seen = stopped(tmp_path)
        assert threads_of_groups()
        trainer.train()  # its groups have the same numbers as those that wait
        trainer.close()
    prompts = [one["prompts"][0][0]["content"] for one in seen.rounds]
    assert len(prompts) == 4 and prompts[0] == prompts[1] and len(set(prompts)) == 3
    assert seen.rounds[0]["prompts"] == seen.rounds[1]["prompts"]
    wait_for_the_end_of_groups()


def test_a_trainer_that_is_closed_after_an_error_ends_the_rollouts_that_were_open(tmp_path):
    with engines_here(WAITS):
        trainer, _ = stopped(tmp_path)
        trainer.close()
        assert trainer.vllm_generation.continuous.groups.ids == [] and threads_of_groups()
        Waiting.hold.set()
        wait_for_the_end_of_groups()


@pytest.mark.parametrize("closes", [True, False])
def test_a_process_ends_although_a_tool_does_not_return(closes, tmp_path):
    def body(rank: int) -> list[str]:
        with engines_here(WAITS):
            trainer, _ = stopped(tmp_path)
            if closes:
                trainer.close()
            return threads_of_groups()

    with forked(body, 1, tmp_path) as (one,):  # its result is there when it has ended
        assert any("rollouts" in name for name in one.result)


# ---- what ends a run -----------------------------------------------------------------------------------------------


def breaks(number: int) -> str:
    """
    Fails.

    Args:
        number: How.
    """
    raise {1: ValueError, 2: SystemExit, 3: KeyboardInterrupt}[number]("broken")


async def breaks_later(number: int) -> str:
    """
    Fails.

    Args:
        number: How.
    """
    await asyncio.sleep(0)
    return breaks(number)


class BreaksReset(agent_kinds.Counter):
    def reset(self, start: int = 0, **_) -> str:
        if start == 3:
            raise ValueError("broken")
        return super().reset(start)


def breaks_loop(prompts, trainer):
    raise ValueError("broken")


def breaks_by_gathering(prompts, trainer):
    trainer.accelerator.gather(torch.zeros(1))


def caller_of(tool, number: int) -> Speaker:
    return Speaker({tool.__name__: [call_of(tool.__name__, number=number)]}, share=0.4)


RAISES = {"tool_errors": "raise"}
BROKEN = {  # what fails -> the agent, settings, and the names in the error
    "tool": (Kind({"tools": [breaks]}), caller_of(breaks, 1), RAISES, "`breaks`"),
    "async tool": (Kind({"tools": [breaks_later]}), caller_of(breaks_later, 1), RAISES, "`breaks_later`"),
    "exit in a tool": (Kind({"tools": [breaks]}), caller_of(breaks, 2), {}, "`breaks`"),
    "exit in an async tool": (Kind({"tools": [breaks_later]}), caller_of(breaks_later, 2), {}, "`breaks_later`"),
    "interrupt in an async tool": (Kind({"tools": [breaks_later]}), caller_of(breaks_later, 3), {}, "`breaks_later`"),
    "reset": (
        Kind({"environment_factory": BreaksReset}, {"start": list(range(12))}), SPEAKER, {}, "`reset`.*BreaksReset",
    ),
    "rollout_func": (Kind({"rollout_func": breaks_loop}), SPEAKER, {}, r"`rollout_func` \(breaks_loop\).* 0 to 7"),
}  # fmt: skip


@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "ahead"])
@pytest.mark.parametrize("name", BROKEN)
def test_what_fails_ends_the_run_with_its_place(name, ahead, tmp_path):
    kind, speaker, settings, names = BROKEN[name]
    with pytest.raises(RolloutError, match=f"node 0, rank 0.*{names}") as raised:
        trained(tmp_path, kind, speaker=speaker, shuffle_dataset=False, max_staleness=int(ahead), **settings)
    assert "broken" in str(raised.value) and raised.value.__cause__ is not None
    if name != "rollout_func":
        row = int(re.search(r"row (\d+) of this rank", str(raised.value))[1])
        assert 0 <= row < 2 * GROUP and (name != "reset" or row >= GROUP)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("tool", [breaks, breaks_later])
def test_wrong_arguments_are_no_error_of_the_tool(tool, ahead, tmp_path):
    speaker = Speaker({tool.__name__: [call_of(tool.__name__, wrong=1)]})
    settings = RAISES | {"max_staleness": ahead, "max_steps": 2}
    _, seen = trained(tmp_path, Kind({"tools": [tool]}), speaker=speaker, **settings)
    messages = [message for one in seen.rounds for row in one["completions"] for message in row]
    (answer,) = {message["content"] for message in messages if message["role"] == "tool"}
    assert "'wrong'" in answer


def test_answers_of_a_turn_have_trls_order(tmp_path, monkeypatch):
    """Wrong arguments of an async tool are answered at once, before the tools that are awaited."""

    def speak(conversation: str, seed: int) -> str:
        calls = call_of("ask", question=2) + call_of("ask", wrong=1)
        return "so be it" if "<tool_response>" in conversation else calls

    kind, found = Kind({"tools": [agent_kinds.ask]}), []
    for number in range(2):
        found.append(trained(tmp_path / str(number), kind, speaker=speak, max_steps=1)[1].rounds[0]["completions"])
        monkeypatch.setattr(ToolCalls, "watch", lambda *_: None)  # TRL's own dictionaries
    tools = [message["content"] for message in found[0][0] if message["role"] == "tool"]
    assert found[0] == found[1] and ["error" in one for one in tools] == [True, False]


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_error_of_an_earlier_run_does_not_end_the_next_one(ahead, tmp_path):
    working = []

    async def look(number: int) -> str:
        """
        Looks.

        Args:
            number: A number.
        """
        if not working:
            raise ValueError("the service is down")
        return "fine"

    with engines_here(caller_of(look, 1)):
        trainer = ours(tmp_path, Seen(), chats(12), {"tools": [look]}, max_staleness=ahead, **RAISES)
        with pytest.raises(RolloutError, match="the service is down"):
            trainer.train()
        working.append(True)
        trainer.train()
        trainer.close()


@pytest.mark.parametrize("ahead", [0, 1])
def test_ctrl_c_is_nobodys_error(ahead, tmp_path):
    """In the main thread it is the user's."""
    with pytest.raises(RolloutError if ahead else KeyboardInterrupt, match="broken"):
        trained(tmp_path, Kind({"tools": [breaks]}), speaker=caller_of(breaks, 3), max_staleness=ahead)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_reset_in_a_tool_is_no_row_of_trls(ahead, tmp_path):
    class ResetsItself(agent_kinds.Counter):
        async def raise_by(self, step: int) -> str:
            """
            Begins again.

            Args:
                step: A number.
            """
            self.reset(start=step)
            return "again"

    kind = Kind({"environment_factory": ResetsItself}, {"start": list(range(12))})
    _, seen = trained(tmp_path, kind, max_staleness=ahead, max_steps=2)
    assert "again" in str(seen.rounds)


def test_a_collective_in_a_rollout_func_that_runs_ahead_is_refused(tmp_path):
    with pytest.raises(RolloutError, match="`accelerator.gather`"):
        trained(tmp_path, Kind({"rollout_func": breaks_by_gathering}), max_staleness=1)


def generates_in_two_threads(prompts, trainer):
    ids = trainer.processing_class.apply_chat_template(prompts, tokenize=True, return_dict=True)["input_ids"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda row: trainer.vllm_generation.generate([row]), ids))


def test_two_calls_of_generate_at_once_in_one_rollout_are_refused(tmp_path):
    with pytest.raises(RolloutError, match="`generate`"):
        trained(tmp_path, Kind({"rollout_func": generates_in_two_threads}), max_staleness=1)
