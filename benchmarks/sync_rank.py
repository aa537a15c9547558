"""One rank of `benchmarks/sync.py`: builds the model under ZeRO-3 and syncs it in every arm, in turns."""

import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

counted: dict[str, int] = {}


def count(name: str) -> None:
    """Every call of a torch.distributed function by whomever; before DeepSpeed takes its reference."""
    real = getattr(dist, name)

    def call(*args, **kwargs):
        group = args[0][0].group if name == "batch_isend_irecv" else kwargs.get("group")
        inside = group is not None and dist.get_process_group_ranks(group)[-1] < RANKS_PER_NODE * (
            NODE + 1
        )
        inside = inside and dist.get_process_group_ranks(group)[0] >= RANKS_PER_NODE * NODE
        key = "within" if inside else "across"
        counted[key] = counted.get(key, 0) + 1
        return real(*args, **kwargs)

    setattr(dist, name, call)


RANK, NODE, RANKS_PER_NODE = (
    int(os.environ[name]) for name in ("RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE")
)
for function in (
    "all_gather_into_tensor",
    "all_gather",
    "gather",
    "batch_isend_irecv",
    "broadcast",
    "all_reduce",
    "barrier",
):
    count(function)
# ruff: noqa: E402 - DeepSpeed looks the functions up when it is imported

import deepspeed
import psutil
import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from multinode_kit.engines import running_engines
from trl_multinode.engine.group import EngineGroup
from trl_multinode.transports.pieces import Pieces
from trl_multinode.weights.buckets import slot_layout
from trl_multinode.weights.gathering import ShardGather
from trl_multinode.weights.probe import probe_tokens
from trl_multinode.weights.sender import BucketSender
from trl_multinode.weights.source import ModuleSource
from trl_multinode.weights.sync import WeightSync
from trl_multinode.weights.timings import SyncTimings
from trl_multinode.weights.transport import Transport
from trl_multinode.wire.messages import NUM_SLOTS, UpdateWeights, WeightVersion

folder, size, engine_module = Path(sys.argv[1]), *sys.argv[2:4]
repeats, pauses = (int(word) for word in sys.argv[4:6])
ARMS, PAUSE_ARMS = (words.split(",") for words in sys.argv[6:8])
# hidden, MLP, layers, vocabulary, MiB
MODELS = {
    "40M": (512, 2048, 8, 8192, 40),
    "150M": (768, 3072, 12, 49152, 40),
}
CPU = torch.device("cpu")
M_MMAP_THRESHOLD = -3
CONFIG = json.loads(Path(os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).read_text())
CONFIG |= {
    "zero_allow_untested_optimizer": True,
    "train_batch_size": int(os.environ["WORLD_SIZE"]),
    "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
}


def build():
    hidden, mlp, layers, vocabulary, _ = MODELS[size]
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, max_position_embeddings=512,
        tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


class PerParameter:
    """In place of TRL's `vllm_client`: takes parameter after parameter from TRL's own loop, into the slots of ours.

    A tensor lives until the next one is gathered, so it is copied at once; the engine loads whole buckets, as in ours.
    """

    def __init__(self, engines, sync: WeightSync):
        self.engines, self.sync = engines, sync
        self.version = WeightVersion()

    def update_named_params(self, metadata, parameters) -> None:
        tensors, slots, layouts = iter(parameters), self.sync._slots, self.sync.layouts
        update = UpdateWeights(version=self.version, turn=slots.signals.begin())
        with BucketSender(self.engines, slots, layouts, SyncTimings(), update, False) as sender:
            for index, specs in enumerate(layouts):
                sender._wait_until_taken(index - NUM_SLOTS)
                for spec in specs:
                    name, tensor = next(tensors)
                    assert name == spec.name, (name, spec.name)
                    slots.write(index % NUM_SLOTS, [spec], [Pieces.whole(tensor)])
                slots.signals.send(index)
            assert next(tensors, None) is None
        sender.wait_for_commit()
        self.sync._times |= {engine.index: done.times for engine, done in sender.done}

    def reset_prefix_cache(self) -> None:
        """Our commit does it."""


