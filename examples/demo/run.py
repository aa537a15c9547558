"""`make demo`: learn a small task with GRPO on two nodes of this machine, each with ranks and one vLLM engine.

Each node is a real `accelerate launch` of `train.py` with the settings of `accelerate_configs/2node_cpu.yaml`: two
ranks and a tiny model, or with `--mode real` one rank and SmolLM2-135M. `--mode fake` takes half a minute: the test
kit's fake engine takes vLLM's place, and launchers and ranks are forks of one process. With `--mode pool` the engines
are those of two agents, of which one joins late and one leaves. Nodes and agents end when one fails, when the time is
up, and when this process is stopped.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import yaml
from modes import DEMOS, REAL, Demo
from pool import Pool, PoolError
from report import Report
from rich.console import Console

from multinode_kit.nodes import Nodes
from trl_multinode.wire.secret import SECRET

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
NUM_NODES = 2
DOWNLOAD_MB = 0  # by the run itself, in every mode
INSTALL_MB = (
    950  # once, for the locked packages: size of their environment (3.8 GB) compressed like a wheel
)
REAL_INSTALL_MB = 100  # once, for requirements/real.txt; nearly all of it is the model
GRACE_S = 20.0  # enough for ranks to exchange the reason of a failure and to end their engines
TAIL_LINES = 25
UNLEARNED = 0.1  # largest reward change that still passes as unlearned, without weight sync
MODEL_LIMIT_S = 600.0


class DemoError(RuntimeError):
    """Failure of a node or of the model's script, or a timeout; the message holds the ends of the logs."""


def launch(demo: Demo, folder: Path, steps: int, arguments: list[str], timeout_s: float) -> None:
    """Run the demo's script on both nodes, and print a line of progress every 10 s.

    Raises:
        `DemoError`: a node or an agent failed, or the time was up.
    """
    environment = dict(demo.environment)
    if demo.has_pool:
        environment[SECRET] = secrets.token_hex(16)
    with ExitStack() as running:
        nodes = running.enter_context(nodes_of(demo, folder, environment))
        nodes.launch(
            HERE / demo.script, *arguments, env_of=cores_of if demo.own_cores else lambda node: {}
        )
        try:
            pool = None
            if demo.has_pool:
                pool = running.enter_context(Pool(nodes, folder, steps, environment))
            codes = nodes.wait(
                timeout_s,
                grace_s=GRACE_S,
                progress=lambda seconds: progress(nodes, folder, seconds),
                meanwhile=pool.follow if pool else lambda: None,
            )
            if pool is not None and not any(codes):
                pool.finish()
        except TimeoutError as error:
            raise DemoError(
                f"The demo did not end in time. {error}\n{engine_tails(folder)}"
            ) from error
        except PoolError as error:
            raise DemoError(f"{error}\n{engine_tails(folder)}") from error
        if any(codes):
            failed = [bool(code) for code in codes].index(True)
            raise DemoError(
                f"Node {failed} failed.\n{causes(nodes, demo)}{nodes.tails()}\n{engine_tails(folder)}"
            )


def nodes_of(demo: Demo, folder: Path, environment: dict[str, str]) -> Nodes:
    return Nodes(
        NUM_NODES,
        demo.num_ranks // NUM_NODES,
        folder=folder,
        env={"TOKENIZERS_PARALLELISM": "false"} | environment,
        accelerate=settings_of(REPOSITORY / "accelerate_configs" / "2node_cpu.yaml"),
        forked=demo.forked,
    )


def settings_of(config: Path) -> dict:
    """Return an accelerate config without its addresses and numbers of processes, which the launch chooses."""
    own = ("num_machines", "num_processes", "main_process_ip", "main_process_port")
    return {
        name: value for name, value in yaml.safe_load(config.read_text()).items() if name not in own
    }


def progress(nodes: Nodes, folder: Path, seconds: float) -> str:
    """Return rank 0's last step, or during the start the last line that this library printed there."""
    entries = [json.loads(line) for line in tail(folder / "history.jsonl", 1) if line.endswith("}")]
    if entries:
        reward = entries[0].get("reward", entries[0].get("eval_reward"))
        state = f"step {entries[0]['step']}" + ("" if reward is None else f", reward {reward:.2f}")
    else:
        ours = [
            line for line in nodes.rank_log(0).splitlines() if line.startswith("[trl_multinode]")
        ]
        state = ours[-1] if ours else "the ranks are importing their libraries"
    return f"[demo] {seconds:4.0f} s: {state}"


def causes(nodes: Nodes, demo: Demo) -> str:
    """Return the reason on which the ranks agreed, if they did."""
    lines = [line for rank in range(demo.num_ranks) for line in nodes.rank_log(rank).splitlines()]
    return "".join(
        sorted({f"{line}\n" for line in lines if line.startswith("[trl_multinode] the run failed")})
    )


def engine_tails(folder: Path) -> str:
    """Return the ends of the logs of engines and agents."""
    logs = sorted((folder / "_multinode" / "logs").glob("node*/engine*.log"))
    logs += sorted(folder.glob("agent*/*.log"))
    return "\n".join(f"--- end of {log}\n" + "\n".join(tail(log, TAIL_LINES)) for log in logs)


