"""Nothing a test started may be left when it ends: processes, shared memory, environment."""

import os
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import psutil  # noqa: E402
import pytest  # noqa: E402


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.fixture(autouse=True, scope="module")
def leaves_nothing_behind():
    """Per module, because a module may share one engine among its tests."""
    files, environment = shared_memory(), dict(os.environ)
    yield
    children = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    names = {p.pid: " ".join(p.cmdline())[:120] for p in children if "resource_tracker" not in " ".join(p.cmdline())}
    assert not names, f"processes left: {names}"
    assert not (left := shared_memory() - files), f"shared memory left: {left}"
    changed = {k for k in environment.keys() | os.environ.keys() if environment.get(k) != os.environ.get(k)}
    assert not (changed - {"PYTEST_CURRENT_TEST"}), f"environment changed: {changed}"
