"""Agents of a run: processes on nodes without ranks, whose engines generate for it; both ends of their membership.

    agent  -> node 0   Join, then a Beat each second, which has a Serve once its engines have weights
    node 0 -> agent    Start, then a Beat each second

The connection, to the port of node 0, is the membership: an agent has left when it ends or is silent. One that leaves
in order first sends beats without a Serve, so that it gets no new rows. Everything but the addresses in the store goes
through the connection, after the handshake.
"""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..node_settings import NodeSettings
from ..wire.connection import frame, receive_body
from ..wire.handshake import PortAddress
from ..wire.messages import EngineTimes
from .settings import EngineSettings

AGENTS = "agents"  # role in a handshake
POOL_KEY = "trl_multinode/pool"  # in the store of a run, without the prefix of its other keys
BEAT_S = 1.0
# what engines start with, of the keywords that TRL passes
KEYWORDS = ("max_num_seqs", "max_model_length", "model_impl", "trust_remote_code")
T = TypeVar("T")


class Measure(msgspec.Struct, frozen=True):
    """Use of a run's engines in the last interval of its log."""

    step: int  # optimizer steps done at the end of the interval
    engines: int  # that serve, those of the training nodes included
    filled: float  # share of the slots of all engines in which rows ran, 0 to 1
    waiting: float  # share of the time in which the training ranks waited for completions, 0 to 1


class Notice(msgspec.Struct, frozen=True):
    """Value of `POOL_KEY`, in JSON."""

    run: str  # name of the run
    ports: list[PortAddress]  # of all training nodes, in their order
    measure: Measure | None = None  # `None` before the first interval has ended


class Join(msgspec.Struct, frozen=True):
    """First message of an agent."""

    host: str
    number: int  # number for which its engines were started, 0 if there are none
    why: str = ""  # reason of whoever started it, for the log of the run


class Start(msgspec.Struct, frozen=True):
    """All that the engines of an agent start with."""

    number: int  # of the agent, above those of the training nodes; unique in the run
    ranks: int  # of the run
    on_gpus: bool
    settings: dict[str, Any]  # of node mode, all of them
    dtype: str
    keywords: dict[str, Any]
    lora_rank: int
    files: dict[str, bytes]  # of the model without weights

    @property
    def node_settings(self) -> NodeSettings:
        """Settings of the run."""
        return NodeSettings(**self.settings)

    def write_model(self, folder: Path) -> None:
        """Make the folder of the model without weights.

        Raises:
            `ValueError`: if the name of a file leads out of the folder.
        """
        folder.mkdir(mode=0o700)
        for name, content in self.files.items():
            if name != Path(name).name or name in ("", ".."):
                raise ValueError(f"the run names {name!r} as a file of its model")
            (folder / name).write_bytes(content)


class Serve(msgspec.Struct, frozen=True):
    """Engines of an agent that have weights."""

    address: PortAddress
    engines: int


class Beat(msgspec.Struct, frozen=True):
    """Sign of life."""

    serve: Serve | None = None  # `None` before the engines serve, and while they leave
    why: str = ""  # reason of whoever lets the agent leave, for the log of the run
    times: EngineTimes = EngineTimes()  # sums of the agent's engines


class Members(msgspec.Struct, frozen=True):
    """Agents that serve, as all ranks agree on them. Value of a key of the run's store, in JSON."""

    number: int = 0  # one more with each agent that joins or leaves
    serving: dict[int, Serve] = {}  # by the number of the agent

    @property
    def num_engines(self) -> int:
        """Number of their engines."""
        return sum(serve.engines for serve in self.serving.values())


