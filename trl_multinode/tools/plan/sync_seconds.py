"""Arithmetic of a weight sync's seconds. `benchmarks/projection.py` compares it with measured syncs.

A sync of B bytes has stages that work at the same time, each on another bucket, so it takes

    seconds = slowest stage + (sum of the other stages) / buckets + commit

N nodes of R training ranks each; an engine spreads the weights over T GPUs. Rates are those of [`Rates`]:

    across   (N-1)/N B / (rails nic) + buckets (N-1) hop_s     all-gather of the ranks with the same local rank; if
                                                               nodes differ, of all W ranks: (W-1)/W instead
    within   (R-1)/R B / nvlink                                from the node's other ranks to its local main process
    copy     host: B / locked     ipc: B / device     nccl: B / device + B / nvlink
    load     host: B / locked     ipc: workers B / nvlink      nccl: B / nvlink + B / device
             and for each:  + B / (T device) + calls call_s    vLLM's loaders copy a worker's part into its parameters
    commit   B / (T pack)                                      the engine's packing of the weights

`copy` is in a thread of the local main process and `load` in each worker, which copies a bucket and then loads it. A
side whose memory is not page-locked copies at `pageable`. docs/operate/sizing.md has the source of each rate.

A run that generates ahead has a slot for each bucket in host memory. The ranks of a node take turns to assemble a
bucket and to copy it into its slot, so L = min(R, buckets) of them work at the same time. Training pauses for

    slowest stage of across, within / L, max(copy / L, B / host_memory) + (sum of the other two) L / buckets

and then trains while the engines load and commit. A nodes without ranks pull this update out of the host memory of the
training nodes, bucket k from node k mod N, and then load:

    pull     max(1, A/N) B / nic                               into such a node, and out of a training node
"""

from collections.abc import Iterable
from dataclasses import dataclass

BUCKET = 512 * 2**20  # bytes; the default of `sync_bucket_mb`
TRANSPORTS = ("host", "nccl", "ipc")
NIC_SHARE = 0.92  # of a NIC's line rate that NCCL's payload gets: 46 to 48 of 50 GB/s according to NVIDIA's staff


@dataclass(frozen=True)
class Rates:
    """Rates of a node's hardware: bytes per second, or seconds if the name ends in `_s`. None was measured by us."""

    nic: float = 400e9 / 8  # line rate of one NIC, in each direction
    locked: float = 40e9  # between a GPU and page-locked host memory; 53 to 56 of PCIe 5's 64 GB/s were measured
    pageable: float = (
        10e9  # the same through the driver's own small buffers: assumed, one core copies
    )
    host_memory: float = 100e9  # of what all GPUs of a node write into its memory: assumed, low
    nvlink: float = 300e9  # between two GPUs of a node; 380 of 450 GB/s were measured
    device: float = 1.25e12  # copy within a GPU; 2.57 TB/s of reading and writing were measured
    pack: float = 200e9  # of the engine's packing: assumed
    hop_s: float = 14e-6  # between two nodes of a ring, in NCCL's own model of its speed
    call_s: float = 4e-4  # vLLM's loaders, per call (benchmarks/loader_calls.py)


