"""State of a rank, as its node's heartbeat carries it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankState:
    """State of a rank. All times are seconds before the heartbeat, because clocks of nodes differ.

    Args:
        rank (`int`), phase (`str`), phase_s (`float`), step (`int`), left (`str`):
            What the rank does, since when, and what is left.
        silent_s (`float`), idle_s (`float`), same_s (`float`):
            Seconds without a heartbeat of the rank; without a heartbeat and without use of the CPU; without progress.
        synced (`bool`), may_take_long (`bool`), meeting (`int`):
            See [`Activity`](beats.py).
        waits_s (`float`):
            Seconds for which it has waited in a meeting; 0 if it is in none.
        frames (`str`):
            Innermost frames of its main thread at its last heartbeat.
    """

    rank: int
    phase: str
    phase_s: float
    step: int
    left: str
    silent_s: float
    idle_s: float
    same_s: float
    synced: bool
    may_take_long: bool
    meeting: int
    waits_s: float
    frames: str

    def doing(self, age_s: float = 0.0) -> str:
        """Return where the rank is and since when; `age_s` is the age of the heartbeat."""
        left = f", {self.left}" if self.left else ""
        frames = f", at {self.frames}" if self.frames else ""
        return f"in phase {self.phase} of step {self.step + 1} for {self.phase_s + age_s:.0f} s{left}{frames}"
