"""What a LoRA run's weight syncs cost: the adapter alone, merged bucket by bucket, and TRL's way.

    python benchmarks/lora.py            # about 5 minutes on 2 cores
    python benchmarks/lora.py --quick    # two repeats

Two ranks under ZeRO-3 (forked, gloo) and vLLM engines below rank 0: one that serves adapters, one that does not. Arms
take turns; the adapter moves before every sync, so that something has to arrive, and at the end both engines'
log-probs are compared with the trainer's.

    adapter        `AdapterSource`: after the first time A and B only
    merged         `PeftSource`: all weights, merged bucket by bucket
    trl            TRL 1.16's own `_iter_named_params`: gathers the whole model, merges it, sends tensor by tensor.
                   Over the slots of this library, because TRL's broadcast needs NCCL
    *_again        the same once more: its ratio to the first says how far two equal things are apart here

`peak_mib` is what a rank's resident memory rises by during a sync, at its highest (the kernel's VmHWM, reset before
each); the larger rank's, the median of the syncs. `generation` is the price of adapters that vLLM applies at every
token, here with its CPU kernels.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace

os.environ |= {"DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

import deepspeed
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from trl.generation.vllm_generation import VLLMGeneration

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from multinode_kit.engines import crcs_of_weights, running_engines
from multinode_kit.faults import FAULTY_REAL
from multinode_kit.launch_files import free_port
from multinode_kit.models import tiny_qwen2
from trl_multinode.engine.settings import lora_arguments
from trl_multinode.engine.stream import Request
from trl_multinode.transports.pieces import Pieces
from trl_multinode.weights.buckets import slot_layout
from trl_multinode.weights.gathering import ShardGather
from trl_multinode.weights.peft_source import AdapterSource, PeftSource
from trl_multinode.weights.probe import probe_tokens
from trl_multinode.weights.source import Finish
from trl_multinode.weights.sync import WeightSync
from trl_multinode.wire.messages import WeightVersion

RANKS, RANK_OF_LORA, BUCKET_MIB = 2, 16, 8
MODEL = {"vocab_size": 8000, "hidden": 512, "layers": 12, "tied": False}  # 40 M parameters
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ARMS = ("adapter", "merged", "trl", "merged_again", "adapter_again")
SYNCS_FOR_DIGEST = 50
ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "train_batch_size": RANKS,
}
M_MMAP_THRESHOLD = -3  # of mallopt: what is freed goes back to the kernel, so that peaks show
RESULTS = Path(__file__).parent / "results" / "lora.json"


class TrlSource(PeftSource):
    """What TRL does: its own generator, which gathers and merges the whole model before the first tensor."""

    def __init__(self, peft_model, dtype: torch.dtype):
        super().__init__(peft_model.get_base_model(), dtype)
        self._trl = VLLMGeneration.__new__(VLLMGeneration)
        self._trl.model = peft_model
        self._trl._dist = SimpleNamespace(
            gather_params=deepspeed.zero.GatheredParameters, is_fsdp=False
        )
        self._stream = iter(())

    @contextmanager
    def gathering(self, bucket, holder=0) -> Iterator[Finish]:
        (meta,) = bucket

        @torch.no_grad()
        def finish() -> list[Pieces]:
            if meta == self._metadata[0]:
                self._stream = self._trl._iter_named_params()
            name, tensor = next(self._stream)
            assert name == meta.name, (name, meta.name)
            return [Pieces.whole(tensor)]

        yield finish
        if meta == self._metadata[-1]:
            with torch.no_grad():
                assert next(self._stream, None) is None  # unmerges, and shards again


def adapted():
    torch.manual_seed(0)
    config = LoraConfig(r=RANK_OF_LORA, lora_alpha=32, use_rslora=True, target_modules=TARGETS)
    return get_peft_model(tiny_qwen2(**MODEL), config)


def memory(key: str) -> float:
    """Of this process, in MiB."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) / 1024


