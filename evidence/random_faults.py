"""Random faults: a run per fault, in which one process gets one signal at a random moment. `make faults-random`.

Two nodes of two ranks train on the fake engine, with seeds of their own for every row, a checkpoint every second step
and `engine_restarts=2`. A run

- goes on: it ends well by itself, with rows, losses and gradient norms bitwise those of the run without a fault;
- ends: all launchers fail, the last line of every surviving rank is the same and names the process, and if a
  checkpoint had been saved a whole one is there. It is then launched again, and must end with the losses of the run
  without a fault. That does not count as "goes on";
- is bad: anything else, a process or a file that is left, or a run that does neither within the limit.

The draw is stratified: 70 % of the signals go to engines, 20 % to ranks, 10 % to launchers, on either node, each of
the four signals equally often within a kind. A rank's memory holds shards that no other process has, and a launcher
that ends takes its ranks along; so these runs can only end, and only the share of engines can go on. The promise is
that 25 of 40 do. The exit code is 0 if this share went on and no run was bad.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from fault_table import recorded, write
from random_runs import NODES, RANKS, STEPS, Fault, Outcome, run_with, run_without_fault

KINDS = {"engine": 0.7, "rank": 0.2, "launcher": 0.1}
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP", "SIGSEGV")
PROMISED = 25 / 40


def draw(runs: int, seed: int) -> list[Fault]:
    """Return `runs` faults in random order."""
    chance = random.Random(seed)
    counts = {kind: round(share * runs) for kind, share in KINDS.items()}
    counts["engine"] = runs - counts["rank"] - counts["launcher"]
    faults = []
    for kind, count in counts.items():
        signals = [SIGNALS[i % len(SIGNALS)] for i in range(count)]
        for name in signals:
            step, delay = chance.randint(1, STEPS - 2), chance.uniform(0.0, 1.0)
            faults.append(
                Fault(
                    kind,
                    name,
                    chance.randrange(NODES),
                    chance.randrange(RANKS),
                    step,
                    round(delay, 2),
                )
            )
    chance.shuffle(faults)
    return faults


def lines_of(faults: list[Fault], outcomes: list[Outcome], seed: int) -> list[str]:
    """The section of docs/evidence/faults.md."""
    went_on = sum(outcome.result == "goes on" for outcome in outcomes)
    ended = [outcome for outcome in outcomes if outcome.result == "ends"]
    again = sum(bool(outcome.continued) for outcome in ended)
    bad = sum(outcome.result == "bad" for outcome in outcomes)
    summary = (
        f"{went_on} of {len(outcomes)} runs go on with the rows and losses of the run without a fault; {len(ended)} "
        f"end as promised, of which {again} have these losses after a second launch; {bad} do neither."
    )
    pairs = enumerate(zip(faults, outcomes, strict=False), start=1)
    rows = [f"| {number} | {fault.shown} | {outcome.shown} |" for number, (fault, outcome) in pairs]
    head = [
        "| run | process | signal | moment | result | seconds until the end | goes on after a second launch |"
    ]
    return [
        "## Random faults\n",
        f"`make faults-random N={len(faults)} SEED={seed}`, {time.strftime('%Y-%m-%d', time.gmtime())}. {summary}\n",
        *head,
        "| --- | --- | --- | --- | --- | --- | --- |",
        *rows,
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--record", action="store_true", help="write the table into docs/evidence/faults.md"
    )
    arguments = parser.parse_args()
    faults, outcomes = draw(arguments.runs, arguments.seed), []
    with tempfile.TemporaryDirectory() as name:
        whole = run_without_fault(Path(name, "whole"))
        for number, fault in enumerate(faults):
            outcomes.append(run_with(fault, Path(name, f"run{number}"), whole))
            print(
                f"{number + 1} of {len(faults)}: {fault.signal} to {fault.process}: {outcomes[-1]}",
                flush=True,
            )
    lines = lines_of(faults, outcomes, arguments.seed)
    print("\n".join(lines))
    if arguments.record:
        write(recorded() | {"random": {"lines": lines}})
    results_ = [outcome.result for outcome in outcomes]
    return int("bad" in results_ or results_.count("goes on") < PROMISED * len(results_))


if __name__ == "__main__":
    sys.exit(main())
