"""The failure that ends a run: the line that every rank prints, and the exit code with which every rank leaves."""

import os
from typing import NamedTuple

from .exit_codes import OTHER, PEER_LOST


class Fatal(NamedTuple):
    """Failure of a run."""

    line: str
    code: int = OTHER

    def encode(self) -> str:
        return f"{self.code} {self.line}"

    @classmethod
    def decode(cls, text: str) -> "Fatal":
        code, _, line = text.partition(" ")
        return cls(line, int(code))


def store_gone() -> Fatal:
    """Return the failure of a lost store, with the same words on every rank."""
    return Fatal(
        "node 0, phase unknown: PeerFailureError: the launcher of node 0, which hosts the rendezvous store, ended "
        f"or cannot be reached ({os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}); see node 0's log",
        PEER_LOST,
    )