def cores_of(node: int) -> dict[str, str]:
    """Give each node its share of the cores: engines that spin on the same cores would take turns in every layer."""
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[node::NUM_NODES] or cores
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, mine)),
        "OMP_NUM_THREADS": str(len(mine)),
    }


def tail(path: Path, lines: int) -> list[str]:
    """Return the last lines of a file; none if it does not exist yet."""
    return path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []


def verdict(demo: Demo, summary: dict, report: Report, synced: bool) -> tuple[bool, str]:
    """Return whether the run has the expected result, and a line with its figures."""
    gain = summary["reward_last"] - summary["reward_first"]
    held_out = summary["reward_held_out"] - report.evals[0]
    figures = (
        f"reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f} (first and last fifth of the steps), "
        f"held-out prompts {report.evals[0]:.3f} -> {summary['reward_held_out']:.3f}, "
        f"best constant answer {report.run['best_constant']:.3f}"
    )
    if synced:
        good = min(gain, held_out) >= demo.learned and report.run["best_constant"] < demo.constant
        return (
            good,
            f"{'learned' if good else f'NOT LEARNED (a gain of {demo.learned} was expected)'}: {figures}",
        )
    good = max(abs(gain), abs(held_out)) <= UNLEARNED
    return (
        good,
        f"without weight sync {'nothing is learned' if good else 'the reward CHANGED'}: {figures}",
    )


def pool_verdict(report: Report) -> tuple[bool, str]:
    """Return whether two agents generated all rows, each prompt was trained once an epoch, and a line about it."""
    rows, uneven = report.rows_of_agents(), report.unevenly_trained()
    shares = ", ".join(f"{count} by agent {agent}" for agent, count in sorted(rows.items()))
    line = f"{sum(rows.values())} completions: {shares}; "
    if uneven:
        return False, f"{line}NOT TRAINED ONCE in an epoch: {uneven[:5]}"
    return len(rows) == 2, line + "every prompt was trained once in each epoch"


def show(demo: Demo, folder: Path, wall_s: float, synced: bool) -> bool:
    """Write the report, print table and verdict; return whether the run has the expected result."""
    report = Report(folder, wall_s)
    summary = report.write()
    console = Console(width=112)
    for part in report.tables():
        console.print(part)
    good, line = verdict(demo, summary, report, synced)
    print(f"[demo] {line}")
    if demo.has_pool:
        complete, line = pool_verdict(report)
        good = good and complete
        print(f"[demo] {line}")
    print(f"[demo] {wall_s / 60:.1f} minutes; {folder / 'summary.json'}, {folder / 'reward.png'}")
    return good


def save_model(demo: Demo, script: str, folder: Path) -> None:
    """Save the mode's model once, for all ranks; raise `DemoError` if that fails."""
    print(f"[demo] making the model ({script})", flush=True)
    command = [sys.executable, str(HERE / script), str(folder / "model"), *demo.model_arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MODEL_LIMIT_S)
    if done.returncode != 0:
        raise DemoError(f"{script} could not make the model.\n{done.stderr[-2000:]}")


def announce(demo: Demo) -> None:
    print(f"[demo] this run downloads {DOWNLOAD_MB} MB; it generates its own prompts", flush=True)
    print(
        f"[demo] (installing the locked packages downloads about {INSTALL_MB} MB, once)", flush=True
    )
    if demo is REAL:
        print(
            f"[demo] (installing those of this mode and the model downloads {REAL_INSTALL_MB} MB more)",
            flush=True,
        )
    print(f"[demo] expected: about {demo.minutes:g} minutes on 2 cores", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo"))
    parser.add_argument(
        "--steps",
        type=int,
        help="default: 80, in mode in-flight 120, agent 60, harness 40, real 24, fake and pool-fake 30",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--mode", choices=DEMOS, default="sync", help="ahead is ahead-only and balance-only"
    )
    parser.add_argument(
        "--no-sync", action="store_true", help="test only: the engines keep their first weights"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="default: 900, in-flight, agent, harness and pool 1800, real 7200, fake and pool-fake 300",
    )
    options = parser.parse_args()
    if options.no_sync and DEMOS[options.mode].has_pool:
        parser.error("--no-sync is about engines of the nodes, which this mode has not")
    return options


def main() -> int:
    options = parse_arguments()
    demo = DEMOS[options.mode]
    announce(demo)
    shutil.rmtree(options.output_dir, ignore_errors=True)
    options.output_dir.mkdir(parents=True)
    steps = options.steps or demo.steps
    arguments = [f"--output_dir={options.output_dir}", f"--steps={steps}"]
    arguments += [f"--seed={options.seed}", f"--mode={options.mode}"] + [
        "--no-sync"
    ] * options.no_sync
    # raise, so that the context below ends the nodes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start = time.monotonic()
    try:
        if demo.model:
            save_model(demo, demo.model, options.output_dir)
        launch(demo, options.output_dir, steps, arguments, options.timeout or demo.timeout_s)
    except DemoError as error:
        print(f"[demo] {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return (
        0
        if show(demo, options.output_dir, time.monotonic() - start, synced=not options.no_sync)
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
