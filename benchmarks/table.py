"""Writes benchmarks/RESULTS.md from benchmarks/results/*.json."""

import json
from pathlib import Path

from markdown_table import table, text
from sync_tables import few_rows, lora, projection, sync, transports

FOLDER = Path(__file__).parent
HEAD = """# Results

Written by `benchmarks/table.py` from `benchmarks/results/`. Median (lowest to highest) of the repeats, arms taking
turns; a control compares two equal arms. `make bench` runs everything.
"""


def overlap(found: dict) -> str:
    mixes = {name: value for name, value in found.items() if name != "contention"}
    rows = [
        ["T_gen, s", *(mix["t_gen_s"] for mix in mixes.values())],
        ["T_train, s", *(mix["t_train_s"] for mix in mixes.values())],
        ["T_sync, s", *(mix["t_sync_s"] for mix in mixes.values())],
        ["step, max_staleness=0, s", *(mix["step_s"]["sync"] for mix in mixes.values())],
        ["step, max_staleness=1, s", *(mix["step_s"]["overlap"] for mix in mixes.values())],
        ["`step_ratio_vs_max`", *(mix["step_ratio_vs_max"] for mix in mixes.values())],
        [
            "the same, T_gen and T_train while both run",
            *(m["step_ratio_vs_max_side_by_side"] for m in mixes.values()),
        ],
        ["speedup", *(mix["speedup"] for mix in mixes.values())],
        ["`hidden_share` of the step", *(mix["hidden_share"] for mix in mixes.values())],
        ["`busy_share` ranks, 0 and 1", *(busy(mix, "ranks") for mix in mixes.values())],
        ["`busy_share` engines, 0 and 1", *(busy(mix, "engines") for mix in mixes.values())],
        ["`control_ratio`", *(mix["control_ratio"] for mix in mixes.values())],
        ["cost when off", *(mix["cost_when_off"] for mix in mixes.values())],
    ]
    return (
        "## Overlap\n\nOne rank and one vLLM engine, a core each (`benchmarks/overlap.py`). Speed of a core when the "
        f"other is busy too: {', '.join(f'{speed:.2f} ({kind})' for kind, speed in found['contention'].items())}.\n\n"
        + table(["", *mixes], rows)
    )


def agents(found: dict) -> str:
    mixes = found.values()
    rows = [
        ["a tool, s", *(mix["mix"]["tool_s"] for mix in mixes)],
        ["T_rollouts (generation and tools), s", *(mix["t_rollouts_s"] for mix in mixes)],
        ["T_train, s", *(mix["t_train_s"] for mix in mixes)],
        ["T_sync, s", *(mix["t_sync_s"] for mix in mixes)],
        ["step, TRL's loop in the main call, s", *(mix["step_s"]["synchronous"] for mix in mixes)],
        ["step, nothing ahead, s", *(mix["step_s"]["alone"] for mix in mixes)],
        ["step, max_staleness=1, s", *(mix["step_s"]["ahead"] for mix in mixes)],
        ["`step_ratio_vs_max`", *(mix["step_ratio_vs_max"] for mix in mixes)],
        ["`control_ratio`", *(mix["control_ratio"] for mix in mixes)],
    ]
    return (
        "## Agents\n\nOne rank and one vLLM engine, a core each; every completion calls a tool that sleeps\n"
        + ("(`benchmarks/agents.py`).\n\n" + table(["", *found], rows))
    )


def busy(mix: dict, who: str) -> str:
    return " and ".join(f"{mix['busy_share'][arm][who]:.2f}" for arm in ("sync", "overlap"))


def long_tail(found: dict) -> str:
    parts = [LONG_TAIL.format(**found["lengths"])]
    if "note" in found:
        parts.append(found["note"] + "\n")
    for name, cell in found["cells"].items():
        arms = cell["arms"]
        keys = ["step_s", "speedup_over_staleness_1", "ratio_to_ideal", "ratio_to_full", "row_seconds_share",
                "running_rows", "mixed_rows", "trained_share", "mean_age", "max_age"]  # fmt: skip
        rows = [[f"`{key}`", *(arm[key] for arm in arms.values())] for key in keys]
        aim = ", ".join(
            f"{what.replace('_', ' ')}: {verdict}" for what, verdict in cell["aim"].items()
        )
        parts.append(
            f"{name}: g {text(cell['g_s'])} s, t {text(cell['t_s'])} s; `control_ratio` "
            f"{text(cell['control_ratio'])}, {cell['repeats']} repeats. Of `in_flight_3`: {aim}.\n\n"
            + table(["", *arms], rows)
        )
    return "\n".join(parts)


