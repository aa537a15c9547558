"""Report of a demo run: `summary.json`, `reward.png` and a table per step, from the files in the run's folder.

`docs/start/demo.md` explains each key of the summary and its measurement. `python report.py FOLDER` repeats the
report; `python report.py FOLDER RECORD` also writes RECORD.json and RECORD.png, to be kept, and prints the table as
Markdown.
"""

import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

PHASES = ("sync", "generate", "reward", "train", "wait")
# column names, with " s" because "reward" is another column
SECONDS = {phase: f"{phase} s" for phase in PHASES}
COLUMNS = {
    "step": "d", "reward": ".3f", "length": ".1f",
    "called": ".2f", "calls": ".2f", **dict.fromkeys(SECONDS.values(), ".3f"), "log-prob difference": ".1e",
    "pool": ".0f", "engines": ".0f",
}  # fmt: skip
# Only of a run with tools: share of the completions that called one, and calls per completion
TOOLS = {"called": "hunt/called_a_tool", "calls": "tools/call_frequency"}
# Only of a run with agents: number of the membership, and engines that serve
POOL = {"pool": "pool/number", "engines": "pool/engines"}
REASONS = {
    "valid_tokens_per_device_hour": "the run had no devices: ranks and engines shared the cores of one CPU",
    "rollout_bytes_between_nodes": "both nodes are this machine: their traffic shares one loopback interface, which "
    "does not tell them apart. `make test-e2e` measures it in network namespaces",
}


# lines in the log of rank 0
EVENT = re.compile(r"the agent with number (\d+) .+")
STEP = re.compile(r"step (\d+)/")


@dataclass(frozen=True)
class Span:
    """One phase of one rank inside a training step."""

    step: int  # from 1
    phase: str
    seconds: float  # own time, without nested phases


@dataclass(frozen=True)
class RankRecord:
    """Phases and step times of one rank."""

    spans: list[Span]  # of training steps only, without evaluation and set-up
    step_s: dict[int, float]  # step -> seconds from its begin to its end
    # only of a run with agents: step -> completions of each agent, and of each prompt
    agents: dict[int, Counter[int]]
    prompts: dict[int, Counter[str]]


class Event(NamedTuple):
    """Change of the pool."""

    step: int  # optimizer steps before it
    agent: int  # its number in the run
    text: str


def events_in(log: str) -> tuple[list[Event], int]:
    """Return the changes of the pool in the log of rank 0, and its number of steps."""
    step, events = 0, []
    for line in log.splitlines():
        if found := STEP.match(line):
            step = int(found[1])
        elif found := EVENT.search(line):
            events.append(Event(step, int(found[1]), found[0]))
    return events, step


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_rank(folder: Path, rank: int) -> RankRecord:
    """Read a rank's files. A phase belongs to the training step that it started in, by the rank's own clock."""
    steps = read_lines(folder / "steps" / f"rank{rank}.jsonl")
    spans = [
        Span(step["step"], line["phase"], line["seconds"])
        for line in read_lines(folder / "_multinode" / "phases" / f"rank{rank}.jsonl")
        for step in steps
        # a mark of the timeline has no phase
        if "phase" in line
        and step["begin"] - 1e-3
        <= line["start"]
        <= step["end"]  # starts are rounded to a millisecond
    ]
    step_s, agents, prompts = {}, {}, {}
    for step in steps:
        number = step["step"]
        step_s[number] = step["end"] - step["begin"]
        if "agents" in step:
            agents[number] = Counter({int(agent): n for agent, n in step["agents"].items()})
            prompts[number] = Counter(step["prompts"])
    return RankRecord(spans, step_s, agents, prompts)


