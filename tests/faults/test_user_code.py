"""Reward functions that hang or give no reward, and tools that do not return: named with rank and row, and counted."""

import asyncio
import functools
import logging
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from store_host import topology_of
from trl.trainer import grpo_trainer
from waiting import HANG_S, until

from multinode_kit.faults import FAKE
from multinode_kit.nodes import Nodes
from trl_multinode.errors import RolloutError
from trl_multinode.rollouts import user_calls as calls_module
from trl_multinode.rollouts.reward_call import Call
from trl_multinode.rollouts.rewards import RewardCalls
from trl_multinode.rollouts.tool_calls import ToolCalls
from trl_multinode.run.endings.exit_codes import USER_CODE

SCRIPT = Path(__file__).parent / "scripts" / "rewards.py"
LIMIT_S = 0.2


@pytest.mark.zero3
@pytest.mark.two_node
@pytest.mark.nightly
def test_rows_18_19_a_rank_without_rewards_is_counted_and_one_that_hangs_ends_the_run(tmp_path):
    with Nodes(
        2, 1, folder=tmp_path, env={"TRL_MULTINODE_ENGINE_MODULE": FAKE}, forked=True
    ) as nodes:
        nodes.launch(SCRIPT, str(tmp_path))
        nodes.wait_for(1, "HANGS", timeout_s=HANG_S)
        assert all(nodes.wait(timeout_s=HANG_S))
        logs = [nodes.rank_log(rank) for rank in range(2)]
    counted = [line for line in logs[0].splitlines() if line.startswith("LOGGED")]
    assert counted == ["LOGGED [1, 4.0]", "LOGGED [2, 0.0]"]
    (said,) = [
        line for log in logs for line in log.splitlines() if "`rewards/all_nan_rows`" in line
    ]
    assert "step 1: " in said and "4 rows of rank 1 (node 1)" in said
    lines = {log.splitlines()[-1] for log in logs}
    assert len(lines) == 1, lines
    line = lines.pop()
    assert re.search(
        r"node 1, rank 1, phase reward: the reward function `plain` .* \d+ s, in row 2 .* rows 0 to 3; ",
        line,
    )
    assert "(verify)" in line and "`call_timeout`" in line


class Hung:
    """A rank whose trainer scores in a thread; the watch thread's part is called here."""

    def __init__(self, *functions, timeout_s: float | None = LIMIT_S):
        self.reports: list[tuple[str, int]] = []
        self.calls = RewardCalls(
            topology_of(0), timeout_s, lambda text, code: self.reports.append((text, code))
        )
        names = [getattr(function, "__name__", "named") for function in functions]
        self.trainer = SimpleNamespace(reward_funcs=list(functions), reward_func_names=names)
        self.returned: list = []

    def score(self, rows: int = 3, **columns) -> None:
        with self.calls.limited(self.trainer):
            for function in self.trainer.reward_funcs:
                texts = [f"text {row}" for row in range(rows)]
                output = function(
                    prompts=texts, completions=texts, completion_ids=[[1]] * rows, **columns
                )
                self.returned.append(asyncio.run(output) if asyncio.iscoroutine(output) else output)

    def end(self, hold: threading.Event, **columns) -> tuple[str, int]:
        """The first report of a function that hangs until `hold` is set."""
        return first_report(self, lambda: self.score(**columns), hold)


def first_report(rank, call, hold: threading.Event) -> tuple[str, int]:
    """The first report while `call` runs in a thread; this thread does the watch thread's part."""
    thread = threading.Thread(target=call)
    thread.start()
    try:
        until(lambda: rank.calls.check() or rank.reports, "a report")
    finally:
        hold.set()
        thread.join()
    return rank.reports[0]


@pytest.fixture
def hold():
    return threading.Event()


def test_row_18_a_function_that_loops_over_the_rows_is_named_with_the_row(hold):
    def slow(prompts, completions, **_):
        return [
            row != 1 or hold.wait() for row, _ in enumerate(zip(prompts, completions, strict=True))
        ]

    text, code = Hung(slow).end(hold)
    assert code == USER_CODE
    line = r"the reward function `slow` .* \d+ s, in row 1 .* rows 0 to 2; "
    assert re.search(line, text)
    assert f"{__file__}:" in text and "`call_timeout` (got 0.2 s)" in text