LONG_TAIL = """## Completions of very different lengths

One rank and one vLLM engine, a core each; rows in groups of 8, lengths log-normal (median {median} tokens, at most
{longest}, sigma {sigmas[0]} common to a group and {sigmas[1]} of each row). Training is a computation of fixed length
in the place of a trainer's step; `benchmarks/long_tail.py` explains the arms and figures, docs/use/ahead.md the
settings. The aim for `in_flight_3` at g/t 1: at least 1.8 times as fast as `drain_1`, at most 1.25 times the ideal.
It is undecided where two equal arms (`control_ratio`) differ by more than a quarter.
"""


def balance(found: dict) -> str:
    runs = found["runs"]
    keys = [
        "train_phase_speedup",
        "speedup_over_trl_cropped",
        "speedup_over_trl_one_row",
        "control_ratio",
    ]
    rows = [[f"`{key}`", *(run[key] for run in runs)] for key in keys]
    shares = ["real_token_share", "real_token_share_in_lock_step", "mean_rows"]
    rows += [[f"`{key}`", *(run["arms"]["balanced"][key] for run in runs)] for key in shares]
    rows += [["`gradient_rel_diff`", *(f"{run['gradient_rel_diff']:.1e}" for run in runs)]]
    columns = [f"{run['ranks']} ranks, {run['rows']} rows" for run in runs]
    head = "## Balanced micro-batches\n\nSee docs/use/balance.md (`benchmarks/balance.py`).\n\n"
    return head + table(["", *columns], rows)


def balance_nodes(found: dict) -> str:
    rows = []
    for nodes in sorted({cell["nodes"] for cell in found["cells"]}):
        cells = {cell["rows"]: cell["arms"] for cell in found["cells"] if cell["nodes"] == nodes}
        shares = [
            cells[size].get(arm, {}).get("lock_step_efficiency", "") for size, arm in BALANCE_ARMS
        ]
        others = [
            ", ".join(f"{cells[size]['world'][key]:.0f}" for size in (32, 128))
            for key in BALANCE_KEYS
        ]
        rows.append([f"{nodes}", *shares, *others])
    return BALANCE_NODES.format(**found) + table(
        ["nodes", *BALANCE_ARMS.values(), *BALANCE_KEYS.values()], rows
    )


BALANCE_ARMS = {
    (8, "world"): "8 rows: world",
    (32, "node"): "32 rows: node",
    (32, "world"): "world",
    (32, "one_pool"): "one pool",
    (128, "node"): "128 rows: node",
    (128, "world"): "world",
    (128, "one_pool"): "one pool",
}
BALANCE_KEYS = {
    "planning_ms": "plan, ms",
    "exchange_ms": "exchange, ms",
    "sent_mb_per_node": "MB a node sends",
}
BALANCE_NODES = """## Balance over nodes

Lock-step efficiency on nodes of 7 ranks by rows of a rank, simulated with the real planner on lengths with a median of
{lengths[median]} and at most {lengths[longest]} tokens (`benchmarks/balance.py --nodes`): `balance_across="node"`;
`"world"`, with pools of at most {pool_rows} rows and {pool_ranks} ranks; and one pool of all rows. The last three
columns are those of `"world"` with 32 and 128 rows. See docs/use/balance.md.

"""