class Bench:
    """The trainer's side on one rank; `engines` (one per arm without "again") only on rank 0."""

    def __init__(self, model, engines: dict):
        self.model, self.engines = model, engines
        base, dtype = model.get_base_model(), torch.float32
        trainable = [p for p in model.parameters() if p.requires_grad]
        deepspeed.initialize(
            model=model,
            config=ZERO3,
            model_parameters=trainable,
            optimizer=torch.optim.SGD(trainable, lr=0.0),
        )
        gather = ShardGather(torch.device("cpu"), [RANKS])
        plans = {
            "adapter": (AdapterSource(base, dtype, gather), BUCKET_MIB << 20),
            "merged": (PeftSource(base, dtype, gather), BUCKET_MIB << 20),
            "trl": (TrlSource(model, dtype), 1),  # a bucket per tensor
        }
        self.syncs = {
            arm: WeightSync(source, engines.get(arm), limit)
            for arm, (source, limit) in plans.items()
        }
        self.updates: dict[str, int] = defaultdict(int)
        self.rows: dict[str, list[dict]] = defaultdict(list)

    @torch.no_grad()
    def move(self) -> None:
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.ds_tensor.add_(torch.randn_like(parameter.ds_tensor) * 0.02)

    def sync(self, arm: str, note: bool = True, move: bool = True) -> None:
        name = arm.removesuffix("_again")
        if move:
            self.move()
        self.updates[name] += 1
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before, start = memory("VmRSS"), time.perf_counter()
        timings = self.syncs[name].run(WeightVersion(self.updates[name]))
        seconds = time.perf_counter() - start
        if note:
            peak = memory("VmHWM") - before
            self.rows[arm].append(
                {"seconds": seconds, "bytes": timings.num_bytes, "peak_mib": peak}
            )
        dist.barrier()

    @torch.no_grad()
    def differences(self) -> dict[str, float]:
        """Per engine |engine - trainer| of log-probs, after one more sync of each; every rank takes part."""
        tokens = probe_tokens(MODEL["vocab_size"])
        ids = torch.tensor([tokens])
        self.move()
        for arm in self.syncs:
            self.sync(arm, note=False, move=False)
        scores = (
            self.model(input_ids=ids)
            .logits[0, :-1]
            .log_softmax(-1)
            .gather(1, ids[0, 1:, None])[:, 0]
        )
        got = {arm: engine[0].score(tokens).logprobs for arm, engine in self.engines.items()}
        return {
            arm: (torch.from_numpy(logprobs.copy()) - scores).abs().max().item()
            for arm, logprobs in got.items()
        }

    def digest(self) -> list[int]:
        return crcs_of_weights(self.engines["adapter"][0]) if self.engines else []

    def generate(self, arm: str) -> float:
        """Seconds for 16 rows of 64 tokens; rank 0 only."""
        start = time.perf_counter()
        requests = [Request([5, 6, 7 + i], 1, seed=i) for i in range(16)]
        self.engines[arm].generate(requests, 64, {"temperature": 1.0, "ignore_eos": True}, 0)
        return time.perf_counter() - start


def work(bench: Bench, repeats: int) -> dict:
    """What every rank does; the figures are rank 0's but for the memory."""
    # the first update sends everything and opens the slots, the second warms up
    for arm in 2 * list(bench.syncs):
        bench.sync(arm, note=False)
    before = bench.digest()
    for turn in range(repeats):
        for arm in ARMS if turn % 2 == 0 else ARMS[::-1]:
            bench.sync(arm)
    while bench.updates["adapter"] < 2 + SYNCS_FOR_DIGEST:
        bench.sync("adapter", note=False)
    identical = bench.digest() == before
    differences = bench.differences()
    seconds = defaultdict(list)
    if bench.engines:
        for turn in range(repeats):
            for arm in ("adapter", "merged") if turn % 2 == 0 else ("merged", "adapter"):
                seconds[arm].append(bench.generate(arm))
    dist.barrier()
    peaks = [None] * RANKS
    dist.all_gather_object(
        peaks, {arm: [row["peak_mib"] for row in rows] for arm, rows in bench.rows.items()}
    )
    return {
        "rows": bench.rows, "peaks": peaks, "generation": seconds, "differences": differences,
        "base_digest_identical": identical, "syncs_between_digests": bench.updates["adapter"] - 3,
        "adapter_bytes": sum(p.ds_numel * 4 for n, p in bench.model.named_parameters() if "lora_" in n),
        "placed_bytes": placed_bytes(bench.syncs["adapter"]),
        "model_parameters": sum(p.ds_numel for n, p in bench.model.named_parameters() if "lora_" not in n),
    }  # fmt: skip


