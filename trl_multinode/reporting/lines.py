"""The readable log: one line per log of the trainer, and a table of the nodes, both made from the logged metrics."""

import io
import re
from collections.abc import Callable, Mapping
from functools import partial

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

OFF_THE_MEAN = 1.3  # a node is marked where it has more than 1.3 times the mean over nodes
SMALLEST_SHARE = 0.02  # of a step; shorter times are not marked, because nobody gains by a change
MORE_TOKENS = 1.15  # tokens of a node over the mean, from which on they explain its seconds
MOST_ROWS = 16  # nodes of a table; with more, those that are marked come first
WIDTH = 140
PHASES = ("generate", "sync", "train", "reward", "wait")  # in the order of the line
COLUMNS = {
    **{f"{name}_s": f"{name} s" for name in PHASES},
    "tokens": "tokens",
    "memory_gib": "GiB",
    "engine_busy": "engines busy",
    "engine_filled": "filled",
    "kv_use": "KV cache",
}
SHARES = ("engine_busy", "engine_filled", "kv_use")
# Columns that are marked, with the reason unless the tokens of the node explain it
REASONS = {
    "generate_s": "slower engines at as many tokens",
    "sync_s": "a slower copy into its engines",
    "train_s": "slower GPUs or host at as many tokens",
    "reward_s": "slower reward functions",
    "wait_s": "other nodes are slower",
    "memory_gib": "more memory at as many tokens",
    "kv_use": "more rows or longer completions in its engines",
}
FIRST = {"reward": 0, "loss": 1, "runtime": 2}
UNSHOWN = ("epoch", "total_flos")
LIMIT_OF_OTHERS = 8  # entries of the line for a log that is not of a training step

Nodes = dict[int, dict[str, float]]  # node -> its values by the names of `COLUMNS`


def short(value: float) -> str:
    """Return a number with three significant digits: 0.0123, 4.57, 123, 12.3k, 4.57M."""
    value = float(f"{value:.3g}")  # first, or 999.7 would be below a thousand and become 1e+03
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def clock(seconds: float) -> str:
    """Return a duration as `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def in_seconds(seconds: float) -> str:
    """Return seconds with at most two decimals: 0.03, 4.57, 45.7, 457."""
    if seconds < 10:
        return f"{seconds:.2f}"
    return f"{seconds:.1f}" if seconds < 100 else f"{seconds:.0f}"


def percent(share: float) -> str:
    """Return a share as a percentage."""
    return f"{100 * share:.0f} %"


def numbers_in(logs: Mapping[str, object]) -> dict[str, float]:
    """Return the metrics that are numbers."""
    return {name: float(value) for name, value in logs.items() if isinstance(value, (int, float))}


def step_line(logs: Mapping[str, object], step: int, max_steps: int) -> str:
    """Return the line of a training step: only what was logged is in it.

    Args:
        logs (`Mapping[str, object]`):
            Metrics as `Trainer.log` received them.
        step (`int`), max_steps (`int`):
            Last optimizer step, and the number of all.
    """
    found = numbers_in(logs)
    seconds = [_if(found, f"perf/{name}_s", in_seconds, f"{name} {{}}") for name in PHASES]
    parts = [
        f"step {step}/{max_steps}" + _if(found, "perf/eta_s", clock, ", eta {}"),
        f"{in_seconds(found['perf/step_s'])} s: {_listed(*seconds)}",
        _listed(
            _if(found, "perf/tokens_per_s", short, "{} tokens/s"),
            _if(found, "perf/tokens_per_s_per_device", short, "{} per device"),
        ),
        _if(found, "perf/mfu", percent, "MFU {}"),
        _memory(found),
        _engines(found),
        _listed(
            _if(found, "reward", short, "reward {}"),
            _if(found, "kl", short, "KL {}"),
            "" if "reward" in found else _if(found, "loss", short, "loss {}"),
            _if(found, "grad_norm", short, "gradient norm {}"),
        ),
        _listed(
            _if(found, "completions/mean_length", short, "length {}"),
            _if(found, "completions/clipped_ratio", percent, "clipped {}"),
        ),
    ]
    return " | ".join(filter(None, parts))


def _if(found: Mapping[str, float], name: str, form: Callable[[float], str], text: str) -> str:
    """Return a text with a value in the place of `{}`; an empty one if the value was not logged."""
    return text.format(form(found[name])) if name in found else ""


def _listed(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _memory(found: Mapping[str, float]) -> str:
    gpu = _if(found, "memory/gpu_gib/max", short, "GPU {} GiB")
    if gpu:
        return gpu + _if(found, "memory/gpu_share/max", percent, " ({})")
    return _if(found, "memory/host_gib/max", short, "memory {} GiB")


def _engines(found: Mapping[str, float]) -> str:
    text = _listed(
        _if(found, "engine/busy", percent, "busy {}"),
        _if(found, "engine/filled", percent, "filled {}"),
        _if(found, "engine/kv_use", percent, "KV {}"),
        _if(found, "pool/engines", short, "{} in the pool"),
    )
    return text and f"engines {text}"


def other_line(logs: Mapping[str, object], step: int) -> str:
    """Return the line of a log that is not of a training step: an evaluation, the end of a run, a script's own log."""
    kinds = {"eval_": "evaluation at ", "train_": "end at ", "": ""}
    prefix = next(word for word in kinds if any(name.startswith(word) for name in logs))
    entries = {
        name.removeprefix(prefix): value for name, value in logs.items() if name not in UNSHOWN
    }
    parts = []
    for name in sorted(entries, key=lambda name: (FIRST.get(name, len(FIRST)), name.count("/"))):
        value = entries[name]
        parts.append(f"{name} {short(value) if isinstance(value, (int, float)) else value}")
    left = len(parts) - LIMIT_OF_OTHERS
    more = f", and {left} more" if left > 0 else ""
    return f"{kinds[prefix]}step {step}: {', '.join(parts[:LIMIT_OF_OTHERS])}{more}"