class Report:
    """The figures of one run.

    Args:
        folder (`Path`):
            `output_dir` of the run.
        wall_s (`float`, *optional*):
            Seconds from the start of the launchers to their end. Default: unknown, as in a repeated report.
    """

    def __init__(self, folder: Path, wall_s: float | None = None):
        self.folder = folder
        self.wall_s = wall_s
        self.run = json.loads((folder / "run.json").read_text())
        history = read_lines(folder / "history.jsonl")
        self.steps = [entry for entry in history if "reward" in entry]
        # before and after training
        self.evals = [entry["eval_reward"] for entry in history if "eval_reward" in entry]
        self._ranks = [read_rank(folder, rank) for rank in range(self.run["ranks"])]
        self.events: list[Event] = []  # of the pool
        if self._ranks[0].agents:
            events, steps = events_in((folder / "launch0" / "rank0.log").read_text())
            # not that the last agent leaves at the end
            self.events = [event for event in events if event.step < steps]

    # ---- figures ----------------------------------------------------------------------------------------------------

    def phase_s(self, phase: str, step: int | None = None) -> float:
        """Return the seconds of a phase in one step or in all steps, as a mean over ranks."""
        spans = [span for rank in self._ranks for span in rank.spans if span.phase == phase]
        return sum(span.seconds for span in spans if step in (None, span.step)) / len(self._ranks)

    @property
    def stepping_s(self) -> float:
        """Seconds inside training steps, mean over ranks."""
        return sum(sum(rank.step_s.values()) for rank in self._ranks) / len(self._ranks)

    def engines_busy(self) -> float | None:
        """Return the share of time in which an engine had a request, by the engines' clocks, as a mean over steps.

        It is `None` if the nodes have no engines.
        """
        shares = [entry["engine/busy"] for entry in self.steps if "engine/busy" in entry]
        return sum(shares) / len(shares) if shares else None

    def rewards(self) -> tuple[float, float]:
        """Return the mean reward of the first fifth of the steps, and of the last fifth."""
        values = [entry["reward"] for entry in self.steps]
        fifth = max(1, len(values) // 5)
        return sum(values[:fifth]) / fifth, sum(values[-fifth:]) / fifth

    def valid_tokens(self) -> float:
        """Return the number of completion tokens that were trained on, without padding."""
        return (
            sum(entry["completions/mean_length"] for entry in self.steps)
            * self.run["rows_per_step"]
        )

    def rows_of_agents(self, step: int | None = None) -> Counter[int]:
        """Return the trained completions of each agent in one step or in all steps, without evaluations."""
        found: Counter[int] = Counter()
        for rank in self._ranks:
            for number, agents in rank.agents.items():
                if step in (None, number):
                    found.update(agents)
        return found

    def unevenly_trained(self) -> list[str]:
        """Return the prompts that an epoch has trained with more or fewer completions than those of one group."""
        steps_of_epoch = self.run["train_rows"] // self.run["rows_per_step"]
        epochs: dict[int, Counter[str]] = {}
        for rank in self._ranks:
            for step, prompts in rank.prompts.items():
                epochs.setdefault((step - 1) // steps_of_epoch, Counter()).update(prompts)
        size = self.run["num_generations"]
        return [
            prompt for epoch in epochs.values() for prompt, count in epoch.items() if count != size
        ]

    # ---- output -----------------------------------------------------------------------------------------------------

    def summary(self) -> dict:
        """Return the figures in the documented schema; one that was not measured is `None`, with a reason."""
        first, last = self.rewards()
        phase_s = {phase: self.phase_s(phase) for phase in PHASES}
        tokens_per_s, devices = self.valid_tokens() / self.stepping_s, self.run["devices"]
        summary = {
            **{key: self.run[key] for key in ("nodes", "ranks", "engines", "steps")},
            "reward_first": first,
            "reward_last": last,
            "reward_held_out": self.evals[1] if len(self.evals) > 1 else None,
            "wall_s": self.wall_s,
            "phase_s": phase_s,
            "sync_share": phase_s["sync"] / self.stepping_s,
            "busy_share": {
                "ranks": (phase_s["train"] + phase_s["reward"]) / self.stepping_s,
                "engines": self.engines_busy(),
            },
            "valid_tokens_per_s": tokens_per_s,
            "valid_tokens_per_device_hour": tokens_per_s * 3600 / devices if devices else None,
            "weight_versions": self.run["weight_versions"],
            "rollout_bytes_between_nodes": None,
        }
        return {**rounded(summary), "reasons": self._reasons(summary)}

    def _reasons(self, summary: dict) -> dict[str, str]:
        reasons = {key: REASONS[key] for key in REASONS if summary[key] is None}
        if summary["reward_held_out"] is None:
            reasons["reward_held_out"] = "the run was ended before its last evaluation"
        if summary["busy_share"]["engines"] is None:
            reasons["busy_share.engines"] = (
                "the nodes have no engines, and agents report no such clocks"
            )
        if summary["wall_s"] is None:
            reasons["wall_s"] = "the report was made without the run that timed its launchers"
        return reasons

    def rows(self) -> list[dict]:
        """Return a row per step. Seconds are means over ranks, so that the phases of a row add up to the step."""
        return [
            {
                "step": entry["step"],
                "reward": entry["reward"],
                "length": entry["completions/mean_length"],  # tokens
                **{column: entry[name] for column, name in TOOLS.items() if name in entry},
                **{column: entry[name] for column, name in POOL.items() if name in entry},
                **self._shares(entry["step"]),
                **{column: self.phase_s(phase, entry["step"]) for phase, column in SECONDS.items()},
                # |engine - trainer| of a token's log-prob, mean over tokens and ranks
                "log-prob difference": entry["sampling/sampling_logp_difference/mean"],
            }
            for entry in self.steps
        ]

    def _shares(self, step: int) -> dict[str, int]:
        """Return the columns with the completions of each agent; a run without agents has none."""
        rows = self.rows_of_agents(step)
        return {f"agent {agent}": rows[agent] for agent in sorted(self.rows_of_agents())}

    def tables(self) -> list[RenderableType]:
        """Return the table per step. Each change of the pool is a line of its own, after which the table goes on."""
        rows, parts, done = self.rows(), [], 0
        title = "Reward, tokens and seconds of each step, mean over ranks"
        for event in [*self.events, Event(len(rows), 0, "")]:
            if event.step > done:
                parts.append(table_of(rows[done : event.step], title))
                done, title = event.step, None
            if event.text:
                parts.append(Text(event.text))
        return parts

    def keep(self, record: Path) -> None:
        """Write summary, rows and evaluations to `record`.json, the plot to `record`.png."""
        kept = {
            "summary": self.summary(),
            "eval_reward": rounded(self.evals),
            "rows": rounded(self.rows()),
        }
        record.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")
        self.plot(record.with_suffix(".png"))

    def plot(self, path: Path) -> None:
        """Plot the reward over the steps, held-out prompts before and after, and the best constant answer."""
        import matplotlib

        matplotlib.use("Agg")  # needs no display
        from matplotlib import pyplot

        figure = pyplot.figure(figsize=(8, 6.5 if self.events else 4.5), layout="constrained")
        axes = figure.subplots() if not self.events else self._plot_pool(figure)
        steps = [entry["step"] for entry in self.steps]
        axes.plot(steps, [entry["reward"] for entry in self.steps], label="training prompts")
        if TOOLS["called"] in self.steps[0]:
            called = [entry[TOOLS["called"]] for entry in self.steps]
            axes.plot(
                steps,
                called,
                color="C2",
                alpha=0.6,
                label="share of completions that called a tool",
            )
        axes.plot(
            [0, steps[-1]][: len(self.evals)], self.evals, "o", color="C1", label="held-out prompts"
        )
        axes.axhline(
            self.run["best_constant"], linestyle=":", color="gray", label="best constant answer"
        )
        axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.05), title=self._title())
        if self.events:
            axes.set_xlabel("")  # the axes below have it
        figure.legend(loc="outside lower center", ncols=2)  # below, where it covers no step
        figure.savefig(path, dpi=120)
        pyplot.close(figure)

    def _plot_pool(self, figure):
        """Draw the completions of each agent below, with a line per change of the pool; return the axes above."""
        above, below = figure.subplots(2, height_ratios=[3, 1], sharex=True)
        steps = [entry["step"] for entry in self.steps]
        agents = sorted(self.rows_of_agents())
        shares = [[self.rows_of_agents(step)[agent] for step in steps] for agent in agents]
        names = [f"agent {agent}" for agent in agents]
        below.stackplot(steps, shares, labels=names, colors=["C4", "C5"], step="mid")
        below.set(xlabel="step", ylabel="completions")
        for event in self.events:
            for axes in (above, below):
                axes.axvline(event.step + 0.5, color="black", linewidth=0.8, alpha=0.5)
        return above

    def _title(self) -> str:
        engines = f"{self.run['engines']} {self.run.get('engine', 'vLLM')} engines"
        return f"GRPO on {self.run['nodes']} nodes, {self.run['ranks']} ranks, {engines}"

    def write(self) -> dict:
        """Write `summary.json` and `reward.png`, and return the summary."""
        summary = self.summary()
        self.plot(self.folder / "reward.png")
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        return summary


def rounded(value):
    """Round to four decimals, which exceeds the precision of all these figures."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    # 1e-6 must not become 0
    return (round(value, 4) or value) if isinstance(value, float) else value


def cells(row: dict) -> list[str]:
    return [format(value, COLUMNS.get(column, "d")) for column, value in row.items()]


def table_of(rows: list[dict], title: str | None) -> Table:
    table = Table(title=title, header_style="bold")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*cells(row))
    return table


def markdown(rows: list[dict]) -> str:
    """Return the table per step as Markdown, for a document."""
    lines = [list(rows[0]), ["---:"] * len(rows[0]), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    report = Report(Path(sys.argv[1]))
    for part in report.tables():
        Console().print(part)
    print(json.dumps(report.write(), indent=2))
    if len(sys.argv) > 2:
        report.keep(Path(sys.argv[2]))
        print(markdown(report.rows()))


if __name__ == "__main__":
    main()
