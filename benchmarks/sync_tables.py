"""Sections of benchmarks/RESULTS.md about the weight sync."""

from markdown_table import table
from projection import MEASURED
from projection import tables as projected_tables


def lora(found: dict) -> str:
    arms = {name: arm for name, arm in found["arms"].items() if not name.endswith("_again")}
    rows = [
        [f"{label}", *(arm[key] for arm in arms.values())]
        for label, key in (
            ("sync, s", "sync_s"),
            ("MiB to an engine", "mib"),
            ("a rank's memory rises by, MiB", "peak_mib"),
        )
    ]
    generation = found["generation_s"]
    rows += [["16 rows x 64 tokens, s", *(generation.get(name, "as merged") for name in arms)]]
    keys = [
        "speedup_over_merged",
        "speedup_over_trl",
        "control_ratio",
        "control_ratio_adapter",
        "bytes_ratio",
    ]
    figures = [
        [f"`{key}`", found[key]] for key in [*keys, "generation_slowdown", "base_digest_identical"]
    ]
    return (
        f"## LoRA\n\n{found['model_parameters'] / 1e6:.0f} M parameters, rank {found['lora_rank']} on every linear "
        f"layer, {found['ranks']} ranks under ZeRO-3, vLLM on the same cores (`benchmarks/lora.py`, "
        f"docs/inside/weight-sync.md). Weights compared bit by bit over {found['syncs_between_digests']} syncs. "
        f"Log-probs of engines and trainer: at most {max(found['logprob_difference'].values()):.0e} apart.\n\n"
        + table(["", *arms], rows) + "\n" + table(["", ""], figures)
    )  # fmt: skip


def sync(found: dict) -> str:
    cells = found["cells"]
    columns = [
        f"{c['model']}, {c['nodes']} x {found['ranks_per_node']}, {c['link']}, {c['engine']}"
        for c in cells
    ]
    rows = [
        [f"{arm}, s", *(c["wall_s"][arm] for c in cells)]
        for arm in ("ours", "trl", "world", "control", "ahead")
    ]
    rows += [
        [f"pause: {arm}, s", *(c["pause_s"][arm] for c in cells)]
        for arm in ("loading", "alone", "again")
    ]
    keys = [
        "speedup_over_trl",
        "speedup_over_world",
        "control_ratio",
        "cpu_speedup_over_trl",
        "cpu_control_ratio",
        "trainer_pause_ratio",
        "pause_control_ratio",
        "frozen_ratio",
        "inbound_ratio",
        "inbound_ratio_trl",
    ]
    rows += [[f"`{key}`", *(c[key] for c in cells)] for key in keys]
    rows += [["limit of `inbound_ratio`", *(c["inbound_limit"] for c in cells)]]
    counts = ["buckets", "world_collectives", "world_collectives_trl"]
    rows += [[f"`{key}`", *(c[key] for c in cells)] for key in counts]
    rows += [
        [f"{stage}", *(c["stage_s"][stage] for c in cells)]
        for stage in ("gather_s", "copy_s", "load_s")
    ]
    keys = [
        "commit_s",
        "wall_vs_stages",
        "cpu_share",
        "gb_per_s",
        "extra_memory_buckets",
        "extra_memory_buckets_trl",
    ]
    rows += [[f"`{key}`", *(c[key] for c in cells)] for key in keys]
    rows += [
        [
            "`sync_share` where TRL's is 20 %",
            *(share(c["speedup_over_trl"]["median"]) for c in cells),
        ]
    ]
    return "## Weight sync\n\n" + SYNC + table(["", *columns], rows)