def test_the_oldest_call_that_runs_is_named_with_its_seconds():
    rank = Hung(timeout_s=None)
    tools = ToolCalls(topology_of(0), None, print, False)
    assert rank.calls.state() == tools.state() == ""
    with tools.named("the tool `f`", ", for row 3 of this rank"), tools.named("the tool `g`", ""):
        assert tools.state() == "the tool `f`, for row 3 of this rank runs for 0 s and 1 more"
    assert tools.state() == ""


def test_row_18_a_function_that_has_left_its_loop_is_named_without_a_row(hold):
    def slow(completions, **_):
        rewards = [1.0 for _ in completions]
        hold.wait()
        return rewards

    text, _ = Hung(slow).end(hold)
    assert re.search(r"`slow` .* \d+ s; it is at", text)


def test_row_18_the_reward_of_an_environment_is_named_with_its_row(hold):
    class Game:
        def __init__(self, waits):
            self.waits = waits

        def get_reward(self):
            return hold.wait() if self.waits else 1.0

    def get_reward(environments, **_):  # as TRL makes it
        return [environment.get_reward() for environment in environments]

    text, _ = Hung(get_reward).end(hold, environments=[Game(False), Game(False), Game(True)])
    assert "in row 2 of this rank's rows 0 to 2" in text and "(get_reward)" in text


def test_row_18_an_async_function_is_named_with_the_place_where_it_waits(hold):
    async def ask() -> None:
        while not hold.is_set():
            await asyncio.sleep(0.01)

    async def judged(completions, **_):
        for _ in completions:
            await ask()
        return [0.5] * len(completions)

    for function in (judged, functools.partial(judged, extra=1)):
        hold.clear()
        text, code = Hung(function).end(hold)
        assert code == USER_CODE and "in row 0 of this rank's rows 0 to 2" in text
        assert "(judged), " in text and "(ask), " in text


def test_row_18_functions_that_return_in_time_and_reward_models_are_left_alone():
    class Model(torch.nn.Module):
        def forward(self, **_):
            return [2.0]

    def quick(completions, **_):
        assert isinstance(completions, list) and completions[1:] == ["text 1", "text 2"]
        return [float(len(text)) for text in completions]

    model = Model()
    hung = Hung(quick, model)
    functions = hung.trainer.reward_funcs
    hung.score()
    hung.calls.check()
    assert hung.reports == [] and hung.returned == [[6.0] * 3, [2.0]]
    assert hung.trainer.reward_funcs is functions
    with hung.calls.limited(hung.trainer):
        assert hung.trainer.reward_funcs[1] is model


def test_row_18_an_error_of_the_function_is_raised_and_its_call_has_ended(monkeypatch):
    def broken(**_):
        raise ValueError("no such row")

    hung = Hung(broken)
    with pytest.raises(ValueError, match="no such row"):
        hung.score()
    later = time.monotonic() + 2 * LIMIT_S
    monkeypatch.setattr(calls_module.time, "monotonic", lambda: later)
    hung.calls.check()
    assert hung.reports == []


def test_row_18_time_in_which_the_process_was_stopped_does_not_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(calls_module.time, "monotonic", lambda: now[0])
    hung = Hung(timeout_s=60.0)
    with hung.calls.open_call(Call("slow")):
        for now[0] in (1.0, *range(500, 560, 4)):  # stopped from second 1 to second 500
            hung.calls.check()
        assert hung.reports == []
        now[0] = 560.0
        hung.calls.check()
        assert len(hung.reports) == 1


def test_row_18_without_the_setting_the_functions_get_plain_lists():
    """Some libraries take no subclass of `list`; only the limit needs rows that know where a loop is."""
    seen = []

    def mine(prompts, **given):
        seen.extend(map(type, [prompts, *given.values()]))
        return [1.0] * len(prompts)

    hung = Hung(mine, timeout_s=None)
    hung.score()
    assert seen == [list] * 3 and hung.trainer.reward_funcs == [mine]


