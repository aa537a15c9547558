"""Signals between the sender of an update and the workers that follow it: bucket k is in its slot, bucket k is taken.

A worker connects once, when it opens the slots, to a unix socket in the run's private folder. A stream instead of a
counter in shared memory: the kernel orders the signal after the bytes of the bucket on every processor, a wait takes
no core, and the end of either process ends the other's wait.
"""

import secrets
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from threading import Event

from ..errors import WeightSyncError

GREETING = struct.Struct("<ii")  # engine, and number of its workers
SIGNAL = struct.Struct("<qi")  # number of the update on these slots, and bucket
NONE_LEFT = -1  # in place of a bucket: the update ends without those that are left
ABANDON_S = 0.2  # a wait that the same process gives up ends within this time


class UpdateEndedError(RuntimeError):
    """The sender of an update has ended, or has given it up."""


@dataclass
class WorkerStream:
    """The sender's stream to one worker."""

    stream: socket.socket
    engine: int
    num_workers: int  # of its engine
    turn: int = 0  # update of the worker's last signal
    taken: int = -1  # last bucket that it has taken then
    ended: bool = False

    def fileno(self) -> int:
        return self.stream.fileno()

    def read(self) -> None:
        """Read the signals that have come."""
        try:
            while data := self.stream.recv(SIGNAL.size, socket.MSG_WAITALL):
                self.turn, self.taken = SIGNAL.unpack(data)
            self.ended = True
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True


class BucketSignals:
    """The sender's end of the signals to all workers of a node.

    ```python
    path = signals.listen(folder)        # workers connect to it
    signals.opened()                     # all have connected; both again for an engine that was started again
    signals.begin()
    signals.send(k)                      # the buckets up to k are in their slots
    signals.taken(engine) >= k           # all workers of the engine have taken k; `read` reads what they say
    ```
    """

    def __init__(self) -> None:
        self.turn = 0
        self._workers: list[WorkerStream] = []  # of all engines
        self._listener: socket.socket | None = None

    def listen(self, folder: Path) -> Path:
        """Listen in the private folder of the run, and return the path of the socket."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = folder / f"signals-{secrets.token_hex(6)}.sock"
        self._listener.bind(str(path))
        # before `listen`, so that nobody else connects
        path.chmod(0o600)
        self._listener.listen(128)
        self._listener.setblocking(False)
        return path

    def opened(self) -> None:
        """Accept the workers, which have connected, and remove the socket's file."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        new = []
        with suppress(OSError):  # no more workers
            while True:
                stream, _ = listener.accept()
                engine, count = GREETING.unpack(stream.recv(GREETING.size, socket.MSG_WAITALL))
                stream.setblocking(False)
                new.append(WorkerStream(stream, engine, count))
        Path(listener.getsockname()).unlink(missing_ok=True)
        listener.close()
        engines = {worker.engine for worker in new}
        for worker in [one for one in self._workers if one.engine in engines]:
            # of a process of this engine that has ended
            self._workers.remove(worker)
            worker.stream.close()
        self._workers += new

    def begin(self) -> int:
        """Begin an update on these slots, and return its number. What is left of an earlier one is ignored."""
        self.turn += 1
        return self.turn

    def send(self, bucket: int) -> None:
        """Tell all workers that the buckets up to this one are in their slots."""
        for worker in self._workers:
            # full or broken: the engine has ended or hangs, which its own connection says
            with suppress(OSError):
                worker.stream.send(SIGNAL.pack(self.turn, bucket))

    def end(self) -> None:
        """End the update in all workers that still wait for buckets of it."""
        self.send(NONE_LEFT)

    def streams(self, engine: int) -> list[WorkerStream]:
        """Return the streams to all workers of an engine.

        Raises:
            `WeightSyncError`: if not all of them have connected.
        """
        found = [worker for worker in self._workers if worker.engine == engine]
        if not found or len(found) != found[0].num_workers:
            raise WeightSyncError(
                f"{len(found)} workers of engine {engine} follow the weight sync, expected "
                f"{found[0].num_workers if found else 'one at least'}: the others ended while they opened the slots."
            )
        return found

    def taken(self, engine: int) -> int:
        """Return the last bucket of this update that all workers of an engine have taken; -1: none."""
        return min(one.taken if one.turn == self.turn else -1 for one in self.streams(engine))

    def close(self) -> None:
        """Close all streams, which ends the waits of workers."""
        self.opened()
        for worker in self._workers:
            worker.stream.close()


class FollowedSignals:
    """A worker's end of the signals.

    Args:
        path (`str`):
            Socket of the sender.
        engine (`int`), num_workers (`int`):
            Index of the engine, and number of its workers.

    Attributes:
        abandoned (`threading.Event`):
            Ends a wait from another thread.
    """

    def __init__(self, path: str, engine: int, num_workers: int):
        self.abandoned = Event()
        self._stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._stream.connect(path)
        self._stream.sendall(GREETING.pack(engine, num_workers))
        self._turn = 0
        self._filled = -1

    def begin(self, turn: int) -> None:
        """Follow the update with this number; signals of any other are ignored."""
        self._turn = turn
        self._filled = -1
        self.abandoned.clear()

    def wait(self, bucket: int) -> None:
        """Wait until a bucket is in its slot. The wait has no limit of its own, but ends with the sender.

        Raises:
            `UpdateEndedError`: if the sender has ended, or gives the update up.
        """
        while self._filled < bucket:
            if self.abandoned.is_set():
                raise UpdateEndedError(f"The update was given up before bucket {bucket}.")
            if not connection.wait([self._stream], ABANDON_S):
                continue
            data = b""
            with suppress(ConnectionError):
                data = self._stream.recv(SIGNAL.size, socket.MSG_WAITALL)
            if not data:
                raise UpdateEndedError(f"The sender of the update ended before bucket {bucket}.")
            turn, filled = SIGNAL.unpack(data)
            if turn == self._turn and filled == NONE_LEFT:
                raise UpdateEndedError(f"The sender gave the update up before bucket {bucket}.")
            if turn == self._turn:
                self._filled = filled

    def took(self, bucket: int) -> None:
        """Tell the sender that the buckets up to this one are taken, if it reads: a later signal says it again."""
        with suppress(OSError):
            self._stream.send(SIGNAL.pack(self._turn, bucket), socket.MSG_DONTWAIT)

    def close(self) -> None:
        self._stream.close()
