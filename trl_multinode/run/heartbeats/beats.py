"""Heartbeats: each rank writes its state into the node's shared memory, one rank per node writes the node's beat.

A collective waits for a stopped process, a frozen node or a cut link until `ddp_timeout`, and nothing ends: no process
has died. So the watch thread of every rank writes twice a second what its main thread does and since when. The first
rank of a node whose own heartbeat is fresh writes one key per node and second, `beat/<node>`, with the states of all
its ranks; it also reads the CPU time of a rank that is silent. docs/start/running.md explains what is judged, and by
whom; `run/heartbeats/judges.py` does it.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch.distributed import Store

from ..endings.exit_codes import PEER_LOST
from ..reconnecting import StoreConnection
from ..reporter import report
from ..watch.watchdog import Watchdog
from .frames import DISK_WAIT, innermost_frames, work_of
from .judges import Limits, NodeJudge, RunJudge
from .node_slots import NodeSlots
from .rank_state import RankState

BEAT_S = 1.0  # between two beats of a node
WRITE_EVERY_S = 2.0  # so often a rank writes its frames although nothing changes
DUTY_S = 2.5  # a rank that is silent for so long does not write its node's beat
SUSPENDED_S = 5.0  # a gap between two calls after which this process was suspended, and judges nothing that is older


@dataclass(frozen=True)
class Activity:
    """Activity of a rank, as its host reports it to the heartbeats.

    Args:
        phase (`str`), since (`float`), step (`int`):
            Phase, the time (`time.monotonic`) at which it began, optimizer steps done.
        left (`str`):
            Remaining work of the phase, for the lines; empty if unknown.
        progress (`str`):
            Text that changes whenever the rank makes progress.
        synced (`bool`):
            Whether the rank has taken part in a weight sync. Until then `engine_start_timeout` is the limit.
        may_take_long (`bool`):
            Whether the phase has a limit of its own, or runs the user's code: then the run is not stuck.
        meeting (`int`), waits_since (`float`, *optional*):
            Number of the rank's last meeting, and the time since which it waits there for other ranks.
    """

    phase: str
    since: float
    step: int
    left: str = ""
    progress: str = ""
    synced: bool = False
    may_take_long: bool = False
    meeting: int = 0
    waits_since: float | None = None


class SlotWriter:
    """Writer of what this rank does into the memory of its node.

    Args:
        slots ([`NodeSlots`]):
            Memory of the node.
        activity (`Callable[[], Activity]`):
            Function that returns what this rank does.
    """

    def __init__(self, slots: NodeSlots, activity: Callable[[], Activity]):
        self._slots = slots
        self._activity = activity
        self._last_call = time.monotonic()
        self._progress = ("", self._last_call)  # text, time of its last change
        # in the slot, and when
        self._written = (Activity("set-up", self._last_call, 0), 0.0)

    def write(self) -> None:
        """Write what this rank does. A thread that does not use the store calls it: a lost link is no silent rank."""
        now = time.monotonic()
        suspended, self._last_call = now - self._last_call > SUSPENDED_S, now
        if not self._slots.is_open:
            return
        doing, at = self._written
        # the main thread may be replacing what this reads; the rank lives all the same
        with suppress(Exception):
            doing = self._activity()
        if doing != self._written[0] or now - at > WRITE_EVERY_S or suspended:
            self._write_all(doing, now, suspended)
        self._slots.touch(now)

    def _write_all(self, doing: Activity, now: float, suspended: bool) -> None:
        """Write all that changes seldom: the activity, the frames, the time of the last progress."""
        self._written = doing, now
        progress = f"{doing.phase} {doing.since} {doing.step} {doing.left} {doing.progress}"
        waits_for_disk = (work_of(os.getpid()) or (0, ""))[1] == DISK_WAIT
        if progress != self._progress[0] or waits_for_disk or suspended:
            self._progress = (progress, now)
        own = asdict(doing) | {"pid": os.getpid(), "changed": self._progress[1]}
        self._slots.write(own | {"frames": innermost_frames()})


class Beats:
    """Heartbeats of one rank, in the threads of its watchdog.

    ```python
    Beats(watch, Limits(heartbeat_s=30.0, stuck_s=600.0, start_s=900.0), activity)
    ```

    Args:
        watch (`Watchdog`):
            Watchdog of this rank, which ends the run.
        limits (`Limits`):
            Limits of the heartbeats.
        activity (`Callable[[], Activity]`):
            Function that returns what this rank does. It must not wait and not touch a disk.
    """

    def __init__(self, watch: Watchdog, limits: Limits, activity: Callable[[], Activity]):
        self._topology = topology = watch.topology
        self._watch = watch
        self._limits = limits
        self._slots = NodeSlots(topology)
        self._broken = False
        self._last_call = time.monotonic()
        self._forgiven = self._last_call  # silence counts from here at the earliest
        self._next_beat = 0.0
        # of silent ranks: work, time at which it last changed
        self._work: dict[int, tuple[int, float]] = {}
        self._local = NodeJudge(topology, limits)
        self._run = (
            RunJudge(topology, limits) if topology.node in (0, topology.num_nodes - 1) else None
        )
        if limits.heartbeat_s > 0:
            StoreConnection.limit_s = limits.heartbeat_s
        watch.cleanups.append(self._kill_silent)
        watch.ticks.append(SlotWriter(self._slots, activity).write)
        watch.chores.append(self._beat)

    def _beat(self, store: Store) -> None:
        """Write the node's beat if this rank is on duty and it is time, and judge. The watch thread calls it often."""
        now = time.monotonic()
        if now - self._last_call > SUSPENDED_S:
            # this process could not see what happened meanwhile, so all limits start anew
            self._forgiven = now
            self._work.clear()
            if self._run is not None:
                self._run.silence.forgive()
        self._last_call = now
        if self._broken or not self._is_open(store) or now < self._next_beat:
            return
        slots = self._slots.read()
        # the first rank whose heartbeat is fresh is on duty
        fresh = [rank for rank, slot in slots.items() if now - slot["at"] < DUTY_S]
        if self._topology.rank in fresh[:1]:
            self._next_beat = now + BEAT_S
            self._write_and_judge(now, slots, store)

    def _write_and_judge(self, now: float, slots: dict[int, dict[str, Any]], store: Store) -> None:
        states = [self._state(now, rank, slot) for rank, slot in slots.items()]
        store.set(
            f"beat/{self._topology.node}",
            f"{now:.3f} " + json.dumps([asdict(state) for state in states]),
        )
        line = self._local.judge(now, states)
        if line is None and self._run is not None:
            line = self._run.judge(time.monotonic(), store)
        if line is not None:
            self._watch.report(line, code=PEER_LOST)

    def _is_open(self, store: Store) -> bool:
        try:
            return self._slots.open(store)
        except OSError as error:
            self._broken = True
            report(
                f"{self._topology}: cannot share heartbeats with the ranks of this node ({error}); if this rank "
                "stops, it is not noticed. Mount /proc without `hidepid`, or run all ranks of a node in one container."
            )
            return False

    def _state(self, now: float, rank: int, slot: dict[str, Any]) -> RankState:
        silent_s = now - max(slot["at"], self._forgiven)
        if silent_s < DUTY_S:
            self._work.pop(rank, None)
            idle_s = silent_s
        else:
            idle_s = min(silent_s, now - self._worked_at(rank, slot["pid"], slot["at"], now))
        unchanged = {one.name: slot[one.name] for one in fields(RankState) if one.name in slot}
        return RankState(
            **unchanged,
            rank=rank,
            phase_s=round(now - slot["since"], 1),
            silent_s=round(silent_s, 1),
            idle_s=round(idle_s, 1),
            same_s=round(now - max(slot["changed"], self._forgiven), 1),
            waits_s=0.0 if slot["waits_since"] is None else round(now - slot["waits_since"], 1),
        )

    def _worked_at(self, rank: int, pid: int, last_beat: float, now: float) -> float:
        """Return the last time at which a silent rank was seen to work, or to wait for a disk."""
        work, changed = self._work.get(rank, (None, last_beat))
        if (found := work_of(pid)) is not None:
            if work is not None and (found[0] != work or found[1] == DISK_WAIT):
                changed = now
            self._work[rank] = (found[0], changed)
        return changed

    def _kill_silent(self) -> None:
        """End the silent ranks of this node with the run: a stopped process cannot, and torchrun waits 30 s for it."""
        if self._limits.heartbeat_s <= 0 or not self._slots.is_open:
            return
        now = time.monotonic()
        for rank, slot in self._slots.read().items():
            silent_s = now - max(slot["at"], self._forgiven)
            if rank != self._topology.rank and silent_s > self._limits.heartbeat_s:
                with suppress(ProcessLookupError):
                    os.kill(slot["pid"], signal.SIGKILL)
                self._watch.of_process.store.count_as_reader(rank)
