"""Judges of heartbeats: `NodeJudge` for the ranks of one node, `RunJudge` for all nodes.

Every node judges its own ranks, with one clock and with their CPU times. Node 0 and the last node judge all nodes, so
that the two sides of a cut link, and both sides of the store, end.
"""

import json
from collections import Counter
from dataclasses import dataclass

from torch.distributed import Store

from ..reporter import report
from ..silence import Silence
from ..topology import Topology
from .rank_state import RankState

NAME_EVERY_S = 30.0
# the wait in a meeting after which the late ranks are named, and between two such lines
LATE_EVERY_S = 15.0
READ_STATES_EVERY_S = 5.0  # a judge reads only the nodes' counts in between
JUDGE_LATE_S = 5.0  # a judge that comes so late was suspended, or its store was
NAMED_RANKS = 3  # a line names no more ranks


@dataclass(frozen=True)
class Limits:
    """Limits of heartbeats, in seconds.

    Args:
        heartbeat_s (`float`):
            Limit of silence, of a rank and of a node; 0 for none.
        stuck_s (`float`):
            Limit without progress of any rank, and of silence of a rank that uses the CPU; 0 for none.
        start_s (`float`):
            Limit of silence before a rank's first weight sync.
    """

    heartbeat_s: float
    stuck_s: float
    start_s: float

    def silence_s(self, synced: bool) -> float:
        """Return the limit of silence, or infinity."""
        if self.heartbeat_s <= 0:
            return float("inf")
        return self.heartbeat_s if synced else max(self.heartbeat_s, self.start_s)

    def setting(self, synced: bool) -> str:
        name = "heartbeat_timeout" if synced else "engine_start_timeout"
        return f"`{name}` {self.silence_s(synced):g} s"


class NodeJudge:
    """Judge of the ranks of one node. The rank that writes the node's beat is the judge."""

    def __init__(self, topology: Topology, limits: Limits):
        self._topology = topology
        self._limits = limits
        self._named: dict[int, float] = {}  # rank -> time of the last line about it

    def judge(self, now: float, states: list[RankState]) -> str | None:
        """Return the line that ends the run, or `None`."""
        for state in states:
            if (line := self._judge(now, state)) is not None:
                return line
        return None

    def _judge(self, now: float, state: RankState) -> str | None:
        limit, who = self._limits.silence_s(state.synced), self._topology.name_of(state.rank)
        if state.idle_s > limit:
            return (
                f"PeerFailureError: {who} has neither sent a heartbeat nor used the CPU for {state.idle_s:.0f} s "
                f"({self._limits.setting(state.synced)}): its process is stopped or hangs. It was last "
                f"{state.doing()}"
            )
        if self._limits.heartbeat_s <= 0 or state.silent_s <= self._limits.heartbeat_s:
            self._named.pop(state.rank, None)
            return None
        if self._limits.stuck_s > 0 and state.silent_s > max(self._limits.stuck_s, limit):
            return (
                f"PeerFailureError: {who} has sent no heartbeat for {state.silent_s:.0f} s (`stuck_timeout` "
                f"{self._limits.stuck_s:g} s) although it uses the CPU: native code holds Python's interpreter lock. "
                f"Raise the setting if such a call may take so long. It was last {state.doing()}"
            )
        if now - self._named.get(state.rank, float("-inf")) >= NAME_EVERY_S:
            self._named[state.rank] = now
            works = (
                "but uses the CPU"
                if state.idle_s < state.silent_s / 2
                else "and does not use the CPU"
            )
            report(
                f"{who} has sent no heartbeat for {state.silent_s:.0f} s {works}; it was last {state.doing()}"
            )
        return None


