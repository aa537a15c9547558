"""The check says how long a checkpoint may take after a signal, and refuses a signal that cannot pre-empt a run."""

from dataclasses import replace

import check_kit
from check_kit import launched, only_problem

from trl_multinode.tools.check.report import notes

quiet_machine, write = check_kit.quiet_machine, check_kit.write


def test_row_15_the_seconds_that_torchrun_leaves_are_named(write, monkeypatch):
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    assert any("SIGHUP 25 s" in note for note in notes(launched(write())))
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    assert any("115 s" in note and "120 s" in note for note in notes(launched(write())))


def test_row_15_the_seconds_are_those_of_the_scripts_own_grace(write, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "900")
    launch = launched(write())
    asked = replace(launch, script=replace(launch.script, values={"preemption_grace": 120.0}))
    assert any("SIGHUP 120 s" in note for note in notes(asked))


def test_row_15_a_signal_of_the_environment_that_cannot_preempt_is_a_problem(write, monkeypatch):
    monkeypatch.setenv("TRL_MULTINODE_PREEMPT_SIGNAL", "KILL")
    problem = only_problem(write())
    assert "TRL_MULTINODE_PREEMPT_SIGNAL" in problem.what and "'KILL'" in problem.what