def exchange(found: dict) -> str:
    cells = found["cells"]
    columns = ["nodes x ranks", "`exchange_s_per_mtoken`", "`control_ratio`", "TRL's server", "the same, of the world",
               "`vllm serve`"]  # fmt: skip
    keys = ["exchange_s_per_mtoken", "control_ratio", "trl_s_per_mtoken", "trl_s_per_mtoken_of_the_world",
            "serve_s_per_mtoken"]  # fmt: skip
    rows = [
        [f"{cell['nodes']} x {cell['ranks']}", *(cell.get(key, "") for key in keys)]
        for cell in cells
    ]
    real = found["real_engine"]
    head = (
        "## Exchange\n\nFrom the last token in the engine core to rows with the slowest rank; all ranks of a "
        "node ask at once and all rows end in one step. Seconds per million of the rank's own tokens, log-probs "
        f"included; {found['rows_per_rank']} rows of {found['tokens_per_row']} tokens per rank "
        f"(`benchmarks/exchange.py`). Tokens are played in the place of vLLM's engine core, on {found['cores']} "
        "cores; vLLM's front end and server above it are real. Nodes share nothing and are measured one after "
        "another. Of TRL's world ranks 0 and 1 are processes, with "
        f"{found['rows_per_rank_of_others']} rows of {found['tokens_per_row_of_others']} tokens, as "
        "`vllm serve` has.\n\n"
    )
    lengths = ", ".join(
        f"{text(value)} with {tokens} tokens a row"
        for tokens, value in found["exchange_s_per_mtoken_by_length"].items()
    )
    tail = (
        f"\nOther lengths, one node with {max(cell['ranks'] for cell in cells)} ranks: {lengths}.\n\n"
        f"With vLLM's real engine core ({real['ranks']} ranks, {real['rows']} rows of {real['tokens']} tokens, a tiny "
        f"model on a CPU): {text(real['exchange_s_per_mtoken'])}; the same rows played: "
        f"{text(real['played_core_s_per_mtoken'])}.\n\nReplaced names:\n\n"
    )
    return (
        head
        + table(columns, rows)
        + tail
        + "".join(f"- `{k}`: {why}\n" for k, why in found["replaced"].items())
    )


def learning(found: dict) -> str:
    rows = []
    for step, after in found["after"].items():
        for arm, rewards in after["reward"].items():
            rows.append(
                [arm, step, after["mean"][arm], ", ".join(f"{reward:.3f}" for reward in rewards)]
            )
    return (
        f"## Learning\n\nMean reward over the last {found['averaged_over']} steps, by seed "
        "(`benchmarks/learning.py`).\n\n" + table(["arm", "after step", "mean", "seeds"], rows)
    )


def scoring(found: dict) -> str:
    mixes = found.values()
    rows = [
        ["reward of a group, s", *(mix["mix"]["reward_s"] for mix in mixes)],
        ["groups in a round", *(mix["groups"] for mix in mixes)],
        ["`max_staleness`", *(mix["mix"]["max_staleness"] for mix in mixes)],
        ["step with a free reward, s", *(mix["step_s"]["free"] for mix in mixes)],
        ["step with `score_groups`, s", *(mix["step_s"]["slow"] for mix in mixes)],
        ["step with TRL's call in the round, s", *(mix["step_s"]["in_round"] for mix in mixes)],
        ["`step_ratio`", *(mix["step_ratio"] for mix in mixes)],
        ["the same with TRL's call", *(mix["step_ratio_in_round"] for mix in mixes)],
        ["`control_ratio`", *(mix["control_ratio"] for mix in mixes)],
    ]
    return (
        "## Rewards while rows finish\n\nOne rank and one vLLM engine, a core each; the step against the same reward "
        "free of charge (`benchmarks/scoring.py`).\n\n" + table(["", *found], rows)
    )


def dynamic_sampling(found: dict) -> str:
    rows = [
        [
            f"`dynamic_sampling={8 if arm == 'on' else 0}`",
            number,
            mean_of(found[arm][number]),
            listed(found[arm][number]),
        ]
        for number in ("steps", "tokens")
        for arm in ("off", "on")
    ]
    rows += [
        ["ratio", number, found.get(f"{number}_on_over_off"), ""] for number in ("steps", "tokens")
    ]
    return (
        "## Dynamic sampling\n\nSteps and sampled tokens of completions until the expected reward on held-out prompts "
        f"is {found['target']}, by seed; {found['groups_per_step']} groups of {found['rows']} a step, of which "
        f"{found['off']['flat_share_at_start']:.0%} are flat at the start (`benchmarks/dynamic_sampling.py`).\n\n"
        + table(["arm", "until then", "mean", "seeds"], rows)
    )


def mean_of(values: list) -> str:
    return "-" if None in values else f"{sum(values) / len(values):.0f}"


def listed(values: list) -> str:
    return ", ".join("not reached" if value is None else str(value) for value in values)