class Whole(ModuleSource):
    """Every tensor in one piece, as TRL's loop yields them."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._metadata = [replace(meta, divisible=False) for meta in self._metadata]


class Arms:
    """Every way to send the weights, on one rank."""

    def __init__(self, model, engines, limit: int):
        self.engines = engines
        nodes = [RANKS_PER_NODE] * (dist.get_world_size() // RANKS_PER_NODE)
        node_first, world = ShardGather(CPU, nodes), ShardGather(CPU)
        self.model, self.update = model, 0
        self.memory: dict[str, int] = {}  # by arm, bytes
        self.syncs = {
            "ours": WeightSync(ModuleSource(model, torch.float32, node_first), engines, limit),
            "world": WeightSync(ModuleSource(model, torch.float32, world), engines, limit),
        }
        self.syncs["control"] = self.syncs["ours"]
        self.syncs["trl"] = WeightSync(Whole(model, torch.float32, node_first), engines, limit)
        no_engine = None if engines is None else EngineGroup()
        self.syncs["ahead"] = self.staged(model, node_first, engines, limit)
        self.syncs["loading"] = self.syncs["ahead"]
        self.syncs["alone"] = self.staged(model, node_first, no_engine, limit)
        self.syncs["again"] = self.syncs["alone"]
        times = {}  # of each engine, whichever arm it loaded last
        for sync in self.syncs.values():
            sync._times = times
        self.check_cpu_s = 0.0
        ours = self.syncs["ours"]._source
        ours.check = partial(self.timed_check, ours.check)
        self.trl = VLLMGeneration.__new__(VLLMGeneration)
        main = engines is not None
        self.trl.mode, self.trl.model, self.trl._weight_metadata = "server", model, None
        self.trl.accelerator = SimpleNamespace(is_main_process=main)
        plugin = SimpleNamespace(zero_stage=3)
        self.trl._dist = DistributedBackend(
            SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
        )
        self.trl.vllm_client = PerParameter(engines, self.syncs["trl"]) if main else None

    @staticmethod
    def staged(model, gather: ShardGather, engines: EngineGroup | None, limit: int) -> WeightSync:
        """Return a sync with a slot for each bucket."""
        transport = Transport(staged=True)
        sync = WeightSync(ModuleSource(model, torch.float32, gather), engines, limit, transport)
        if engines is not None:
            transport.reserve(sync.layouts)
        place = gather.meet(*transport.reserved_at)
        if engines is None:
            assert sync.join(place)
        return sync

    def timed_check(self, check, *arguments) -> None:
        """Add up the CPU seconds of the check for NaN, which is part of our sync."""
        start = time.process_time()
        check(*arguments)
        self.check_cpu_s += time.process_time() - start

    def open(self, arm: str) -> None:
        """The arm's own slots and buckets, outside of the time: an engine has one plan at a time."""
        sync = self.syncs[arm]
        if sync._engines is None:
            return
        if sync._slots is not None and sync.staged:
            sync._transport.open_in_workers(sync._slots, sync._engines, sync.layouts)
        else:
            sync._slots = sync._transport.open(sync._engines, sync.layouts)

    def run(self, arm: str) -> SyncTimings | None:
        self.update += 1
        version = WeightVersion(self.update, self.update)
        if arm != "trl":
            return self.syncs[arm].run(version)
        if self.trl.vllm_client is not None:
            self.trl.vllm_client.version = version
        self.trl.sync_weights()
        return None

    def settle(self, arm: str) -> float:
        """Wait until the engines have loaded what they load beside training; return the seconds of the slowest."""
        seconds = self.syncs[arm].settle()
        dist.barrier()
        return seconds.get("load_s", 0.0) + seconds.get("commit_s", 0.0)


def inbound_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/rx_bytes").read_text())


def keep_freed_blocks(largest: int) -> None:
    """Have glibc keep freed blocks below `largest` bytes and give the others back to the system."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, largest)


def memory_peak(call) -> int:
    """Bytes of resident memory that `call` needed at most on top of what was there."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def cpu_seconds(engines) -> float:
    """CPU seconds so far of this rank and of the processes of its engines."""
    trees = [psutil.Process(engine.ready.pid) for engine in engines or ()]
    processes = [process for tree in trees for process in (tree, *tree.children(recursive=True))]
    return time.process_time() + sum(sum(process.cpu_times()[:2]) for process in processes)


def place(process: psutil.Process, cores: set[int]) -> None:
    """Let every thread of a process and of its children run on these cores only."""
    for member in (process, *process.children(recursive=True)):
        for thread in member.threads():
            # it may have ended meanwhile
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)


@contextmanager
def cores_apart(engines) -> Iterator[None]:
    """All ranks on one core, all engines on another."""
    rank, cores = psutil.Process(), os.sched_getaffinity(0)
    others = [psutil.Process(engine.ready.pid) for engine in engines or ()]

    def place_all(of_ranks: set[int], of_engines: set[int]) -> None:
        # engines may be children of their rank: they come last
        for process, on in ((rank, of_ranks), *((engine, of_engines) for engine in others)):
            place(process, on)

    place_all({min(cores)}, {max(cores)})
    try:
        yield
    finally:
        place_all(cores, cores)