def test_row_19_rows_without_a_reward_are_counted_and_their_rank_is_named_once(caplog):
    nan = float("nan")
    one_of_two = torch.tensor([[1.0, nan], [nan, 2.0]])
    of_ranks = [
        one_of_two,
        torch.full((2, 2), nan),
        torch.tensor([[nan, nan], [3.0, 4.0]]),
        one_of_two,
    ]
    calls = RewardCalls(topology_of(0), None, print)
    with caplog.at_level(logging.WARNING, logger="trl_multinode"):
        assert calls.count_all_nan(torch.cat(of_ranks), 7) == 3
        assert calls.count_all_nan(torch.cat(of_ranks), 8) == 3
    (record,) = caplog.records
    text = record.getMessage()
    assert "step 7: " in text and "2 rows of rank 1 (node 0)" in text and "rank 0" not in text
    assert calls.count_all_nan(torch.zeros(8, 0), 9) == 0


def test_row_19_only_rank_0_warns_and_rewards_that_differ_do_not(caplog):
    calls = RewardCalls(topology_of(1), None, print)
    assert calls.count_all_nan(torch.full((8, 1), float("nan")), 1) == 8
    assert RewardCalls(topology_of(0), None, print).count_all_nan(torch.ones(8, 1), 1) == 0
    assert not caplog.records


# ---- tools


class Watched:
    """Tools of a batch of four rows, the first of which is row 4 of its rank."""

    def __init__(self, sync=None, later=None, timeout_s: float | None = LIMIT_S):
        self.reports: list[tuple[str, int]] = []
        self.calls = ToolCalls(
            topology_of(2), timeout_s, lambda text, code: self.reports.append((text, code)), False
        )
        self.trainer = SimpleNamespace(
            _sync_tool_dicts=[{"sync": sync} if sync else {} for _ in range(4)],
            _async_tool_dicts=[{"later": later} if later else {} for _ in range(4)],
        )
        self.calls.watch(self.trainer, 4, [])


def test_a_tool_that_waits_is_named_with_its_row_and_its_line(hold):
    def ask(number: int) -> None:
        hold.wait()

    watched = Watched(sync=ask)
    text, code = first_report(
        watched, lambda: watched.trainer._sync_tool_dicts[2]["sync"](number=1), hold
    )
    assert code == USER_CODE
    assert re.search(r"the tool `sync` .* \d+ s, for row 6 of this rank; ", text)
    assert f"{__file__}:" in text and "(ask)" in text and "`call_timeout` (got 0.2 s)" in text


def test_an_async_tool_is_named_with_the_place_where_it_waits(hold):
    async def wait() -> None:
        while not hold.is_set():
            await asyncio.sleep(0.01)

    async def ask(number: int) -> None:
        await wait()

    watched = Watched(later=ask)
    text, _ = first_report(
        watched, lambda: asyncio.run(watched.trainer._async_tool_dicts[3]["later"](number=1)), hold
    )
    assert re.search(r"the tool `later` .* \d+ s, for row 7 of this rank; ", text)
    assert "(wait)" in text


def test_a_reset_that_waits_is_named_with_its_row(hold):
    class Game:
        def reset(self, **row) -> None:
            if row["number"] == 1:
                hold.wait()

    def reset_rows() -> None:
        with watched.calls.naming(SimpleNamespace(rollout_func=None), 2):
            for number in range(2):
                game.reset(number=number)

    watched = Watched()
    game = watched.calls.watch_reset(Game())
    text, _ = first_report(watched, reset_rows, hold)
    assert re.search(r"`reset` of the environment Game .* \d+ s, for row 1 of this rank", text)


