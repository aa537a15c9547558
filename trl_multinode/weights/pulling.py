"""Weights of an agent, a machine without ranks: it pulls every update from the slots of the training nodes."""

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import TypeVar, cast

import msgspec

from ..engine.group import EngineGroup
from ..errors import EngineDiedError, PeerFailureError, WeightSyncError
from ..transports.host_memory import HostSlots
from ..wire.connection import frame, read_body
from ..wire.handshake import Pool, PortAddress, dial
from ..wire.messages import WeightVersion
from ..wire.port import PEER_S
from ..wire.sockets import is_overdue
from .serving import WEIGHTS, AskBucket, AskNews, News, Part
from .slot_updates import SlotUpdates
from .timings import SyncTimings
from .transport import Transport

MAX_CORRUPT = 3  # wrong checksums in a row
MANY_OVERTAKEN = 3  # pulls in a row that a later update has overtaken
PIECE_BYTES = 1 << 20  # of one read, between which the checksum is computed

Answer = TypeVar("Answer", News, Part)


class TrainingNode:
    """An agent's connection to the port of a training node. One thread at a time uses it.

    Args:
        address (`PortAddress`), pool (`Pool`):
            Port of the node; secret and facts of the run.
        limit_s (`float`):
            Seconds without a byte after which the node counts as lost.

    Raises:
        `ConfigurationError`: if the secrets differ, or if the port refuses the run or a version.
        `PeerFailureError`: in every method, if the node does not answer or has ended.
    """

    def __init__(self, address: PortAddress, pool: Pool, limit_s: float):
        self._address = address
        self._limit_s = limit_s
        with self._named():
            self._stream = dial(address, pool, WEIGHTS, limit_s)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, EngineDiedError, msgspec.MsgspecError) as error:
            overdue = isinstance(error, OSError) and is_overdue(error)
            what = f"sent nothing for {self._limit_s:.0f} s" if overdue else f"is lost ({error})"
            raise PeerFailureError(f"{self._address} {what}: no weights come from it.") from error

    def ask(self, request: AskNews | AskBucket, kind: type[Answer], wait_s: float = 0.0) -> Answer:
        """Return the answer to a request, for which the node may take `wait_s` longer than for others."""
        with self._named():
            self._stream.settimeout(self._limit_s)
            self._stream.sendall(frame(request))
            return self._answer(kind, wait_s)

    def _answer(self, kind: type[Answer], wait_s: float = 0.0) -> Answer:
        deadline = time.monotonic() + wait_s + self._limit_s
        return msgspec.msgpack.decode(read_body(self._stream, deadline), type=kind)

    def receive(self, bucket: int, update: int, target: memoryview) -> bool:
        """Receive a bucket of an update; return `False` if the node has a later one, or is writing it.

        Raises:
            `WeightSyncError`: if the checksum is wrong three times in a row.
        """
        for _ in range(MAX_CORRUPT):
            if self.ask(AskBucket(bucket, update), Part).update != update:
                return False
            with self._named():
                crc = self._fill(target)
                expected = self._answer(Part).crc
            if expected is None:
                return False
            if expected == crc:
                return True
        raise WeightSyncError(
            f"{self._address} sent bucket {bucket} of update {update} {MAX_CORRUPT} times, each time with another "
            "checksum than its own. Check the network of both machines."
        )

    def _fill(self, target: memoryview) -> int:
        """Receive bytes until the target is full, and return their CRC-32."""
        crc = 0
        while target:
            self._stream.settimeout(self._limit_s)
            received = self._stream.recv_into(target[:PIECE_BYTES])
            if not received:
                raise EOFError("the stream has ended")
            crc = zlib.crc32(target[:received], crc)
            target = target[received:]
        return crc

    def close(self) -> None:
        self._stream.close()


