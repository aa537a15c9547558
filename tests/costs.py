"""Costs of each test file: CPU seconds, and the engines, launches and Pythons that it started.

`budgets.json` holds the budgets, of a file's nightly tests apart from those of the others. CPU seconds above a budget
are printed as `OVER BUDGET`, because they depend on the machine; a count above it fails the run, because counts are
exact. `--record-budgets` writes the file.
"""

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from multinode_kit.faults import FAULTY_REAL, FORKED, REAL, TREE
from multinode_kit.forking import FORK_EVENT, LAUNCHER_PROGRAM, VLLM_PROGRAM, template_pids

TESTS = Path(__file__).parent
BUDGETS = TESTS / "budgets.json"
COUNTS = ("engines", "launches", "pythons")
SLOWEST = 10
# A file below these CPU seconds that starts nothing needs no line
FREE_CPU_S = 10.0
# Between machines of the same kind, CPU seconds of a file differ by less than this
MACHINE_FACTOR = 1.5
TEMPLATE = "multinode_kit.template"
NIGHTLY = " (nightly)"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Costs = dict[str, float]


def budgets() -> dict[str, Costs]:
    """Return the budget of each file that has one; keys are paths below `tests/`."""
    return json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}


def file_of(item: pytest.Item) -> str:
    """Return the path of an item's file below `tests/`."""
    return str(item.path.relative_to(TESTS))


def name_of(item: pytest.Item) -> str:
    """Return the name of an item's budget."""
    return file_of(item) + (NIGHTLY if item.get_closest_marker("nightly") else "")


def parts(costs: dict[str, float], count: int) -> list[set[str]]:
    """Deal files into `count` parts of about equal cost: each file, the most expensive first, to the cheapest part."""
    dealt: list[set[str]] = [set() for _ in range(count)]
    totals = [0.0] * count
    for file in sorted(costs, key=lambda file: (-costs[file], file)):
        cheapest = totals.index(min(totals))
        dealt[cheapest].add(file)
        totals[cheapest] += costs[file] + 1  # a file without a budget is not free either
    return dealt


class FileCosts:
    """Plugin that adds up the costs of each file, in each xdist worker, and reports them at the end of the run."""

    def __init__(self, record: bool):
        self._record = record
        self._files: dict[str, Costs] = defaultdict(lambda: defaultdict(float))
        self._started: Costs = defaultdict(float)
        sys.addaudithook(self._audit)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        cpu, wall = cpu_seconds(), time.monotonic()
        self._started.clear()
        result = yield
        costs = self._files[name_of(item)]
        costs["cpu_s"] += cpu_seconds() - cpu
        costs["wall_s"] += time.monotonic() - wall
        for name, count in self._started.items():
            costs[name] += count
        return result

    def _audit(self, event: str, arguments: tuple) -> None:
        if event == "subprocess.Popen":
            kind = kind_of(arguments[1])
        elif event == FORK_EVENT:
            kind = "launches" if arguments[0] == LAUNCHER_PROGRAM else None
        else:
            return
        if kind is not None:
            self._started[kind] += 1

    def pytest_sessionfinish(self, session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["costs"] = {
                file: dict(costs) for file, costs in self._files.items()
            }
        elif self._record:
            write_budgets(self._files)
        elif BUDGETS.exists() and (counted := over_budget(self._files, COUNTS, 1.0)):
            print("\nmore than the budget of tests/budgets.json allows:", *counted, sep="\n  ")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        for file, costs in getattr(node, "workeroutput", {}).get("costs", {}).items():
            for name, value in costs.items():
                self._files[file][name] += value

    def pytest_terminal_summary(self, terminalreporter) -> None:
        slowest = sorted(self._files.items(), key=lambda each: -each[1]["cpu_s"])[:SLOWEST]
        terminalreporter.section("slowest files")
        for file, costs in slowest:
            counts = ", ".join(f"{costs[name]:.0f} {name}" for name in COUNTS if costs[name])
            terminalreporter.line(
                f"{costs['cpu_s']:7.1f} CPU s {costs['wall_s']:7.1f} s  {file}  {counts}"
            )
        for line in over_budget(self._files, ("cpu_s",), MACHINE_FACTOR):
            terminalreporter.line(f"OVER BUDGET {line}")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, of its children that have ended, and of the templates' children.

    A template's own seconds are its imports, which are no cost of the file that happens to be the first.
    """
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    for pid in template_pids():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(int(ticks) for ticks in fields[13:15]) / TICKS_PER_S
    return total


def kind_of(command: object) -> str | None:
    """Return what a command starts: one of `COUNTS`, or `None`."""
    words = [command] if isinstance(command, str | bytes | os.PathLike) else list(command)
    words = [os.fsdecode(word) for word in words]
    if not any(os.path.basename(word).startswith("python") for word in words[:10]):
        return None
    if "launch" in words and any("accelerate" in word for word in words):
        return "launches"
    if any("torchinductor" in word for word in words):
        return None  # torch tries a library that it has compiled, as often as its cache lacks one
    if TEMPLATE in words:
        return None  # whichever file of a worker is the first starts it
    if FORKED in words:
        return "engines" if VLLM_PROGRAM in words else None
    if {REAL, TREE, FAULTY_REAL} & set(words):
        return "engines"
    return "pythons"


def over_budget(files: dict[str, Costs], names: tuple[str, ...], factor: float) -> list[str]:
    """Return a line for each file that costs more than its budget in one of `names`."""
    allowed, lines = budgets(), []
    for file, costs in sorted(files.items()):
        budget = dict(allowed.get(file, {}))
        budget["cpu_s"] = max(FREE_CPU_S, budget.get("cpu_s", 0))
        for name in names:
            if costs.get(name, 0) > budget.get(name, 0) * factor:
                lines.append(f"{file}: {costs[name]:.0f} {name}, budget {budget.get(name, 0):.0f}")
    return lines


def write_budgets(files: dict[str, Costs]) -> None:
    """
    Raise the budgets of the files that ran to what they cost; drop those of files that do not exist any more.

    A run may execute only a part of a file, so a budget becomes smaller only if its line is removed before.
    """
    kept = {
        file: budget
        for file, budget in budgets().items()
        if (TESTS / file.removesuffix(NIGHTLY)).exists()
    }
    for file, costs in files.items():
        budget = kept.get(file, {})
        spent = {"cpu_s": round(costs["cpu_s"])} | {
            name: int(costs.get(name, 0)) for name in COUNTS
        }
        raised = {name: max(value, budget.get(name, 0)) for name, value in spent.items()}
        counts = {name: value for name, value in raised.items() if name in COUNTS and value}
        if counts or raised["cpu_s"] > FREE_CPU_S:
            kept[file] = {"cpu_s": raised["cpu_s"]} | counts
    lines = [f" {json.dumps(file)}: {json.dumps(kept[file])}" for file in sorted(kept)]
    BUDGETS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