def test_tools_that_return_are_never_named_and_without_a_limit_none_is(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(calls_module.time, "monotonic", lambda: now[0])

    def work() -> None:
        now[0] += 0.9 * LIMIT_S
        watched.calls.check()

    for timeout_s, calls in ((LIMIT_S, 4), (LIMIT_S / 1000, 1), (None, 10_000)):
        watched = Watched(sync=work, timeout_s=timeout_s)
        for _ in range(calls):
            watched.trainer._sync_tool_dicts[0]["sync"]()
            watched.calls.check()
        assert len(watched.reports) == (1 if timeout_s == LIMIT_S / 1000 else 0)


# ---- TRL's own method, with the limit


@pytest.fixture
def scored(monkeypatch):
    """Scores three rows by TRL's method with the limit on; `gather` of one rank returns what it got."""
    monkeypatch.setattr(grpo_trainer, "gather", lambda rewards: rewards)
    thread, loop, ready = grpo_trainer.start_event_loop_in_daemon(name="rewards")
    ready.wait(HANG_S)

    def score(*functions) -> torch.Tensor:
        trainer = SimpleNamespace(
            accelerator=SimpleNamespace(device=torch.device("cpu"), is_main_process=True),
            args=SimpleNamespace(report_to=[]),
            state=SimpleNamespace(global_step=0),
            environments=None,
            async_loop=loop,
            reward_funcs=list(functions),
            reward_func_names=[grpo_trainer.get_callable_name(function) for function in functions],
            reward_processing_classes=[None] * len(functions),
            _log_completion_extra=None,
            _log_metric=None,
        )
        texts = ["a", "bb", "ccc"]
        with RewardCalls(topology_of(0), HANG_S, print).limited(trainer):
            inputs = [{"prompt": text, "answer": 1.0} for text in texts]
            return grpo_trainer.GRPOTrainer._calculate_rewards(
                trainer, inputs, texts, texts, [[1]] * 3
            )

    yield score
    loop.call_soon_threadsafe(loop.stop)
    thread.join(HANG_S)


class Judge:
    """An async function as an object."""

    async def __call__(self, completions, answer, **_):
        await asyncio.sleep(0)
        return [None, *answer[1:]]


def lengths(completions, **_):
    return [float(len(text)) for text in completions]


def test_trl_gets_the_same_rewards_through_the_limit(scored):
    found = scored(lengths, Judge(), functools.partial(lengths, extra=1))
    assert torch.equal(
        found.nan_to_num(-1.0), torch.tensor([[1.0, -1.0, 1.0], [2.0, 1.0, 2.0], [3.0, 1.0, 3.0]])
    )


async def later(value: object) -> object:
    return value


NO_REWARDS = {
    "too few": ([1.0, 2.0], "2 rewards for 3 completions"),
    "None": (None, "type NoneType"),
    "a number": (1.0, "type float"),
    "a text": ("0.5", "type str"),
    "a dictionary": ({"reward": [1.0]}, "type dict"),
    "texts": (["0.5", "1", "2"], "row 0, got a value of type str"),
    "a list of lists": ([1.0, [2.0], 3.0], "row 1, got a value of type list"),
    "an infinite reward": ([1.0, 2.0, float("-inf")], "row 2, got a value of type float"),
    "no float": ([10**400, 2.0, 3.0], "row 0, got a value of type int"),
    "a tensor with columns": (torch.ones(3, 2), "row 0, got a value of type Tensor"),
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("returned", "what"), NO_REWARDS.values(), ids=NO_REWARDS.keys())
def test_row_19_a_function_that_returns_no_rewards_is_named_with_what_it_returned(
    scored, returned, what, is_async
):
    async def judge(**_):
        return returned

    def judge_now(**_):
        return returned

    name = "judge" if is_async else "judge_now"
    with pytest.raises(RolloutError, match=f"`{name}` returned .*{what}"):
        scored(judge if is_async else judge_now)


def test_row_19_a_coroutine_that_nobody_awaits_is_named_with_the_cure(scored):
    with pytest.raises(
        RolloutError, match="`<lambda>` returned a value of type coroutine. Declare it .*async def"
    ):
        scored(lambda **_: later([1.0]))


@pytest.mark.parametrize(
    "returned", [torch.tensor([1, 2, 3]), np.array([1.0, 2.0, 3.0]), (1, 2.0, True)], ids=type
)
def test_row_19_tensors_arrays_and_tuples_are_rewards(scored, returned):
    assert scored(lambda **_: returned).flatten().tolist() == [1.0, 2.0, float(returned[2])]