@dataclass(frozen=True)
class Sync:
    """One weight sync: its bytes, the ranks that send them and the engines that get them.

    Args:
        num_bytes (`float`):
            Bytes of the model, in the engine's dtype.
        nodes (`int`):
            Number of nodes.
        ranks (`int`, *optional*, defaults to 7):
            Training ranks of a node.
        rails (`int`, *optional*, defaults to 1):
            NICs of a node that work at the same time, one per training rank at most.
        workers (`int`, *optional*, defaults to 1):
            GPUs of a node's engines.
        tensor_parallel (`int`, *optional*, defaults to 1):
            GPUs over which one engine spreads its weights.
        calls (`int`, *optional*, defaults to 0):
            Calls of vLLM's loaders: one or two per tensor, whatever its size.
        gathering (`int`, *optional*):
            Ranks of an all-gather across nodes. Default: one of each node.
        agents (`int`, *optional*, defaults to 0):
            Nodes that only generate; `nodes` are those that train.
        transport (`str`, *optional*, defaults to `"host"`):
            `"host"`, `"nccl"` or `"ipc"`, between neighbouring GPUs.
        sender_locked (`bool`, *optional*, defaults to `True`), worker_locked (`bool`, *optional*, defaults to `True`):
            Page-locked host memory on this side; only `"host"` uses it.
    """

    num_bytes: float
    nodes: int
    ranks: int = 7
    rails: int = 1
    workers: int = 1
    tensor_parallel: int = 1
    calls: int = 0
    gathering: int = 0
    agents: int = 0
    transport: str = "host"
    sender_locked: bool = True
    worker_locked: bool = True

    @property
    def buckets(self) -> float:
        """Number of buckets, a fraction of the last one included, so that seconds grow with every byte."""
        return max(1.0, self.num_bytes / BUCKET)


def pipelined(stages: Iterable[float], buckets: float) -> float:
    """Return the seconds of stages that overlap, each on another bucket: the slowest and one bucket of the others."""
    every = tuple(stages)
    return max(every) + (sum(every) - max(every)) / buckets


def stage_seconds(sync: Sync, rates: Rates = Rates()) -> dict[str, float]:
    """Return the seconds of each overlapping stage, and of the commit after them."""
    size, gathering = sync.num_bytes, sync.gathering or sync.nodes
    across = (gathering - 1) / gathering * size / (sync.rails * rates.nic * NIC_SHARE)
    neighbour, device = size / rates.nvlink, size / rates.device
    if sync.transport == "host":
        copy = size / (rates.locked if sync.sender_locked else rates.pageable)
        load = size / (rates.locked if sync.worker_locked else rates.pageable)
    elif sync.transport == "ipc":
        copy, load = device, sync.workers * neighbour  # all workers read from one GPU
    else:
        copy, load = device + neighbour, neighbour + device  # both wait for the broadcast
    return {
        "across": across + sync.buckets * (sync.nodes - 1) * rates.hop_s,
        "within": (sync.ranks - 1) / sync.ranks * neighbour,
        "copy": copy,
        "load": load + device / sync.tensor_parallel + sync.calls * rates.call_s,
        "commit": size / (sync.tensor_parallel * rates.pack),
    }


def projected(sync: Sync, rates: Rates = Rates()) -> float:
    """Return the seconds of a sync on GPUs: arithmetic with the rates of `rates`, not a measurement."""
    if sync.agents:
        return sum(each(sync, rates) for each in (pause_seconds, pull_seconds, load_seconds))
    stages = stage_seconds(sync, rates)
    commit = stages.pop("commit")
    return pipelined(stages.values(), sync.buckets) + commit


def pause_seconds(sync: Sync, rates: Rates = Rates()) -> float:
    """Return the projected seconds for which training waits if every bucket has a slot of its own."""
    stages, ranks = stage_seconds(sync, rates), min(sync.ranks, sync.buckets)
    copy = max(stages["copy"] / ranks, sync.num_bytes / rates.host_memory)
    # each of these ranks fills and drains the pipeline with a bucket of its own
    return pipelined((stages["across"], stages["within"] / ranks, copy), sync.buckets / ranks)


def pull_seconds(sync: Sync, rates: Rates = Rates()) -> float:
    """Return the projected seconds in which the nodes that only generate pull an update; 0 without such nodes."""
    copies = max(1.0, sync.agents / sync.nodes) if sync.agents else 0.0
    return copies * sync.num_bytes / (rates.nic * NIC_SHARE)


def load_seconds(sync: Sync, rates: Rates = Rates()) -> float:
    """Return the projected seconds of load and commit, which run beside training if every bucket has a slot."""
    stages = stage_seconds(sync, rates)
    return stages["load"] + stages["commit"]