SYNC = """Full fine-tuning under ZeRO-3, fp32, nodes in network namespaces on one machine (`benchmarks/sync.py`).
`trl`: TRL's `VLLMGeneration.sync_weights` in server mode. Replaced in it: `vllm_client`, by one that writes every
tensor into our slots and loads our buckets (no HTTP), and `is_main_process`, true on every local main process, so that
the loop feeds each node's engine as ours does and not one server: both in TRL's favour. The object is made without its
`__init__`.
`world`: ours with one all-gather of the world per bucket. `control`: ours again. `ahead`: ours with a slot for each
bucket, where the seconds are the pause of training. `frozen_ratio`: the seconds of its loads and commit over `ours`,
those in which an engine is frozen in flight. `pause`: the same with all ranks on one core and all engines on the
other, and without engines (`alone`, and `again`, its control); `trainer_pause_ratio` and `pause_control_ratio` are the
first and the last over `alone`. `cpu_` ratios are of the CPU seconds of all ranks and engines, loads beside training
included. `wall_vs_stages`: time / (slowest stage + one bucket of the others). `extra_memory_buckets`: peak of a rank,
in buckets of the largest size that was allowed (40 MiB). `cpu_share`: CPU time of all ranks and engines over that of
the cores.

"""


def share(speedup: float) -> str:
    """A step in which TRL's sync takes a fifth, with ours instead."""
    return f"{1 / (1 + 4 * speedup):.0%}"


def transports(found: dict) -> str:
    arms = ("host", "control", "nccl", "memcpy")
    rows = [["whole sync, s", *(found["seconds"][arm] for arm in arms)]]
    rows += [["GB/s", *(found["gb_per_s"][arm] for arm in arms)]]
    for stage in ("copy_s", "load_s"):
        rows += [
            [
                stage,
                *(found["stage_s"][arm][stage] if arm in found["stage_s"] else "" for arm in arms),
            ]
        ]
    figures = [[f"`{key}`", found[key]] for key in ("nccl_over_host", "control_ratio")]
    return (
        f"## Transports\n\nOne process, one vLLM, {found['model_mb']} MB (`benchmarks/transports.py`). `nccl` over "
        f"gloo. Not run: {', '.join(found['not_run']) or 'nothing'}. Log-probs at most "
        f"{found['worst_logprob_difference']:.0e} apart after every sync.\n\n"
        + table(["", *arms], rows) + "\n" + table(["", ""], figures)
    )  # fmt: skip


def projection(found: dict) -> str:
    checked = [[r["model"], r["nodes"], r["link"], "fitted" if r["fitted"] else "predicted", r["measured_s"],
                r["predicted_s"], f"{r['error']:+.0%}"] for r in found["cells"]]  # fmt: skip
    sources = [
        f"- {row['who']}, {row['model']}: {row['way']}; <{row['source']}>"
        for row in found["published"]
    ] + [
        f"- {who}, no seconds of one sync: {what}; <{source}>"
        for who, what, source in found["others"]
    ]
    rates = [
        f"- {each['what']}: <{each['source']}>"
        for each in found["inputs"].values()
        if each["source"]
    ]
    return (
        "## Projection of the weight sync\n\n**Not measured on a GPU.** Arithmetic of "
        "`trl_multinode/tools/plan/sync_seconds.py`, explained in [sizing.md](../docs/operate/sizing.md); first what "
        f"it says of the cells of {MEASURED} (worst error {found['worst_error']:.0%}, limit {found['limit']:.0%}).\n\n"
        + table(["model", "nodes", "link", "", "measured, s", "arithmetic, s", "error"], checked) + "\n"
        + "\n".join(f"**{title}**\n\n{table(heads, rows)}" for title, heads, rows in projected_tables(found))
        + "\n" + "\n".join([*sources, *rates]) + "\n"
    )  # fmt: skip


def few_rows(found: dict) -> str:
    keys = ["seconds", "received_mib", "sent_mib", "within_mib", "peak_mib"]
    rows = [[arm, *(value[key] for key in keys)] for arm, value in found["arms"].items()]
    columns = [
        "rows",
        "seconds",
        "MiB into a node",
        "MiB out of a node",
        "MiB within a node",
        "MiB of a local main",
    ]
    return (
        f"## FSDP2 shards of few rows\n\nGathering one tensor of {found['tensor_mib']} MiB from {found['ranks']} "
        f"forked ranks on {found['nodes']} nodes (`benchmarks/few_rows.py`); nodes are those with the most. With 16 "
        "rows nothing is padded. All ranks share the machine's cores.\n\n" + table(columns, rows)
    )
