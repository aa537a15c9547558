"""Nothing a test started may be left when it ends: processes, shared memory, environment."""

import gc
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch's store looks up the name of every address that connects, its server too. Where a name server loses one query
# in ten, that took 5 s each time, which is longer than most limits in these tests
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import pytest
import torch
from costs import FileCosts, budgets, file_of, name_of, parts
from private_memory import make_shared_memory_private, note_segments, unused_segments
from store_host import StoreHost

from multinode_kit.forking import template_pids
from trl_multinode.wire.supervisor import descendants, is_resource_tracker, title_of


@pytest.fixture
def store():
    """The store of a run, in a process of its own."""
    host = StoreHost()
    yield host
    host.end()


@pytest.fixture
def fault_seconds(record_property):
    """Note the seconds from a fault to its end, which `make faults` records."""
    return lambda seconds: record_property("seconds", round(seconds, 1))


# Names of the library's threads, or their beginnings; `printer` lives as long as the process
RUN_THREADS = ("watch", "owner", "progress-lines", "weight sync", "restart of engine")
ROLLOUT_THREADS = ("open-groups", "rollouts")


def our_threads() -> set[threading.Thread]:
    """Return the live threads that must end with their trainer, its engines, or its open groups."""
    return {
        thread
        for thread in threading.enumerate()
        if thread.name.startswith(RUN_THREADS + ROLLOUT_THREADS)
    }


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--part", metavar="K/N", help="only part K (from 0) of N parts of the files, of equal cost"
    )
    parser.addoption("--record-budgets", action="store_true", help="write tests/budgets.json")


def pytest_configure(config):
    distributes = (
        bool(getattr(config.option, "numprocesses", None))
        and "PYTEST_XDIST_WORKER" not in os.environ
    )
    if not distributes:
        make_shared_memory_private()
    # of a shell's background job; tests send Ctrl-C
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # forked ranks would wait for the threads of an OpenMP pool, which a fork does not have
    torch.set_num_threads(1)
    config.pluginmanager.register(FileCosts(config.getoption("--record-budgets")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Begin with the most expensive files; with `--part`, keep one part of them."""
    allowed = budgets()

    costs: dict[str, float] = defaultdict(float)
    for file, name in {(file_of(item), name_of(item)) for item in items}:
        costs[file] += allowed.get(name, {}).get("cpu_s", 0)
    items.sort(key=lambda item: (-costs[file_of(item)], file_of(item)))
    if part := config.getoption("--part"):
        index, count = map(int, part.split("/"))
        kept = parts(costs, count)[index]
        config.hook.pytest_deselected(items=[item for item in items if file_of(item) not in kept])
        items[:] = [item for item in items if file_of(item) in kept]


def pytest_collection_finish():
    """Exempt imported libraries from garbage collection, which every `train()` starts: 0.5 s each time."""
    gc.collect()
    gc.freeze()


REAL = {"engine", "zero3", "two_node"}
skipped_for_real: list[str] = []


def pytest_runtest_logreport(report):
    """With TRL_MULTINODE_NO_SKIPS=1 (CI) a test on the real stack may not be skipped.

    With `without-packages` a test that lacks Debian packages may be.
    """
    rule = os.environ.get("TRL_MULTINODE_NO_SKIPS")
    excused = rule == "without-packages" and "Debian package" in str(report.longrepr)
    if report.skipped and rule and not excused and REAL & report.keywords.keys():
        skipped_for_real.append(report.nodeid)


def pytest_unconfigure():
    """Else the libraries report their objects as leaked when the interpreter ends."""
    gc.unfreeze()


def pytest_sessionfinish(session):
    if skipped_for_real:
        print(f"\nskipped, and may not be: {skipped_for_real}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_runtest_teardown():
    note_segments()


def what_stays(left: Callable[[], set]) -> set:
    """Return what is left when it has not become empty within a minute; on a loaded machine an end takes seconds."""
    deadline = time.monotonic() + 60
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def processes_of_tests() -> set[tuple[int, str]]:
    """Return id and title of this process's descendants. The templates live as long as the session."""
    children = [
        p for p in descendants() if p.pid not in template_pids() and not is_resource_tracker(p)
    ]
    return {(p.pid, title) for p in children if (title := title_of(p))}


@pytest.fixture(autouse=True)
def handles_signals_as_before():
    """A stop signal that stays ignored would be ignored by every process that a later test starts."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    changed = {
        number.name for number, handler in before.items() if signal.getsignal(number) != handler
    }
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not changed, f"handlers of {changed} changed"


@pytest.fixture(autouse=True, scope="module")
def leaves_nothing_behind():
    """Per module, because a module may share one engine among its tests."""
    files, environment, threads = unused_segments(), dict(os.environ), our_threads()
    yield
    left = what_stays(lambda: our_threads() - threads)
    assert not left, (
        f"threads left, which later tests in this process would count as theirs: {left}"
    )
    left = what_stays(processes_of_tests)
    assert not left, f"processes left: {left}"
    left = what_stays(lambda: unused_segments() - files)
    assert not left, f"shared memory left: {left}"
    changed = {
        k for k in environment.keys() | os.environ.keys() if environment.get(k) != os.environ.get(k)
    }
    assert not (
        changed
        - {
            "PYTEST_CURRENT_TEST",
            "PYTORCH_NVML_BASED_CUDA_CHECK",
            "TORCHINDUCTOR_CACHE_DIR",
            "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",  # torch sets it when vLLM is imported
        }
    ), f"environment changed: {changed}"


@pytest.fixture
def loopback_hub(monkeypatch):
    """A hub for this process: huggingface_hub has read its variables, hence the constants. It retries at once."""
    from types import SimpleNamespace

    from huggingface_hub import constants
    from huggingface_hub.utils import _http, close_session

    from multinode_kit.hub import LoopbackHub

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None))  # 23 s
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()
    with LoopbackHub() as hub:
        yield hub
    close_session()
