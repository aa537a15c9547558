"""What grows with nodes, where no other benchmark has it: the figures of docs/operate/sizing.md.

python benchmarks/scaling.py            # two minutes on one core; writes results/scaling.json
python benchmarks/scaling.py --tables   # only prints the tables of the page again

fixed_batch   simulated: efficiency in lock-step (1: no rank waits) of the real planner for a step of 4096 rows
node_tokens   simulated: completion tokens of the fullest node over the mean, 32 rows a rank in groups of 8
roll_call     measured: seconds of the real roll-call, all nodes in one process on this machine's loopback
loading       measured: private memory of one rank that reads a checkpoint under ZeRO-3, over the model's size
failures      arithmetic with published rates
checkpoints   arithmetic: Young's interval sqrt(2 x seconds of a checkpoint x time between failures)
"""

import argparse
import asyncio
import gc
import json
import math
import sys
import tempfile
from pathlib import Path
from time import monotonic
from types import SimpleNamespace

import numpy as np
import psutil
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from multinode_kit.launch_files import free_port
from trl_multinode.batches.batching import Plan, plan_micro_steps
from trl_multinode.tools.launch import rollcall
from trl_multinode.tools.launch.attendance import Hello
from trl_multinode.tools.launch.meeting import Place

RESULTS = Path(__file__).parent / "results" / "scaling.json"
RANKS, GENERATIONS = 7, 8  # training ranks of a node, rows of a group
# tokens; half of the spread is common to a group, as in balance_nodes.py
MEDIAN, SIGMA, LONGEST = (
    1200,
    0.6,
    8192,
)
LINEAR, CAP = 6 * 4096, 4 * LONGEST
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
BATCH = 4096  # rows of an optimizer step
SEEDS = 5
# Failures of a node of 8 GPUs a day that end a job. Llama 3 (arXiv:2407.21783, table 5): 419 unexpected interruptions
# in 54 days on 16,384 H100. Meta's research cluster RSC-1 (arXiv:2410.21680): 6.50 per 1000 node-days on A100; there
# jobs of 1024 GPUs failed every 7.9 h, 3.6 times as often as this rate says.
RATES = {"Llama 3": 419 / 54 / (16384 / 8), "RSC-1": 6.5e-3}
# bytes a parameter in a checkpoint; assumed: bytes a second into the file system
STATE_BYTES, DISK_RATE = (
    14,
    10e9,
)


