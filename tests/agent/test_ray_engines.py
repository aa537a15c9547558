"""The number of engines on a Ray cluster, on a cluster that is made up."""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from refusals import refused

from trl_multinode.agent import ray_engines as module
from trl_multinode.agent.ray_engines import RayEngines
from trl_multinode.engine.agents import Measure, Notice
from trl_multinode.run.endings.exit_codes import CONFIGURATION, ENGINE
from trl_multinode.tools import main

JOIN = ["engines", "--join", "host"]


class End(NamedTuple):
    """As in `ray_cluster.py`, which imports Ray."""

    code: int | None
    cause: str


@dataclass
class Engine:
    """An engine of [`Cluster`]."""

    words: list[str]
    node: str
    leaves: bool = False
    end: End | None = None
    why: str = ""

    def look(self) -> End | None:
        return self.end

    def leave(self, why: str) -> None:
        self.leaves, self.why, self.end = True, why, End(0, "")


@dataclass
class Cluster:
    """Stands for the cluster, which has so many places."""

    places: int
    engines: list[Engine] = field(default_factory=list)
    nodes_drained: set[str] = field(default_factory=set)

    def answers(self) -> bool:
        return True

    def place(self, number: int, words: list[str], logs: str) -> Engine:
        node = f"node {number}" if len(self.engines) < self.places else ""
        self.engines.append(Engine(words, node))
        return self.engines[-1]

    def remove(self, engine: Engine) -> None:
        self.engines.remove(engine)

    def drained(self) -> set[str]:
        return self.nodes_drained


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    monkeypatch.setattr(module, "MEASURE_S", 0.0)


def engines_on(cluster: Cluster, **flags) -> RayEngines:
    usual = {"join": ("host", 29500), "logs": Path("logs"), "grace": 20.0, "tp": None}
    unset = {"engines": None, "autoscale": None, "once": False}
    return RayEngines(cluster, argparse.Namespace(**(usual | unset | flags)))


def test_an_engine_that_fails_is_replaced_and_one_that_is_refused_is_not():
    cluster = Cluster(2)
    engines = engines_on(cluster, engines=2, tp=4)
    assert not engines.keep() and len(cluster.engines) == 2
    assert cluster.engines[0].words[:4] == ["--join", "host:29500", "--grace", "20.0"]
    assert cluster.engines[0].words[4:] == ["--tp", "4"]
    first, second = cluster.engines
    first.end = End(ENGINE, "no memory")
    engines.keep()
    assert len(cluster.engines) == 2 and first not in cluster.engines
    second.end = End(CONFIGURATION, "no secret")
    engines.keep()
    (last,) = cluster.engines
    last.end = End(CONFIGURATION, "no secret")
    with refused("--ray", "Correct") as caught:
        engines.keep()
    assert len(caught.value.got) == 2 and all("no secret" in each for each in caught.value.got)


def test_with_once_the_command_ends_when_no_engine_with_a_place_is_left():
    cluster = Cluster(1)
    engines = engines_on(cluster, engines=2, once=True)
    engines.keep()
    placed, _ = cluster.engines
    assert "--once" in placed.words and not engines.keep()
    placed.end = End(0, "")
    assert engines.keep()


def test_the_measure_of_the_run_decides_and_its_reason_goes_with_each_change(monkeypatch):
    cluster = Cluster(2)
    measures = [Measure(step, 1, filled=0.9, waiting=0.5) for step in range(4)]
    measures += [Measure(step, 2, filled=0.1, waiting=0.0) for step in range(4, 9)]
    notices = (Notice("run", [], measure) for measure in measures)
    monkeypatch.setattr(module, "notice_at", lambda address: next(notices))
    engines = engines_on(cluster, autoscale=(1, 2))
    for _ in range(4):
        engines.keep()
    first, second = cluster.engines
    assert "--why" not in first.words and "wait" in second.words[second.words.index("--why") + 1]
    for _ in range(5):
        engines.keep()
    assert cluster.engines == [first] and "take over" in second.why


def test_an_engine_without_a_place_is_taken_back_and_a_drained_one_leaves():
    cluster = Cluster(1)
    engines = engines_on(cluster, engines=2)
    engines.keep()
    placed, waiting = cluster.engines
    cluster.nodes_drained = {placed.node}
    engines.keep()
    assert placed.leaves and len(cluster.engines) == 3
    engines.close()
    assert not cluster.engines and not waiting.leaves


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused("ray", "trl-multinode[ray]"):
        module._join(argparse.Namespace(tp=None))


@pytest.mark.parametrize(
    "words",
    [
        ["--engines", "2"],
        ["--autoscale", "1:2"],
        ["--ray", "--engine_gpus", "0"],
        ["--ray", "--num_engines", "2"],
        ["--ray", "--autoscale", "2:1"],
        ["--ray", "--autoscale", "1:2", "--engines", "1"],
    ],
)
def test_flags_that_do_not_fit_are_refused(words):
    assert main([*JOIN, *words]) == CONFIGURATION
