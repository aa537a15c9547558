"""Writes benchmarks/RESULTS.md from benchmarks/results/*.json."""

import json
from pathlib import Path

FOLDER = Path(__file__).parent
HEAD = """# Results

Written by `benchmarks/table.py` from `benchmarks/results/`. Median (lowest to highest) of the repeats, arms taking
turns; a control compares two equal arms. `make bench` runs everything.
"""


def text(value) -> str:
    if isinstance(value, dict):
        low, high = (value[key] for key in (("low", "high") if "low" in value else ("min", "max")))
        return f"{value['median']:.2f} ({low:.2f} to {high:.2f})"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def table(columns: list[str], rows: list[list]) -> str:
    lines = [columns, ["---"] * len(columns), *([text(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def overlap(found: dict) -> str:
    mixes = {name: value for name, value in found.items() if name != "contention"}
    rows = [
        ["T_gen, s", *(mix["t_gen_s"] for mix in mixes.values())],
        ["T_train, s", *(mix["t_train_s"] for mix in mixes.values())],
        ["T_sync, s", *(mix["t_sync_s"] for mix in mixes.values())],
        ["step, max_staleness=0, s", *(mix["step_s"]["sync"] for mix in mixes.values())],
        ["step, max_staleness=1, s", *(mix["step_s"]["overlap"] for mix in mixes.values())],
        ["`step_ratio_vs_max`", *(mix["step_ratio_vs_max"] for mix in mixes.values())],
        ["the same, T_gen and T_train while both run", *(m["step_ratio_vs_max_side_by_side"] for m in mixes.values())],
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


def busy(mix: dict, who: str) -> str:
    return " and ".join(f"{mix['busy_share'][arm][who]:.2f}" for arm in ("sync", "overlap"))


def balance(found: dict) -> str:
    runs = found["runs"]
    keys = ["train_phase_speedup", "speedup_over_trl_cropped", "speedup_over_trl_one_row", "control_ratio"]
    rows = [[f"`{key}`", *(run[key] for run in runs)] for key in keys]
    shares = ["real_token_share", "real_token_share_in_lock_step", "mean_rows"]
    rows += [[f"`{key}`", *(run["arms"]["balanced"][key] for run in runs)] for key in shares]
    rows += [["`gradient_rel_diff`", *(f"{run['gradient_rel_diff']:.1e}" for run in runs)]]
    columns = [f"{run['ranks']} ranks, {run['rows']} rows" for run in runs]
    head = "## Balanced micro-batches\n\nSee docs/balance.md (`benchmarks/balance.py`).\n\n"
    return head + table(["", *columns], rows)


def exchange(found: dict) -> str:
    cells = found["cells"]
    columns = ["nodes x ranks", "`exchange_s_per_mtoken`", "`control_ratio`", "TRL's server", "the same, of the world",
               "`vllm serve`"]  # fmt: skip
    keys = ["exchange_s_per_mtoken", "control_ratio", "trl_s_per_mtoken", "trl_s_per_mtoken_of_the_world",
            "serve_s_per_mtoken"]  # fmt: skip
    rows = [[f"{cell['nodes']} x {cell['ranks']}", *(cell.get(key, "") for key in keys)] for cell in cells]
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
    return head + table(columns, rows) + tail + "".join(f"- `{k}`: {why}\n" for k, why in found["replaced"].items())


def learning(found: dict) -> str:
    rows = []
    for step, after in found["after"].items():
        for arm, rewards in after["reward"].items():
            rows.append([arm, step, after["mean"][arm], ", ".join(f"{reward:.3f}" for reward in rewards)])
    return (
        f"## Learning\n\nMean reward over the last {found['averaged_over']} steps, by seed "
        "(`benchmarks/learning.py`).\n\n" + table(["arm", "after step", "mean", "seeds"], rows)
    )


def render() -> str:
    sections = [HEAD]
    written = (("exchange", exchange), ("overlap", overlap), ("balance", balance), ("learning", learning))
    for name, section in written:
        path = FOLDER / "results" / f"{name}.json"
        if path.exists():
            sections.append(section(json.loads(path.read_text())))
    return "\n".join(sections)


if __name__ == "__main__":
    (FOLDER / "RESULTS.md").write_text(render())