def timed(arms: Arms, arm: str) -> dict:
    dist.barrier()
    counted.clear()
    cpu_before, arms.check_cpu_s = cpu_seconds(arms.engines), 0.0
    bytes_before, start = inbound_bytes(), time.perf_counter()
    dist.barrier()  # as before every sync of a run
    timings = arms.run(arm)
    # of the slowest rank: the engines have the weights, or every bucket is in its slot
    wall = time.perf_counter() - start
    across, within = counted.get("across", 0), counted.get("within", 0)
    dist.barrier()
    beside = arms.settle(arm)
    found = {"cpu_s": cpu_seconds(arms.engines) - cpu_before, "check_cpu_s": arms.check_cpu_s}
    found |= {
        "wall_s": wall,
        "beside_s": beside,
        "inbound_bytes": inbound_bytes() - bytes_before,
        "across": across,
        "within": within,
    }
    if timings is not None:
        found |= {
            key: getattr(timings, key)
            for key in ("stream_s", "gather_s", "copy_s", "load_s", "commit_s")
        }
    return found


@torch.no_grad()
def perturb(model) -> None:
    """Every rank's own pieces move: stale weights must be seen."""
    for parameter in model.parameters():
        parameter.ds_tensor.data.add_(torch.randn_like(parameter.ds_tensor) * 0.02)


@torch.no_grad()
def difference(model, engines) -> float:
    tokens = probe_tokens(model.config.vocab_size)
    ids = torch.tensor([tokens])
    scores = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    if engines is None:
        return 0.0
    return (torch.from_numpy(engines[0].score(tokens).logprobs.copy()) - scores).abs().mean().item()


def in_turns(names: Sequence[str], repeats: int) -> Iterator[str]:
    """Every name once per repeat, each time in the other direction."""
    for repeat in range(repeats):
        yield from names if repeat % 2 == 0 else reversed(names)


def measure(arms: Arms, model, engines) -> dict:
    names = (*ARMS, *PAUSE_ARMS)
    result: dict = {arm: [] for arm in names} | {"fresh": [], "stale": [], "memory": arms.memory}
    for arm in names:  # warm-up, memory, and parity of every arm
        perturb(model)
        result["stale"].append(difference(model, engines) if arms.update else 9.0)
        arms.open(arm)
        arms.run(arm)
        arms.settle(arm)
        # the link does not matter, and blocks that glibc keeps later would be counted
        if arm not in arms.memory:
            arms.memory[arm] = memory_peak(lambda arm=arm: arms.run(arm))
        arms.settle(arm)
        if arm in ("alone", "again"):
            arms.open("ours")
            arms.run("ours")
        result["fresh"].append(difference(model, engines))
    # glibc's own limit; the time of a sync is that of a process that keeps them
    keep_freed_blocks(32 << 20)
    for arm in in_turns(ARMS, repeats):
        arms.open(arm)
        result[arm].append(timed(arms, arm))
    with cores_apart(engines):
        arms.open("loading")
        timed(arms, "loading")
        for arm in in_turns(PAUSE_ARMS, repeats * pauses):
            result[arm].append(timed(arms, arm))
    return result


@contextmanager
def own_engines(model) -> Iterator:
    if RANK % RANKS_PER_NODE:
        yield None
        return
    with running_engines(
        model, folder / f"node{NODE}", engine_module, max_model_len=128, max_num_seqs=4
    ) as engines:
        yield engines


def wait_for_go(index: int) -> None:
    print(f"READY {index}", flush=True)
    deadline = time.monotonic() + 900
    while not (folder / f"go{index}").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {RANK}: nobody set the links for 900 s")
        time.sleep(0.1)
    dist.barrier()


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_blocks(1 << 20)
    (folder / f"node{NODE}").mkdir(exist_ok=True)
    with ExitStack() as stack:
        bare = build()
        engines = stack.enter_context(own_engines(bare))
        model = deepspeed.initialize(model=bare, model_parameters=bare.parameters(), config=CONFIG)[
            0
        ].module
        assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
        limit = MODELS[size][-1] << 20
        arms = Arms(model, engines, limit)
        buckets = arms.syncs["ours"].buckets
        found = {
            "model_bytes": sum(meta.num_bytes for bucket in buckets for meta in bucket),
            "buckets": len(buckets),
            "tensors": len({meta.name for bucket in buckets for meta in bucket}),
            "largest_bucket": max(slot_layout(bucket)[-1].end for bucket in buckets),
            "limit": limit,
            "links": [],
        }
        for index in range(2):
            wait_for_go(index)
            found["links"].append(measure(arms, model, engines))
        (folder / f"rank{RANK}.json").write_text(json.dumps(found))
        dist.barrier()


main()