def placed_bytes(sync: WeightSync) -> int:
    """Of one adapter sync as it lies in the slots, padding included."""
    last = [slot_layout(bucket)[-1] for bucket in sync.buckets if not bucket[0].frozen]
    return sum(spec.offset + spec.num_bytes for spec in last)


def run_rank(rank: int, port: int, repeats: int, folder: Path) -> None:
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    deepspeed.init_distributed("gloo")
    model = adapted()
    with ExitStack() as stack:
        engines = {}
        for arm in ("adapter", "merged", "trl") if rank == 0 else ():
            lora = lora_arguments(RANK_OF_LORA) if arm == "adapter" else {}
            engine = running_engines(model.get_base_model(), folder / arm, FAULTY_REAL, **lora)
            engines[arm] = stack.enter_context(engine)
        found = work(Bench(model, engines), repeats)
        if rank == 0:
            (folder / "found.json").write_text(json.dumps(found))
        dist.barrier()


def spread(values: list[float]) -> dict:
    return {
        "median": round(median(values), 4),
        "low": round(min(values), 4),
        "high": round(max(values), 4),
    }


def report(found: dict, repeats: int) -> dict:
    rows = found["rows"]

    def ratio(above: str, below: str) -> dict:
        pairs = zip(rows[above], rows[below], strict=True)
        return spread([a["seconds"] / b["seconds"] for a, b in pairs])

    peaks = {arm: max(median(rank[arm]) for rank in found["peaks"]) for arm in rows}
    generation = found["generation"]
    return {
        "ranks": RANKS, "repeats": repeats, "lora_rank": RANK_OF_LORA, "bucket_mib": BUCKET_MIB,
        "model_parameters": found["model_parameters"],
        "bytes_ratio": found["placed_bytes"] / found["adapter_bytes"],
        "arms": {
            arm: {
                "sync_s": spread([row["seconds"] for row in rows[arm]]),
                "mib": rows[arm][-1]["bytes"] / 2**20,
                "peak_mib": round(peaks[arm], 1),
            } for arm in ARMS
        },
        "speedup_over_merged": ratio("merged", "adapter"),
        "speedup_over_trl": ratio("trl", "adapter"),
        "merged_over_trl": ratio("trl", "merged"),
        "control_ratio": ratio("merged_again", "merged"),
        "control_ratio_adapter": ratio("adapter_again", "adapter"),
        "base_digest_identical": found["base_digest_identical"],
        "syncs_between_digests": found["syncs_between_digests"],
        "logprob_difference": found["differences"],
        "generation_s": {arm: spread(generation[arm]) for arm in ("adapter", "merged")},
        "generation_slowdown": spread(
            [a / b for a, b in zip(generation["adapter"], generation["merged"], strict=True)]
        ),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="two repeats: does it run, not how fast"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    repeats, port, context = (
        2 if options.quick else 9,
        free_port(),
        multiprocessing.get_context("fork"),
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, port, repeats, Path(folder)) for rank in range(RANKS)]
        workers = [context.Process(target=run_rank, args=each) for each in arguments]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(1500)
            worker.kill()
        if any(worker.exitcode for worker in workers):
            raise SystemExit(f"ranks ended with {[worker.exitcode for worker in workers]}")
        found = json.loads((Path(folder) / "found.json").read_text())
    results = report(found, repeats)
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
