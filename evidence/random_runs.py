"""One run of [`random_faults.py`](random_faults.py): a signal to one of its processes, and what follows."""

import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from multinode_kit.faults import FAKE, Faults
from multinode_kit.nodes import Nodes
from multinode_kit.waiting import wait_until
from trl_multinode.node_settings import NodeSettings
from trl_multinode.saving.checkpoint_files import why_unfinished

SCRIPT = Path(__file__).with_name("named_engines.py")
NODES, RANKS = 2, 2
STEPS, SAVE_STEPS = 8, 2
LIMIT_S = 150.0  # for a run of 15 s
AFTERWARDS_S = 45.0  # torchrun kills a stopped rank after 30 s
ENVIRONMENT = Faults().slow_tokens(0.015).environment(FAKE)
SHORT_LIMITS = {"engine_stall_timeout": 10.0, "heartbeat_timeout": 12.0, "engine_restarts": 2}
KNOWN = {one.name for one in fields(NodeSettings)}
JOB = {
    "prompts": 64, "max_steps": STEPS, "per_device_train_batch_size": 4, "steps_per_generation": 1,
    "save_steps": SAVE_STEPS, "save_total_limit": 20, "max_completion_length": 12, "output": "run",
} | {name: value for name, value in SHORT_LIMITS.items() if name in KNOWN}  # fmt: skip


@dataclass
class Fault:
    """One signal to one process, after a step and some seconds."""

    kind: str
    signal: str
    node: int
    local_rank: int
    after_step: int
    delay_s: float

    @property
    def rank(self) -> int:
        return RANKS * self.node + self.local_rank

    @property
    def process(self) -> str:
        names = {"engine": f"engine 0 of node {self.node}", "rank": f"rank {self.rank}"}
        return names.get(self.kind, f"launcher of node {self.node}")

    @property
    def words(self) -> tuple[str, ...]:
        """What a line that names the process contains, one of these."""
        if self.kind != "launcher":
            return (self.process,)
        # the launcher passes a signal on to its ranks
        return (
            self.process,
            f"node {self.node}, rank",
        )

    @property
    def shown(self) -> str:
        return f"{self.process} | {self.signal} | step {self.after_step} + {self.delay_s} s"

    def pid(self, nodes: Nodes) -> int:
        if self.kind == "launcher":
            return nodes.launcher_pid(self.node)
        if self.kind == "rank":
            return nodes.rank_pid(self.rank)
        return int(nodes.wait_for(RANKS * self.node, "ENGINE ").split()[1])


@dataclass
class Outcome:
    """What a run did after its fault."""

    result: str  # "goes on", "ends", "bad"
    seconds: float
    why: list[str] = field(default_factory=list)  # of a bad one
    continued: bool | None = None  # launched again after its end, with equal losses

    @property
    def shown(self) -> str:
        continued = "" if self.continued is None else "yes" if self.continued else "no"
        return f"{self.result} | {self.seconds:.1f} | {continued}"


def launch(nodes: Nodes, folder: Path, name: str, **more) -> None:
    nodes.launch(SCRIPT, str(folder), json.dumps([JOB | {"name": name} | more]))


def results(folder: Path, name: str) -> list[dict]:
    """Rows and losses of every rank; empty for a rank that has logged nothing."""
    files = [folder / f"{name}_rank{rank}.json" for rank in range(NODES * RANKS)]
    found = [
        json.loads(file.read_text()) if file.exists() else {"rounds": [], "steps": {}}
        for file in files
    ]
    return [{part: one[part] for part in ("rounds", "steps")} for one in found]


def steps_done(folder: Path, name: str) -> int:
    return len(results(folder, name)[0]["steps"])


def last_steps(found: list[dict], first: int) -> list[dict]:
    """Results of the steps after `first`."""
    return [
        {"rounds": [one for one in rank["rounds"] if one["step"] >= first],
         "steps": {step: loss for step, loss in rank["steps"].items() if int(step) > first}}
        for rank in found
    ]  # fmt: skip