def start_of(settings: EngineSettings, model_folder: Path, ranks: int) -> Start:
    """Return what an agent gets for engines like those of a training node.

    Args:
        settings (`EngineSettings`):
            Settings of the engines of a training node.
        model_folder (`Path`):
            Folder that `save_without_weights` has made.
        ranks (`int`):
            Training ranks of the run.
    """
    files = [path for path in model_folder.iterdir() if path.is_file()]
    return Start(
        number=0,
        ranks=ranks,
        on_gpus=settings.devices.sender is not None,
        settings=vars(settings.settings),
        dtype=str(settings.dtype).removeprefix("torch."),
        keywords={name: settings.keywords.get(name) for name in KEYWORDS},
        lora_rank=settings.lora_rank,
        files={path.name: path.read_bytes() for path in files},
    )


class Agents:
    """Service for agents of the port of node 0.

    Args:
        start (`Start`):
            Result of `start_of`.
        first (`int`):
            Lowest number of an agent: the number of training nodes.
        changed (`Callable[[int, Serve | None, str], None]`):
            Function that is called with the number of an agent, its engines (`None`: they get no new rows), and what
            it does, for a line of the log. It runs on the port's event loop.
        limit_s (`float`):
            Seconds of silence after which an agent has left.
    """

    def __init__(
        self,
        start: Start,
        first: int,
        changed: Callable[[int, Serve | None, str], None],
        limit_s: float,
    ):
        self._start = start
        self._first = first
        self._changed = changed
        self._limit_s = limit_s
        self._taken: set[int] = set()  # numbers
        self.times: dict[int, EngineTimes] = {}  # of the agents that are here, by their numbers

    async def __call__(self, stream: socket.socket) -> None:
        """Serve an agent until it leaves."""
        join = await receive(stream, Join, self._limit_s)
        number = self._number_for(join.number)
        self._taken.add(number)
        serving: Serve | None = None

        def hear(beat: Beat) -> None:
            nonlocal serving
            self.times[number] = beat.times
            if beat.serve == serving:
                return
            serving = beat.serve
            if serving is None:
                self._changed(number, None, f"leaves{_because(beat.why)}")
            else:
                text = f"serves with {serving.engines} engine(s){_because(join.why)}"
                self._changed(number, serving, text)

        try:
            await send(stream, msgspec.structs.replace(self._start, number=number), self._limit_s)
            await exchange(stream, Beat, hear, self._limit_s)
        finally:
            self._taken.remove(number)
            self.times.pop(number, None)
            self._changed(number, None, "has left")

    def _number_for(self, wanted: int) -> int:
        """Return the number that an agent had, so that its engines go on with their seeds, or else the lowest one."""
        number = wanted if wanted >= self._first and wanted not in self._taken else self._first
        while number in self._taken:
            number += 1
        return number


def _because(why: str) -> str:
    return f": {why}" if why else ""


async def send(stream: socket.socket, message: Any, limit_s: float) -> None:
    """Send a message, within so many seconds."""
    async with asyncio.timeout(limit_s):
        await asyncio.get_running_loop().sock_sendall(stream, frame(message))


async def receive(stream: socket.socket, kind: type[T], limit_s: float | None = None) -> T:
    """Return the next message, within so many seconds."""
    async with asyncio.timeout(limit_s):
        return msgspec.msgpack.decode(await receive_body(stream), type=kind)


async def exchange(
    stream: socket.socket,
    own: Callable[[], Beat],
    hear: Callable[[Beat], None],
    limit_s: float,
) -> None:
    """Exchange beats until the peer closes the connection, or is silent for so many seconds.

    Raises:
        `ExceptionGroup`: always, of an `EOFError` or `OSError`.
    """
    # counted in turns of this loop, because a process that was stopped must not blame the peer
    silent = 0

    async def beat() -> None:
        nonlocal silent
        while silent * BEAT_S < limit_s:
            silent += 1
            await send(stream, own(), limit_s)
            await asyncio.sleep(BEAT_S)
        raise TimeoutError(f"silent for {limit_s:.0f} s")

    async with asyncio.TaskGroup() as both:
        both.create_task(beat())
        while True:
            hear(await receive(stream, Beat))
            silent = 0
