"""Host memory against a broadcast to the workers, into a real vLLM, beside a plain copy of the same bytes.

    python benchmarks/transports.py [--quick]

One process sends a model of 40 M parameters; arms take turns:

    host      shared memory, what `weight_transport="auto"` takes
    control   the same again
    nccl      the broadcast transport; on a machine without a GPU its process group is gloo, so this measures that
              code and not NCCL
    memcpy    the same bytes copied once from one buffer of this process to another: what a copy costs here

`seconds` are of a whole sync; `stage_s` of copy and load alone. `ipc` needs a GPU and is reported as not run without.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from multinode_kit.engines import REAL, SyncDriver, running_engines
from trl_multinode.weights.transport import Transport

ARMS = ("host", "nccl", "memcpy", "control")
RESULTS = Path(__file__).parent / "results" / "transports.json"
BUCKET_BYTES = 40 << 20
PROBE = [5, 6, 7, 8000, 8191]


def build():
    config = Qwen2Config(
        vocab_size=8192, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def spread(values: list[float]) -> dict:
    return {
        "median": round(median(values), 4),
        "low": round(min(values), 4),
        "high": round(max(values), 4),
    }


def difference(trainer: SyncDriver) -> float:
    scored = torch.from_numpy(trainer.engines[0].score(PROBE).logprobs.copy())
    return (scored - trainer.logprobs(PROBE[:1], PROBE[1:])).abs().max().item()


def memcpy(num_bytes: int) -> float:
    source, target = (
        torch.ones(num_bytes, dtype=torch.uint8),
        torch.zeros(num_bytes, dtype=torch.uint8),
    )
    start = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - start


def measure(repeats: int, folder: Path) -> dict:
    torch.set_num_threads(1)
    model = build()
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    stages: dict[str, list[dict]] = {arm: [] for arm in ARMS}
    fresh, stale = [], []
    with running_engines(model, folder, REAL, max_num_seqs=4) as engines:
        trainer = SyncDriver(model, engines, BUCKET_BYTES)
        sync = trainer.sync
        num_bytes = sum(meta.num_bytes for bucket in sync.buckets for meta in bucket)
        for repeat in range(-1, repeats):
            for number, arm in enumerate(ARMS if repeat % 2 == 0 else ARMS[::-1]):
                if arm == "memcpy":
                    seconds[arm].append(memcpy(num_bytes))
                    continue
                store = folder / f"{repeat}.{number}"
                store.mkdir()
                transport = Transport("nccl" if arm == "nccl" else "host", folder=store)
                sync._slots = transport.open(engines, sync.layouts)
                trainer.perturb(0.02)
                if trainer.version.update:
                    stale.append(difference(trainer))
                start = time.perf_counter()
                trainer.send()
                seconds[arm].append(time.perf_counter() - start)
                stages[arm].append(
                    {"copy_s": trainer.timings.copy_s, "load_s": trainer.timings.load_s}
                )
                fresh.append(difference(trainer))
                if sync._slots.kind != transport.kind:
                    raise RuntimeError(f"{arm}: fell back to {sync._slots.kind}")
    return summarize(seconds, stages, num_bytes) | {
        "worst_logprob_difference": max(fresh),
        "stale_logprob_difference": min(stale),
    }


def summarize(seconds: dict, stages: dict, num_bytes: int) -> dict:
    timed = {arm: values[1:] for arm, values in seconds.items()}  # the first turn warms up
    return {
        "model_mb": round(num_bytes / 1e6, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "not_run": []
        if torch.cuda.is_available()
        else ["ipc (needs a GPU)", "nccl over NCCL (ran over gloo)"],
        "seconds": {arm: spread(values) for arm, values in timed.items()},
        "gb_per_s": {
            arm: spread([num_bytes / 1e9 / s for s in values]) for arm, values in timed.items()
        },
        "stage_s": {
            arm: {key: spread([s[key] for s in found[1:]]) for key in found[0]}
            for arm, found in stages.items()
            if found
        },
        "nccl_over_host": ratio(timed["nccl"], timed["host"]),
        "control_ratio": ratio(timed["control"], timed["host"]),
        "repeats": len(timed["host"]),
    }


def ratio(above: list[float], below: list[float]) -> dict:
    return spread([a / b for a, b in zip(above, below, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two repeats, no file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(2 if arguments.quick else 9, Path(folder))
    if arguments.quick:
        print(json.dumps(found, indent=1))
    else:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
