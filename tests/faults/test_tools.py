"""Tools that do not return: named with tool, rank and row, wherever they run."""

import asyncio
import re
import threading
from types import SimpleNamespace

import pytest
from store_host import topology_of
from waiting import until

from trl_multinode.rollouts import rewards as rewards_module
from trl_multinode.rollouts.tool_calls import ToolCalls
from trl_multinode.run.endings.exit_codes import USER_CODE

LIMIT_S = 0.2


class Watched:
    """Tools of a batch of four rows, the first of which is row 4 of its rank; `end` does the watch thread's part."""

    def __init__(self, sync=None, later=None, timeout_s: float | None = LIMIT_S):
        self.reports: list[tuple[str, int]] = []
        self.calls = ToolCalls(topology_of(2), timeout_s, False, lambda text, code: self.reports.append((text, code)))
        self.trainer = SimpleNamespace(
            _sync_tool_dicts=[{"sync": sync} if sync else {} for _ in range(4)],
            _async_tool_dicts=[{"later": later} if later else {} for _ in range(4)],
        )
        self.calls.watch(self.trainer, first_row=4)

    def end(self, call, hold: threading.Event) -> tuple[str, int]:
        """The first report while `call` runs in a thread."""
        thread = threading.Thread(target=call)
        thread.start()
        try:
            until(lambda: self.calls.check() or self.reports, "a report")
        finally:
            hold.set()
            thread.join()
        return self.reports[0]


@pytest.fixture
def hold():
    return threading.Event()


def test_a_tool_that_waits_is_named_with_its_row_and_its_line(hold):
    def ask(number: int) -> None:
        hold.wait()

    watched = Watched(sync=ask)
    text, code = watched.end(lambda: watched.trainer._sync_tool_dicts[2]["sync"](number=1), hold)
    assert code == USER_CODE
    assert re.search(r"the tool `sync` .* \d+ s, for row 6 of this rank; ", text)
    assert f"{__file__}:" in text and "(ask)" in text and "`tool_timeout` (got 0.2 s)" in text


def test_an_async_tool_is_named_with_the_place_where_it_waits(hold):
    async def wait() -> None:
        while not hold.is_set():
            await asyncio.sleep(0.01)

    async def ask(number: int) -> None:
        await wait()

    watched = Watched(later=ask)
    text, _ = watched.end(lambda: asyncio.run(watched.trainer._async_tool_dicts[3]["later"](number=1)), hold)
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
    text, _ = watched.end(reset_rows, hold)
    assert re.search(r"`reset` of the environment Game .* \d+ s, for row 1 of this rank", text)


def test_tools_that_return_are_never_named_and_without_a_limit_none_is(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(rewards_module.time, "monotonic", lambda: now[0])

    def work() -> None:
        now[0] += 0.9 * LIMIT_S
        watched.calls.check()

    for timeout_s, calls in ((LIMIT_S, 4), (LIMIT_S / 1000, 1), (None, 10_000)):
        watched = Watched(sync=work, timeout_s=timeout_s)
        for _ in range(calls):
            watched.trainer._sync_tool_dicts[0]["sync"]()
            watched.calls.check()
        assert len(watched.reports) == (1 if timeout_s == LIMIT_S / 1000 else 0)
