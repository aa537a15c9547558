"""`trl_multinode.testing.faults`: the words that reach an engine say what the test asked for, and nothing else."""

import sys

import pytest

from trl_multinode.testing.faults import FAKE, HOOK, REAL, Faults

pytestmark = pytest.mark.nightly  # test_conformance.py expects each of these faults of both engines


def test_an_engine_reads_from_its_command_line_what_the_test_asked_for(monkeypatch):
    asked = Faults().lose_load(2).lie_about_load(4, 5).stale_head(7).slow_engine(1, 0.5).slow_tokens(0.02)
    module, *words = asked.engine(FAKE).split()
    assert module == FAKE
    monkeypatch.setattr(sys, "argv", ["engine.py", *words, "/run/spec.json"])
    found = Faults.from_command_line()
    updates = range(1, 10)
    assert [u for u in updates if found.skips_load(u)] == [2, 4, 5]
    assert [u for u in updates if found.skips_commit(u)] == [2]
    assert [u for u in updates if found.keeps_head(u)] == [7]
    assert [found.delay_s(index) for index in (0, 1, 11)] == [0.0, 0.5, 0.0] and found.token_delay_s() == 0.02
    monkeypatch.setattr(sys, "argv", ["engine.py", "/run/spec.json"])
    assert Faults.from_command_line() == Faults()
    variables = Faults().lose_load(3).environment(REAL)  # the product's engine accepts no faults, so another one runs
    assert variables == {HOOK: "trl_multinode.testing.faulty_engine skip_load@3-3"}