def nodes_in(logs: Mapping[str, object]) -> Nodes:
    """Return the values per node from the metrics `node<k>/<name>`."""
    nodes: Nodes = {}
    for name, value in numbers_in(logs).items():
        if match := re.fullmatch(r"node(\d+)/(\w+)", name):
            nodes.setdefault(int(match[1]), {})[match[2]] = value
    return nodes


def ratios(nodes: Nodes) -> Nodes:
    """Return every value over the mean of its column; columns with a mean of zero are left out."""
    found: Nodes = {node: {} for node in nodes}
    for column in COLUMNS:
        values = {node: row[column] for node, row in nodes.items() if column in row}
        mean = sum(values.values()) / len(values) if values else 0.0
        for node, value in values.items():
            if mean > 0.0:
                found[node][column] = value / mean
    return found


def marked(nodes: Nodes, step_s: float) -> dict[int, dict[str, str]]:
    """Return the columns in which a node is more than `OFF_THE_MEAN` times the mean, and why, as far as its numbers
    show it. Short times do not count."""
    over = ratios(nodes)
    found: dict[int, dict[str, str]] = {}
    for node, row in nodes.items():
        off = [name for name in REASONS if _is_off(row, over[node], name, step_s)]
        found[node] = {name: _reason(name, over[node]) for name in off}
    return found


def _is_off(row: dict[str, float], over: dict[str, float], column: str, step_s: float) -> bool:
    times_the_mean = over.get(column, 0.0)
    if times_the_mean <= OFF_THE_MEAN:
        return False
    above_the_mean = row[column] * (1 - 1 / times_the_mean)
    return not column.endswith("_s") or above_the_mean > SMALLEST_SHARE * step_s


def _reason(column: str, over: dict[str, float]) -> str:
    tokens = over.get("tokens", 0.0)
    if tokens >= MORE_TOKENS and column not in ("sync_s", "wait_s"):
        return f"{tokens:.1f} x the tokens"
    return REASONS[column]


def node_table(logs: Mapping[str, object], step: int) -> Group | None:
    """Return the table of the nodes with its reasons, or `None` if the metrics are those of a single node.

    Args:
        logs (`Mapping[str, object]`):
            Metrics as `Trainer.log` received them.
        step (`int`):
            Optimizer step.
    """
    nodes = nodes_in(logs)
    if len(nodes) < 2:
        return None
    off = marked(nodes, numbers_in(logs).get("perf/step_s", 0.0))
    over = ratios(nodes)
    columns = [name for name in COLUMNS if any(name in row for row in nodes.values())]
    title = f"nodes at step {step}, per step; marked: more than {OFF_THE_MEAN} x the mean"
    # without a box, because a terminal may know ASCII only
    table = Table(title=title, box=None, title_justify="left", padding=(0, 0, 0, 2))
    for heading in ("node", *(COLUMNS[name] for name in columns)):
        table.add_column(heading, justify="right", no_wrap=True)
    marked_first = sorted(nodes, key=lambda node: not off[node])
    lines: list[Table | Text | str] = [table]
    for node in sorted(marked_first[:MOST_ROWS]):
        cell = partial(_cell, nodes[node], over[node], off[node])
        table.add_row(str(node), *map(cell, columns))
        if off[node]:
            lines.append(_note(node, off[node]))
    if len(nodes) > MOST_ROWS:
        num_marked = sum(map(bool, off.values()))
        lines.append(f"{len(nodes) - MOST_ROWS} more nodes, {num_marked} of {len(nodes)} marked")
    return Group(*lines)


def _cell(row: dict[str, float], over: dict[str, float], why: dict[str, str], name: str) -> Text:
    if name not in row:
        return Text("")
    if name in SHARES:
        text = percent(row[name])
    elif name.endswith("_s"):
        text = in_seconds(row[name])
    else:
        text = short(row[name])
    if name not in why:
        return Text(text)
    return Text(f"{text} ({over[name]:.1f} x)", style="bold red")


def _note(node: int, why: dict[str, str]) -> Text:
    parts = [f"{COLUMNS[name].removesuffix(' s')}: {text}" for name, text in why.items()]
    return Text(f"node {node}: {'; '.join(parts)}")


def rendered(table: Group, color: bool = False) -> str:
    """Return a table as text, with a terminal's colors on request."""
    text = io.StringIO()
    console = Console(
        file=text, width=WIDTH, force_terminal=color, color_system="standard" if color else None
    )
    console.print(table, soft_wrap=True)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())
