"""pytest plugin for the processes that run TRL's tests: the mode's engine, skips with reasons, results as JSON lines.

`run_suite.py` loads it with `-p suite_plugin` and describes the run in the environment variable TRL_SUITE.
"""

import functools
import gc
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from source_names import hub_ids

RUN = json.loads(os.environ["TRL_SUITE"])  # see `run_suite.py: Suite.run`
ENGINE_MODULE = "TRL_MULTINODE_ENGINE_MODULE"


# ---- our classes and their engines


def pytest_configure(config: pytest.Config) -> None:
    for module, name in RUN["imports"]:
        add_if_missing(import_module(module), name)
    use_cpu_without_gpu()
    score_trained_tokens_only()
    if RUN["mode"] == "trl":
        return
    import trl_multinode

    for name in ("GRPOConfig", "RLOOConfig"):
        config_class = getattr(trl_multinode, name)
        if RUN["mode"] == "plain":  # TRL's default, which TRL's tests rely on
            config_class.__init__ = with_default(config_class.__init__, use_vllm=False)
    # workers have this one's environment
    if RUN["mode"] == "node" and "PYTEST_XDIST_WORKER" not in os.environ:
        from multinode_kit.faults import FAKE
        from multinode_kit.forking import from_template

        os.environ[ENGINE_MODULE] = from_template(FAKE)
    if RUN["mode"] == "vllm":
        os.environ[ENGINE_MODULE] = "multinode_kit.forked_vllm"


def use_cpu_without_gpu() -> None:
    """Set `use_cpu=True` in every config on a machine without a GPU, as TRL's own fixtures do since 1.10."""
    import torch
    from transformers import TrainingArguments

    check = TrainingArguments.__post_init__

    def on_cpu(self):
        self.use_cpu = True
        check(self)

    if not torch.cuda.is_available():
        TrainingArguments.__post_init__ = on_cpu


def score_trained_tokens_only() -> None:
    """Make TRL compute log-probs of the trained tokens only, as it does on GPUs: elsewhere it also scores the prompt,
    and a prompt with tools has four times the tokens of its completion."""
    utils = import_module("trl.trainer.utils")
    if hasattr(utils, "_use_triton"):  # in this module it only makes that choice
        utils._use_triton = lambda device: True


def add_if_missing(module: ModuleType, name: str) -> None:
    """Give a module of TRL a name that tests of another version import: no optional library is there."""
    if name.startswith("is_") and not hasattr(module, name):
        setattr(module, name, lambda: False)


def with_default(function: Callable, **defaults) -> Callable:
    """Return `function` with other defaults for some keywords."""

    @functools.wraps(function)
    def wrapper(*args, **keywords):
        return function(*args, **{**defaults, **keywords})

    return wrapper


@pytest.fixture(autouse=True)
def end_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the engines of the test's trainers: TRL's tests never close a trainer."""
    if RUN["mode"] not in ("node", "vllm"):
        yield
        return
    from trl_multinode.host import NodeHost

    hosts, start = [], NodeHost.__init__

    def recorded(self, *args, **keywords):
        hosts.append(self)
        start(self, *args, **keywords)

    monkeypatch.setattr(NodeHost, "__init__", recorded)
    yield
    for host in hosts:
        host.close()


# ---- which tests run


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [
        item for item in items if any(re.search(pattern, item.nodeid) for pattern in RUN["chosen"])
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
    for item in items:
        keep_marks(item)
        if (reason := missing(item)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason), append=False)


def pytest_collection_finish() -> None:
    """Exempt the imported modules from garbage collection: TRL's tests collect several times each."""
    gc.collect()
    gc.freeze()


def keep_marks(item: pytest.Item) -> None:
    """Remove TRL's marks that skip a test for want of a vLLM server: in node mode there are engines."""
    for node in item.listchain():
        node.own_markers = [
            mark for mark in node.own_markers if mark.kwargs.get("reason") not in RUN["unskipped"]
        ]


def missing(item: pytest.Item) -> str | None:
    """Return the reason if a test names a model or data without a stand-in, in its source or its parameters."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    named = {value for value in parameters if isinstance(value, str)}
    source = inspect.getsource(item.function)
    return next(
        (
            RUN["missing"][name]
            for name in sorted(hub_ids(source) | named)
            if name in RUN["missing"]
        ),
        None,
    )


# ---- results


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Count a file that cannot be imported as a test that failed."""
    if report.failed:
        record(report.nodeid, report.outcome, why(report))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        record(report.nodeid, report.outcome, why(report))


def record(test: str, outcome: str, why: str) -> None:
    """Append an outcome to the results, on the controller if there are workers."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(RUN["results"]).open("a") as results:
            results.write(json.dumps({"test": test, "outcome": outcome, "why": why}) + "\n")


def why(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the reason of a skip, or the last line of the error."""
    if report.passed:
        return ""
    if report.skipped:
        return (
            report.longrepr[2].removeprefix("Skipped: ")
            if isinstance(report.longrepr, tuple)
            else report.wasxfail
        )
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr).strip().splitlines()[-1]
    return " ".join(text.split())[:300]
