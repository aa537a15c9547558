"""`trl_multinode.testing.faults`: the words that reach an engine say what the test asked for, and nothing else."""

import sys

from trl_multinode.testing.faults import FAKE, HOOK, REAL, Faults


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


def test_without_words_nothing_is_faulty(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["engine.py", "/run/spec.json"])
    found = Faults.from_command_line()
    assert found == Faults()
    assert (
        not any(found.skips_load(u) or found.keeps_head(u) for u in range(10))
        and found.delay_s(0) == found.token_delay_s() == 0.0
    )


def test_the_products_engine_accepts_no_faults_so_another_one_runs():
    variables = Faults().lose_load(3).environment(REAL)
    assert variables == {HOOK: "trl_multinode.testing.faulty_engine skip_load@3-3"}
    assert Faults().lose_load(3).environment() == variables