def rivals(found: dict) -> str:
    """Tokens a second and device from the figures of the overlap: two devices, the reserved one included."""
    rows = []
    for name, mix in found.items():
        if name != "contention":
            tokens, devices = mix["mix"]["num_rows"] * mix["mix"]["num_tokens"], 2
            steps = [mix["step_s"]["sync"]["median"], mix["step_s"]["overlap"]["median"]]
            steps.append((mix["t_gen_s"]["median"] + mix["t_train_s"]["median"]) / devices)
            rows.append([name, *(round(tokens / seconds / devices) for seconds in steps)])
    return (
        "## Rivals\n\n"
        + RIVALS
        + table(["", "max_staleness=0", "max_staleness=1", "colocated, calculated"], rows)
    )


RIVALS = """- TRL server: the arms `trl` of the exchange and of the weight sync.
- TRL colocate on all devices of a node: does not run on a CPU (DeepSpeed's patches of torch break what vLLM compiles
  in the same process), so it is calculated from the same phases as (T_gen + T_train) / devices: perfect scaling, no
  sleep and wake-up, no weight sync, and everything fits into the memory.
- AsyncGRPO: not run; it needs a vLLM server with NCCL weight transfer, and has neither DeepSpeed nor evaluation.

Completion tokens per second and device, the reserved device counted.

"""


def control_plane(found: dict) -> str:
    worlds = list(found.values())
    rows = [
        [
            "nodes x ranks",
            *(f"{world['nodes']} x {world['ranks'] // world['nodes']}" for world in worlds),
        ],
        [
            "connections to the store, per rank",
            *(world["connections_per_rank"] for world in worlds),
        ],
        [
            "CPU of the store during the start, s",
            *(world["startup_store_cpu_s"] for world in worlds),
        ],
        ["CPU of the store, without heartbeats", *(percent(world, "off") for world in worlds)],
        ["the same once more (control)", *(percent(world, "control") for world in worlds)],
        ["CPU of the store, with heartbeats", *(percent(world, "on") for world in worlds)],
        ["with over without", *(world["on_over_off"] for world in worlds)],
        [
            "a failure to the end of all ranks, s",
            *(world["failure_seen_by_all_s"] for world in worlds),
        ],
        [
            "a stopped rank to the end of all others, s",
            *(world["silence_seen_by_all_s"] for world in worlds),
        ],
    ]
    return CONTROL_PLANE + table(["ranks", *(str(world["ranks"]) for world in worlds)], rows)


def percent(world: dict, arm: str) -> str:
    return f"{100 * world['store_cpu_share'][arm]:.2f} % of a core"


CONTROL_PLANE = """## Control plane

Real stores, watch threads and heartbeats in forked processes on one machine of 4 cores, which ran tests at the same
time (`benchmarks/control_plane.py`). The limit for heartbeats is 1.5 times the store's CPU time without them. The
seconds of the last two rows are those of processes that compete for 4 cores; 30 s of the last are `heartbeat_timeout`.

"""


def training(found: dict) -> str:
    checkpointed = found["with_checkpointing"]
    cells = {name: cell for name, cell in found.items() if name != "with_checkpointing"}
    cells |= {f"{name}, checkpointing": cell for name, cell in checkpointed.items()}
    columns = ("train_phase_speedup", "control_ratio", "gradient_rel_diff")
    rows = [
        [name, *(cell[column] for column in columns[:2]), f"{cell[columns[2]]:.1e}"]
        for name, cell in cells.items()
    ]
    return (
        "## Training without a scoring pass\n\nCPU seconds of a step with TRL's scoring pass over those without it, "
        "of the same rows on one core (`benchmarks/training.py`).\n\n"
        + table(["loss, micro-batches", *(f"`{column}`" for column in columns)], rows)
    )


def render() -> str:
    sections = [HEAD]
    for name, section in SECTIONS:
        path = FOLDER / "results" / f"{name}.json"
        if path.exists():
            sections.append(section(json.loads(path.read_text())))
    return "\n".join(sections)


SECTIONS = (
    ("exchange", exchange),
    ("sync", sync),
    ("few_rows", few_rows),
    ("projection", projection),
    ("transports", transports),
    ("lora", lora),
    ("overlap", overlap),
    ("overlap", rivals),
    ("agents", agents),
    ("long_tail", long_tail),
    ("balance", balance),
    ("balance_nodes", balance_nodes),
    ("training", training),
    ("learning", learning),
    ("scoring", scoring),
    ("dynamic_sampling", dynamic_sampling),
    ("control_plane", control_plane),
)

if __name__ == "__main__":
    (FOLDER / "RESULTS.md").write_text(render())