class RunJudge:
    """Judge of all nodes, in the rank that writes the beat of node 0 or of the last node."""

    def __init__(self, topology: Topology, limits: Limits):
        self._topology = topology
        self._limits = limits
        self._nodes: list[int] = []  # those that have sent a beat
        self.silence = Silence(JUDGE_LATE_S)
        self._states: dict[int, list[RankState]] = {}  # node -> states in its last beat
        self._next_states = 0.0
        self._next_line = 0.0

    def judge(self, now: float, store: Store) -> str | None:
        """Return the line that ends the run, or `None`."""
        reads = now >= self._next_states
        numbers = self._read(store, reads)
        if reads:
            self._next_states = now + min(READ_STATES_EVERY_S, max(self._limits.stuck_s, 1.0) / 10)
        for node, silent_s in self.silence.look(now, numbers).items():
            synced = all(state.synced for state in self._states[node])
            if silent_s > self._limits.silence_s(synced):
                return self._about_node(node, silent_s, synced)
        return self._stuck_or_slow(now) if reads else None

    def _read(self, store: Store, reads: bool) -> dict[int, str]:
        """Return the number of each node's last beat; if `reads`, note the states in it."""
        # `multi_get` would wait for a key that is missing
        if len(self._nodes) < self._topology.num_nodes:
            self._nodes = [
                node for node in range(self._topology.num_nodes) if store.check([f"beat/{node}"])
            ]
        numbers = {}
        for node, beat in zip(
            self._nodes, store.multi_get([f"beat/{node}" for node in self._nodes]), strict=True
        ):
            numbers[node], _, states = beat.decode().partition(" ")
            if reads or node not in self._states:
                self._states[node] = [RankState(**state) for state in json.loads(states)]
        return numbers

    # ---- silent nodes -----------------------------------------------------------------------------------------------

    def _about_node(self, node: int, silent_s: float, synced: bool) -> str:
        topology, what = self._topology, f"node {node}"
        if topology.fits:
            ranks = topology.ranks_of(node)
            what += f" (ranks {ranks[0]} to {ranks[-1]})"
        last = max(self._states[node], key=lambda state: state.same_s)
        setting = self._limits.setting(synced)
        return (
            f"PeerFailureError: {what} has sent no heartbeat for {silent_s:.0f} s ({setting}): the node or all its "
            f"ranks are stopped or gone, or its link to node 0 is cut. Its "
            f"{topology.name_of(last.rank)} was last {last.doing(silent_s)}"
        )

    # ---- runs without progress -----------------------------------------------------------------------------------

    def _stuck_or_slow(self, now: float) -> str | None:
        """Return the line for a run in which no rank makes progress; report ranks that are behind the others."""
        states = [state for node in self._states.values() for state in node]
        self._report_late(now, states)
        if len(states) < self._topology.world_size or not all(state.synced for state in states):
            return None
        same_s = min(state.same_s for state in states)
        if 0 < self._limits.stuck_s < same_s and not any(state.may_take_long for state in states):
            return self._stuck(states, same_s)
        self._report_slow(now, states, same_s)
        return None

    def _stuck(self, states: list[RankState], same_s: float) -> str:
        phases = Counter(state.phase for state in states)
        counts = ", ".join(f"{count} in {phase}" for phase, count in phases.most_common())
        slowest = _behind(states)[0]
        why = f": they probably wait in different collectives ({counts})" if len(states) > 1 else ""
        return (
            f"PeerFailureError: no rank has made progress for {same_s:.0f} s (`stuck_timeout` "
            f"{self._limits.stuck_s:g} s) although all send heartbeats{why}. Raise the setting if a step may take so "
            f"long. The slowest is {self._topology.name_of(slowest.rank)}, {slowest.doing()}"
        )

    def _report_slow(self, now: float, states: list[RankState], same_s: float) -> None:
        """Report the ranks that are elsewhere than most, if no rank has made progress for long."""
        if same_s <= NAME_EVERY_S or now < self._next_line:
            return
        late = _behind(states)
        if len(late) < len(states):
            self._next_line = now + NAME_EVERY_S
            self._report(len(states) - len(late), same_s, [self._named(state) for state in late])

    def _report_late(self, now: float, states: list[RankState]) -> None:
        """Report the ranks that have not come to a meeting in which others have waited for long."""
        number, waited_s = max(
            ((state.meeting, state.waits_s) for state in states), default=(0, 0.0)
        )
        if waited_s < LATE_EVERY_S or now < self._next_line:
            return
        late = {state.rank: self._named(state) for state in states if state.meeting < number}
        without = set(range(self._topology.world_size)) - {state.rank for state in states}
        late |= {rank: f"{self._topology.name_of(rank)}, without a trainer" for rank in without}
        if late:  # otherwise the meeting has just ended, which some nodes have not told yet
            self._next_line = now + LATE_EVERY_S
            num_waiting = self._topology.world_size - len(late)
            self._report(num_waiting, waited_s, [late[rank] for rank in sorted(late)])

    def _named(self, state: RankState) -> str:
        return f"{self._topology.name_of(state.rank)}, {state.doing()}"

    def _report(self, num_waiting: int, seconds: float, late: list[str]) -> None:
        count = f"{len(late)} ranks: " if len(late) > 1 else ""
        more = "; ..." if len(late) > NAMED_RANKS else ""
        who = f"{num_waiting} rank{'s' if num_waiting > 1 else ''}"
        report(
            f"{self._topology}: {who} waiting {seconds:.0f} s for {count}{'; '.join(late[:NAMED_RANKS])}{more}"
        )


def _behind(states: list[RankState]) -> list[RankState]:
    """Return the ranks of the smallest group with one step and one phase, the longest in it first."""
    sizes = Counter((state.step, state.phase) for state in states)
    smallest = min(sizes, key=lambda place: (sizes[place], place[0]))
    late = [state for state in states if (state.step, state.phase) == smallest]
    return sorted(late, key=lambda state: -state.same_s)
