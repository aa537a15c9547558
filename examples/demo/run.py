"""`make demo`: learn a small task with GRPO on two nodes of this machine, each with ranks and one vLLM engine.

Each node is a real `accelerate launch` of `train.py` with `accelerate_configs/2node_cpu.yaml`: two ranks and a tiny
model, or with `--mode real` one rank and SmolLM2-135M. Both nodes end when one fails, when the time is up, and when
this process is stopped.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from modes import DEMOS, REAL, Demo
from report import Report
from rich.console import Console

from trl_multinode.testing.launch_files import fresh_environment

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
NUM_NODES = 2
DOWNLOAD_MB = 0  # by the run itself, in every mode
INSTALL_MB = 950  # once, for the locked packages: size of their environment (3.8 GB) compressed like a wheel
REAL_INSTALL_MB = 100  # once, for requirements/real.txt; nearly all of it is the model
PROGRESS_EVERY_S = 10.0
POLL_S = 0.2
GRACE_S = 20.0  # enough for ranks to exchange the reason of a failure and to end their engines
TAIL_LINES = 25
UNLEARNED = 0.1  # largest reward change that still passes as unlearned, without weight sync
UNPACK_LIMIT_S = 600.0


class DemoError(RuntimeError):
    """Failure of a node or of the model's unpacking, or a timeout; the message holds the ends of the logs."""


class Launch:
    """The two `accelerate launch` processes. The exit of the context ends them and all processes that they started.

    Args:
        demo (`Demo`):
            Demo to start.
        folder (`Path`):
            `output_dir` of the run, which also holds `node<k>.log`.
        arguments (`list[str]`):
            Arguments of the script.
    """

    def __init__(self, demo: Demo, folder: Path, arguments: list[str]):
        self.demo = demo
        self.folder = folder
        self._processes: set[psutil.Process] = set()  # all descendants of the launchers seen so far
        self._launchers: list[subprocess.Popen] = []
        self._arguments = arguments

    def __enter__(self) -> "Launch":
        port = str(free_port())
        for node in range(NUM_NODES):
            self._launchers.append(self._start(node, port))
        return self

    def _start(self, node: int, port: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file"]
        command += [str(REPOSITORY / "accelerate_configs" / "2node_cpu.yaml"), "--machine_rank", str(node)]
        command += ["--num_processes", str(self.demo.num_ranks), "--main_process_port", port]
        command += [str(HERE / self.demo.script)]
        cpu = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.demo is REAL:
            cpu |= cores_of(node)
        with open(self.folder / f"node{node}.log", "wb") as log:
            return subprocess.Popen(
                command + self._arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env={**fresh_environment(), **cpu, "GLOO_SOCKET_IFNAME": "lo"}, start_new_session=True,
            )  # fmt: skip

    def wait(self, timeout_s: float) -> None:
        """Wait until both nodes have ended well, and print a line of progress every 10 s.

        Raises:
            `DemoError`: a node failed, or the time was up.
        """
        start = reported = time.monotonic()
        while None in (codes := [launcher.poll() for launcher in self._launchers]) and not any(codes):
            now = time.monotonic()
            if now - start > timeout_s:
                raise DemoError(f"The demo did not end within {timeout_s:.0f} s.\n{self._tails()}")
            if now - reported >= PROGRESS_EVERY_S:
                reported = now
                self._remember_processes()
                print(f"[demo] {now - start:4.0f} s: {self._progress()}", flush=True)
            time.sleep(POLL_S)
        if any(codes):
            self._wait_for_launchers()  # the logs are complete when every rank has logged why it ends
            raise DemoError(f"Node {[bool(code) for code in codes].index(True)} failed.\n{self._tails()}")

    def _progress(self) -> str:
        """Return rank 0's last step, or during the start the last line that this library wrote to node 0's log."""
        entries = [json.loads(line) for line in tail(self.folder / "history.jsonl", 1) if line.endswith("}")]
        if entries:
            reward = entries[0].get("reward", entries[0].get("eval_reward"))
            return f"step {entries[0]['step']}" + ("" if reward is None else f", reward {reward:.2f}")
        ours = [line for line in tail(self.folder / "node0.log", 200) if line.startswith("[trl_multinode]")]
        return ours[-1] if ours else "the ranks are importing their libraries"

    def _tails(self) -> str:
        """Return the reason on which the ranks agreed, if they did, and the ends of all logs."""
        logs = [self.folder / f"node{node}.log" for node in range(NUM_NODES)]
        causes = {line for log in logs for line in tail(log, 500) if line.startswith("[trl_multinode] the run failed")}
        logs += sorted((self.folder / "_multinode" / "logs").glob("node*/engine*.log"))
        ends = [f"--- end of {log}\n" + "\n".join(tail(log, TAIL_LINES)) for log in logs]
        return "\n".join([*causes, *ends])

    # ---- end --------------------------------------------------------------------------------------------------------

    def _remember_processes(self) -> None:
        """Remember all descendants of the launchers, because ranks and engines run in sessions of their own."""
        for launcher in self._launchers:
            with suppress(psutil.NoSuchProcess):
                self._processes.update(psutil.Process(launcher.pid).children(recursive=True))

    def _wait_for_launchers(self) -> bool:
        """Wait for the launchers; return whether all ended within the grace period."""
        deadline = time.monotonic() + GRACE_S
        while None in [launcher.poll() for launcher in self._launchers]:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def _end(self) -> None:
        """Send SIGTERM to the launchers, which pass it on; after the grace period, kill the remaining processes."""
        self._remember_processes()
        for launcher in self._launchers:
            if launcher.poll() is None:
                launcher.terminate()
        self._wait_for_launchers()
        _, left = psutil.wait_procs(self._processes, timeout=GRACE_S)
        for process in [*left, *self._launchers]:
            with suppress(psutil.NoSuchProcess):
                process.kill()  # does nothing to a launcher that has ended
        self._wait_for_launchers()

    def __exit__(self, *_: object) -> None:
        self._end()


def cores_of(node: int) -> dict[str, str]:
    """Give each node its share of the cores: engines that spin on the same cores would take turns in every layer."""
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[node::NUM_NODES] or cores
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, mine)), "OMP_NUM_THREADS": str(len(mine))}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
        return good, f"{'learned' if good else f'NOT LEARNED (a gain of {demo.learned} was expected)'}: {figures}"
    good = max(abs(gain), abs(held_out)) <= UNLEARNED
    return good, f"without weight sync {'nothing is learned' if good else 'the reward CHANGED'}: {figures}"