def run_with(fault: Fault, folder: Path, whole: list[dict]) -> Outcome:
    """Launch a run, send the signal, and judge what follows."""
    with Nodes(NODES, RANKS, folder=folder / "nodes", env=ENVIRONMENT, forked=True) as nodes:
        launch(nodes, folder, "run")
        if not wait_until(lambda: steps_done(folder, "run") >= fault.after_step, LIMIT_S):
            return Outcome("bad", 0.0, ["did not reach the step: " + nodes.tails()])
        time.sleep(fault.delay_s)
        pid, saved = fault.pid(nodes), (steps_done(folder, "run") - 1) // SAVE_STEPS
        os.kill(pid, getattr(signal, fault.signal))
        start = time.monotonic()
        # they wait for one that is stopped
        launchers = {nodes.launcher_pid(node) for node in range(NODES)}
        ended = wait_until(lambda: not set(all_pids(nodes)) - launchers - {pid}, LIMIT_S)
        seconds = time.monotonic() - start
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)  # a stopped launcher never ends by itself
        if not (ended and wait_until(lambda: not all_pids(nodes), AFTERWARDS_S)):
            return Outcome("bad", seconds, ["neither goes on nor ends in time", nodes.tails()])
        if results(folder, "run") == whole and nodes.wait(5) == [0] * NODES:
            return Outcome("bad" if left(nodes) else "goes on", seconds, left(nodes))
        why = wrong_end(nodes, fault) + left(nodes) + without_checkpoint(folder, saved)
        outcome = Outcome("bad" if why else "ends", seconds, why)
        outcome.continued = continues(nodes, folder, whole)
        return outcome


def all_pids(nodes: Nodes) -> list[int]:
    return [pid for node in range(NODES) for pid in nodes.pids(node)]


def left(nodes: Nodes) -> list[str]:
    """Processes and files that the run left."""
    files = [
        path.name for node in range(NODES) for path in nodes.tmpdir(node).glob("trl_multinode_*")
    ]
    return [f"left: {thing}" for thing in [*all_pids(nodes), *files]]


def wrong_end(nodes: Nodes, fault: Fault) -> list[str]:
    """What is wrong with the last lines of the survivors and with the exit codes."""
    why = [] if all(nodes.wait(5)) else [f"exit codes {nodes.wait(5)}"]
    logs = [nodes.rank_log(rank) for rank in range(NODES * RANKS)]
    if "pre-empted: " in logs[0]:  # by a signal to a rank, or to a launcher, which passes it on
        received = "".join(re.findall(r"node \d+, rank \d+: received SIG.*", "".join(logs)))
        named = (
            f"node {fault.node}, rank {fault.rank}: "
            if fault.kind == "rank"
            else f"node {fault.node}, "
        )
        return why if named in received else [*why, f"{fault.process} is not named: {received}"]
    survivors = [
        rank for rank in range(NODES * RANKS) if fault.kind != "rank" or rank != fault.rank
    ]
    lines = {(logs[rank].splitlines() or [""])[-1] for rank in survivors}
    if len(lines) != 1:
        return [*why, f"different lines: {lines}"]
    (line,) = lines
    return (
        why
        if any(word in line for word in fault.words)
        else [*why, f"{fault.process} is not named: {line}"]
    )


def without_checkpoint(folder: Path, saved: int) -> list[str]:
    return (
        []
        if not saved or whole_checkpoints(folder)
        else ["no whole checkpoint, although one was saved"]
    )


def whole_checkpoints(folder: Path) -> list[Path]:
    return [path for path in (folder / "run").glob("checkpoint-*") if why_unfinished(path) is None]


def continues(nodes: Nodes, folder: Path, whole: list[dict]) -> bool:
    """Launch the run again, and return whether it ends with the rows and losses of the run without a fault."""
    steps = [int(path.name.split("-")[1]) for path in whole_checkpoints(folder)]
    launch(nodes, folder, "again", resume=bool(steps))
    ended = wait_until(lambda: not all_pids(nodes), LIMIT_S) and nodes.wait(5) == [0] * NODES
    first = max(steps, default=0)
    return ended and last_steps(results(folder, "again"), first) == last_steps(whole, first)


def run_without_fault(folder: Path) -> list[dict]:
    with Nodes(NODES, RANKS, folder=folder / "nodes", env=ENVIRONMENT, forked=True) as nodes:
        launch(nodes, folder, "run")
        assert nodes.wait(LIMIT_S) == [0] * NODES, nodes.tails()
    whole = results(folder, "run")
    assert all(len(rank["steps"]) == STEPS for rank in whole)
    return whole