class PulledUpdates(SlotUpdates):
    """Weight updates that an agent pulls from the training nodes into slots of its own, for its engines.

    ```python
    updates = PulledUpdates(engines, Transport(folder=folder), addresses, pool, print)
    while True:
        if (version := updates.pull(timeout_s=1.0)) is not None:
            ...                                  # the engines serve it
    ```

    Bucket k comes from training node k mod n, so all nodes send at once. They write the next update into their slots
    without waiting for agents: a pull that takes longer than a step begins again.

    Args:
        engines (`EngineGroup`), transport (`Transport`):
            Engines of this machine, and the transport to them; it gets a slot for each bucket, in host memory.
        addresses (`Sequence[PortAddress]`), pool (`Pool`):
            Ports of the training nodes, in the nodes' order; secret and facts of the run.
        report (`Callable[[str], None]`):
            Function that prints a line if pulls take longer than the steps of the run.
        limit_s (`float`, *optional*, defaults to 120.0):
            Seconds without a byte of an answer after which a node counts as lost. A cut link is noticed earlier.

    Attributes:
        version (`WeightVersion`):
            Version that the engines have committed.
        timings (`SyncTimings`):
            Timings of the last update; `gather_s` is the time of the pull.

    Raises:
        `ConfigurationError`: if the secrets differ, or if a port refuses the run or a version.
        `PeerFailureError`: if a training node does not answer or has ended.
    """

    def __init__(
        self,
        engines: EngineGroup,
        transport: Transport,
        addresses: Sequence[PortAddress],
        pool: Pool,
        report: Callable[[str], None],
        limit_s: float = PEER_S,
    ):
        self.version = WeightVersion()
        self.timings = SyncTimings()
        transport.staged = True
        super().__init__(engines, (), transport)
        self._loaded: Sequence[int] = ()  # update of each bucket that the engines have
        self._report = report
        self._num_overtaken = 0  # pulls since the last one that was whole
        self._nodes: list[TrainingNode] = []
        try:
            for address in addresses:
                self._nodes.append(TrainingNode(address, pool, limit_s))
        except BaseException:
            self.close()
            raise

    def pull(self, timeout_s: float) -> WeightVersion | None:
        """Return the version of the next update once the engines have committed it.

        Args:
            timeout_s (`float`):
                Limit for a newer update to appear, in seconds. The pull itself has none, but its bytes must arrive.

        Returns:
            `WeightVersion`, *optional*: `None` if there is no newer update in time, if the nodes are writing the
            next one, or if later ones have overtaken all pulls until then.

        Raises:
            `PeerFailureError`: if a training node has ended or is silent; the message names it.
            `WeightSyncError` or `EngineError`: if a bucket arrives with a wrong checksum three times in a row, or an
                engine fails to load the update.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            news = self._nodes[0].ask(AskNews(self.version.update, left_s), News, left_s)
            if not news.updates:
                return None
            if self.slots is None:
                self.layouts = news.layouts
                self._open_slots(self._engines or EngineGroup())
            start = time.perf_counter()
            is_whole = self._pull_buckets(news.updates)
            pull_s = time.perf_counter() - start
            if is_whole:
                break
            self._count_overtaken(news.version, pull_s)
            if time.monotonic() > deadline:
                return None
        self._num_overtaken = 0
        self.in_flight, self.recompute_kv = news.in_flight, news.recompute_kv
        same = [old == new for old, new in zip(self._loaded, news.updates, strict=False)]
        first = [*same, False].index(False)
        self.timings = self._update(self._engines, self.slots, news.version, first)
        self.timings.add(self.settle())
        self.timings.gather_s = pull_s
        self._loaded = news.updates
        self.version = news.version
        return self.version

    def _count_overtaken(self, version: WeightVersion, pull_s: float) -> None:
        self._num_overtaken += 1
        if self._num_overtaken % MANY_OVERTAKEN == 0:
            self._report(
                f"{self._num_overtaken} pulls in a row were overtaken by the next update, the last one, of {version}, "
                f"after {pull_s:.1f} s: the engines keep the weights of {self.version}. A pull takes longer than a "
                "training step: give the steps more rows (`gradient_accumulation_steps`), or run fewer agents."
            )

    def _pull_buckets(self, updates: Sequence[int]) -> bool:
        """Fill the own slots with each bucket of its update; return `False` if a node has a later one."""
        own, nodes = cast(HostSlots, self.slots), self._nodes
        self._in_slots = None
        stop = Event()

        def pull_from(number: int) -> None:
            for bucket in range(number, len(updates), len(nodes)):
                if stop.is_set():
                    return
                if own.marks[bucket] == updates[bucket]:
                    continue
                own.mark(bucket, 0)
                arrived = False
                try:
                    arrived = nodes[number].receive(bucket, updates[bucket], own.view(bucket))
                finally:
                    if not arrived:
                        stop.set()
                if arrived:
                    own.mark(bucket, updates[bucket])

        with ThreadPoolExecutor(len(nodes), thread_name_prefix="weight pull") as threads:
            try:
                list(threads.map(pull_from, range(len(nodes))))
            except BaseException:  # also the end of this process by a signal
                stop.set()
                raise
        return not stop.is_set()

    def close(self) -> None:
        """Close the connections, and release the slots. A second call does nothing."""
        for node in self._nodes:
            node.close()
        super().close()