def show(demo: Demo, folder: Path, wall_s: float, synced: bool) -> bool:
    """Write the report, print table and verdict; return whether the run has the expected result."""
    report = Report(folder, wall_s)
    summary = report.write()
    Console(width=100).print(report.table())
    good, line = verdict(demo, summary, report, synced)
    print(f"[demo] {line}")
    print(f"[demo] {wall_s / 60:.1f} minutes; {folder / 'summary.json'}, {folder / 'reward.png'}")
    return good


def unpack_model(folder: Path) -> None:
    """Save the real model once, for all ranks; raise `DemoError` if that fails."""
    print("[demo] unpacking SmolLM2-135M", flush=True)
    command = [sys.executable, str(HERE / "real_model.py"), str(folder / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=UNPACK_LIMIT_S)
    if done.returncode != 0:
        raise DemoError(f"The model could not be unpacked.\n{done.stderr[-2000:]}")


def announce(demo: Demo) -> None:
    print(f"[demo] this run downloads {DOWNLOAD_MB} MB; it generates its own prompts", flush=True)
    print(f"[demo] (installing the locked packages downloads about {INSTALL_MB} MB, once)", flush=True)
    if demo is REAL:
        print(f"[demo] (installing those of this mode and the model downloads {REAL_INSTALL_MB} MB more)", flush=True)
    print(f"[demo] expected: about {demo.minutes} minutes on 2 cores", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo"))
    parser.add_argument("--steps", type=int, help="default: 80, in mode real 24")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=DEMOS, default="sync", help="overlap is overlap-only and balance-only")
    parser.add_argument("--no-sync", action="store_true", help="test only: the engines keep their first weights")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="default: 900, in mode real 7200")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    demo = DEMOS[options.mode]
    announce(demo)
    shutil.rmtree(options.output_dir, ignore_errors=True)
    options.output_dir.mkdir(parents=True)
    arguments = [f"--output_dir={options.output_dir}", f"--steps={options.steps or demo.steps}"]
    arguments += [f"--seed={options.seed}", f"--mode={options.mode}"] + ["--no-sync"] * options.no_sync
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raise, so that the context below ends the nodes
    start = time.monotonic()
    try:
        if demo is REAL:
            unpack_model(options.output_dir)
        with Launch(demo, options.output_dir, arguments) as launch:
            launch.wait(options.timeout or demo.timeout_s)
    except DemoError as error:
        print(f"[demo] {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0 if show(demo, options.output_dir, time.monotonic() - start, synced=not options.no_sync) else 1


if __name__ == "__main__":
    sys.exit(main())