def lengths(ranks: int, rows: int, seed: int) -> np.ndarray:
    """Draw the lengths of all rows, shuffled within each rank: shape `(ranks, rows)`."""
    random, count = np.random.default_rng(seed), ranks * rows
    group = np.repeat(random.normal(size=-(-count // GENERATIONS)), GENERATIONS)[:count]
    drawn = np.clip(
        MEDIAN * np.exp(SIGMA * (group + random.normal(size=count))), 4, LONGEST
    ).astype(np.int64)
    return random.permuted(drawn.reshape(ranks, rows), axis=1)


def fixed_batch(nodes: int) -> dict[str, float]:
    """Plan a step of about `BATCH` rows, whatever the number of nodes."""
    rows = max(1, round(BATCH / (nodes * RANKS)))
    found: dict[str, float] = {"rows": rows}
    for name, reach in (("node", [RANKS] * nodes), ("world", [nodes * RANKS])):
        plans = [
            plan_micro_steps(lengths(nodes * RANKS, rows, seed), reach, CAP, LINEAR)
            for seed in range(SEEDS)
        ]
        found[name] = float(np.mean([lock_step_efficiency(plan) for plan in plans]))
    return found


def lock_step_efficiency(plan: Plan) -> float:
    """Return the mean cost of a rank divided by the summed cost of each micro-step's most expensive bin."""
    costs = plan.costs()
    return float(costs.sum() / (len(costs) * costs.max(axis=0).sum()))


def node_tokens(nodes: int, rows: int = 32) -> float:
    """Return the tokens of the fullest node over the mean of all nodes."""
    sums = [
        lengths(nodes * RANKS, rows, seed).reshape(nodes, -1).sum(1) for seed in range(4 * SEEDS)
    ]
    return float(np.mean([each.max() / each.mean() for each in sums]))


async def roll_call(nodes: int) -> float:
    """Return the seconds of a roll-call of so many nodes, which all run in this process."""
    place = Place("127.0.0.1", free_port(), timeout_s=60.0)
    rollcall._Node._is_local = lambda self: self.hello.rank == 0  # type: ignore[method-assign]
    rollcall.say = lambda text: None
    versions = dict.fromkeys(("torch", "trl", "vllm", "transformers", "trl-multinode"), "1.0.0")
    calls = [
        rollcall.call(
            place,
            Hello(rank, f"host{rank}", f"id{rank}", rank + 1, nodes, [RANKS], RANKS + 1, versions),
        )
        for rank in range(nodes)
    ]
    start = monotonic()
    verdicts = await asyncio.gather(*calls)
    assert {verdict.code for verdict in verdicts} == {0}, verdicts[0]
    return monotonic() - start


def loading(kind: str) -> float:
    """Return the private memory that one rank needs to read a checkpoint under ZeRO-3, in sizes of the model.

    transformers reads all weights on every rank. Memory that maps the file is shared by a node's ranks and left out.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.integrations.deepspeed import _apply_weight_conversions_to_state_dict
    from transformers.modeling_utils import load_state_dict

    sizes = {
        "vocab_size": 300,
        "hidden_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    of_kind = {
        "qwen3": {"intermediate_size": 4096, "num_hidden_layers": 16},
        "qwen3_moe": {"moe_intermediate_size": 512, "num_experts": 64, "num_hidden_layers": 4},
    }[kind]
    config = AutoConfig.for_model(kind, **sizes, **of_kind)
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        size = sum(4 * parameter.numel() for parameter in model.parameters())
        model.save_pretrained(folder)
        with torch.device("meta"):
            empty = type(model)(config)
        del model
        gc.collect()
        before = private_bytes()
        state = {}
        for file in Path(folder).glob("*.safetensors"):
            state |= load_state_dict(str(file))
        state = _apply_weight_conversions_to_state_dict(
            empty, state, get_model_conversion_mapping(empty)
        )
        return (private_bytes() - before) / size


def private_bytes() -> int:
    """Return the memory of this process that is not of a file."""
    info = psutil.Process().memory_info()
    return info.rss - info.shared


def failures(nodes: int) -> dict[str, float]:
    """Return the failures a day."""
    return {name: rate * nodes for name, rate in RATES.items()}


def checkpoints(billions: float, nodes: int, per_day: float) -> SimpleNamespace:
    """Return seconds of a checkpoint, the best interval in minutes, and the share of the time that both cost."""
    seconds, between = STATE_BYTES * billions * 1e9 / DISK_RATE, 86400 / per_day
    interval = math.sqrt(2 * seconds * between)
    return SimpleNamespace(
        gb=STATE_BYTES * billions, per_rank=STATE_BYTES * billions / (nodes * RANKS), seconds=seconds,
        minutes=interval / 60, lost=seconds / interval + interval / 2 / between,
    )  # fmt: skip


# ---- the tables of the page


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    return (
        "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows))
        + "\n"
    )


def tables(found: dict) -> dict[str, str]:
    """Return the tables of docs/operate/sizing.md by name."""
    batch = [
        [
            nodes,
            str(cell["rows"]),
            f"{cell['node']:.2f}",
            f"{cell['world']:.2f}",
            f"{found['node_tokens'][nodes]:.2f}",
        ]
        for nodes, cell in found["fixed_batch"].items()
    ]
    risk = []
    for nodes in (8, 16, 64, 128):
        low, high = failures(nodes).values()
        of_32b = checkpoints(32.8, nodes, high)
        risk.append([
            str(nodes), f"{low:.2f} to {high:.2f}", f"{24 / high:.0f} to {24 / low:.0f}", f"{of_32b.minutes:.0f}",
            f"{of_32b.lost:.1%}".replace("%", " %"),
        ])  # fmt: skip
    return {
        "fixed_batch": table(
            [
                "nodes",
                "rows a rank",
                "rows stay on their node",
                "rows go to any rank (default)",
                "fullest node",
            ],
            batch,
        ),
        "failures": table(
            [
                "nodes",
                "failures a day",
                "hours between two",
                "best interval of checkpoints, 32B, min",
                "lost",
            ],
            risk,
        ),
    }


def main() -> None:
    torch.set_num_threads(1)
    found = {
        "fixed_batch": {str(nodes): fixed_batch(nodes) for nodes in NODES},
        "node_tokens": {str(nodes): node_tokens(nodes) for nodes in NODES},
        "roll_call_s": {str(nodes): asyncio.run(roll_call(nodes)) for nodes in (2, 8, 64, 128)},
        "loading": {kind: loading(kind) for kind in ("qwen3", "qwen3_moe")},
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tables", action="store_true")
    if not parser.parse_args().tables:
        main()
    for text in tables(json.loads(RESULTS.read_text())).values():
        print(text)
