"""N nodes on one computer, each started with a real `accelerate launch`, for tests and benchmarks."""

import atexit
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trl_multinode.wire.process_end import end_with_parent

from .faults import FORKED, HOOK
from .forking import ForkedProcess, fork_launcher, from_template
from .launch_files import ZERO3, NodesSpec, core_of_engines, node_environment
from .launched_nodes import LaunchedNodes
from .namespaces import INTERFACE, Namespaces, namespaces_available
from .waiting import POLL_S, wait_until

PROGRESS_EVERY_S = 10.0
TERMINATE_GRACE_S = 5.0
KILL_LIMIT_S = 10.0

Progress = Callable[[float], str]  # seconds -> line of progress


class Nodes(LaunchedNodes):
    """
    N nodes on this computer. Each is one `accelerate launch --machine_rank k`, as on N machines.

    ```python
    with Nodes(num_nodes=2, ranks_per_node=2, folder=tmp_path) as nodes:  # the exit ends and removes everything
        nodes.launch("train.py", "--max_steps", "3")  # returns at once; may be called again when the run has ended
        nodes.wait_for(rank=0, text="step 1", timeout_s=120)  # then inject a failure
        os.kill(nodes.rank_pid(3), signal.SIGKILL)
        assert all(nodes.wait(timeout_s=60))  # exit codes of the launchers
        assert "rank 3" in nodes.rank_log(0)
        assert nodes.pids(1) == []  # orphans included
    ```

    Each rank uses gloo and one thread, and has the `TMPDIR` of its node, by which `pids` finds its processes. vLLM's
    workers on a CPU use one core per node, unless the caller sets `VLLM_CPU_OMP_THREADS_BIND`. A script must select
    the CPU itself (`GRPOConfig(use_cpu=True)`, `PartialState(cpu=True)`); otherwise accelerate silently makes every
    rank "0 of 1", so the script should also assert the world size that it expects. `ACCELERATE_USE_CPU` is no
    alternative: it makes accelerate drop DeepSpeed.

    `pids` finds a process that a rank started with a custom environment only if this environment contains `TMPDIR`. A
    process that changes its title, as vLLM's do, also needs `SPT_NOENV=1`; otherwise the title overwrites its
    environment. With `namespaces=True`, `pids` finds both without these variables.

    Launchers end with the process that called `launch`, also if it is killed, and with the thread, if it was not the
    main one. Files and namespaces of a killed process stay.

    Args:
        num_nodes (`int`, *optional*, defaults to `2`):
            Number of nodes.
        ranks_per_node (`int` or `Sequence[int]`, *optional*, defaults to `2`):
            Number of training processes on each node, or those of each.
        folder (`Path`):
            Folder for configs and logs: `launch<i>/` with `accelerate.yaml`, `node<k>.log`, `rank<r>.log`. Two `Nodes`
            must not share it.
        namespaces (`bool`, *optional*, defaults to `False`):
            Give each node a network namespace, an address and a private `TMPDIR` and `/dev/shm`.
        env (`Mapping[str, str]`, *optional*):
            Variables for all launchers and ranks. They override the caller's variables and those that this class sets.
        deepspeed (`Mapping[str, Any]`, *optional*):
            DeepSpeed config. Default: ZeRO-3 that shards every parameter, however small.
        accelerate (`Mapping[str, Any]`, *optional*):
            Entries of the accelerate config that replace DeepSpeed: `DDP` or `FSDP2` of `launch_files`.
        forked (`bool`, *optional*, defaults to `False`):
            Fork launchers and ranks from one process that has imported the libraries, which saves 15 s of a core per
            rank. The launchers still run accelerate's and torchrun's code. `env` must not have other values of
            variables that libraries read when they are imported (`HF_HOME`, `OMP_NUM_THREADS`).

        more_hosts (`int`, *optional*, defaults to `0`):
            Namespaces without a launch, for processes that a test starts by `enter`.

    Raises:
        RuntimeError: `namespaces=True`, but they cannot be made here; the message holds the reason.
    """

    def __init__(
        self,
        num_nodes: int = 2,
        ranks_per_node: int | Sequence[int] = 2,
        *,
        folder: str | os.PathLike[str],
        namespaces: bool = False,
        env: Mapping[str, str] | None = None,
        deepspeed: Mapping[str, Any] | None = None,
        accelerate: Mapping[str, Any] | None = None,
        forked: bool = False,
        more_hosts: int = 0,
    ):
        if namespaces and (reason := namespaces_available()):
            raise RuntimeError(
                f"Nodes(namespaces=True) cannot work: {reason}. Use namespaces=False, or cure that."
            )
        each = [ranks_per_node] * num_nodes if isinstance(ranks_per_node, int) else ranks_per_node
        spec = NodesSpec(tuple(each), dict(env or {}), deepspeed or ZERO3, accelerate)
        # The name is short, because the paths of the ranks' unix sockets begin with it
        private = Path(tempfile.gettempdir(), f"tmn-{secrets.token_hex(3)}")
        super().__init__(spec, Path(folder).resolve(), private, None)
        self._forked = forked
        atexit.register(self.close)
        if namespaces:
            self._network = Namespaces(private.name, num_nodes + more_hosts)
        for node in range(num_nodes):
            (private / f"node{node}").mkdir(parents=True, mode=0o700)

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def logs(self) -> Path:
        """Folder of the last launch: its config and logs."""
        return self._log_folder

    def enter(self, host: int) -> list[str]:
        """Return the words before a command that is to run on a node or on one of `more_hosts`. Needs namespaces."""
        return self._links.enter(host, self._private)

    # ---- start and wait

    def launch(
        self,
        script: str | os.PathLike[str],
        *args: str,
        env: Mapping[str, str] | None = None,
        env_of: Callable[[int], Mapping[str, str]] = lambda node: {},
    ) -> None:
        """
        Start `script` on all nodes and return at once. The ranks have the caller's working directory.

        Args:
            script (`str` or `PathLike`):
                Path of a Python file.
            *args (`str`):
                Arguments of the script.
            env (`Mapping[str, str]`, *optional*):
                More variables, for this launch only.
            env_of (`Callable[[int], Mapping[str, str]]`, *optional*):
                Function that returns more variables for one node, given its number.

        Raises:
            FileNotFoundError: `script` is not a file.
            RuntimeError: processes of the previous launch still run.
        """
        script = Path(script).resolve()
        if not script.is_file():
            raise FileNotFoundError(
                f"{script} is not a file: launch() takes the path of a Python script"
            )
        for node in range(self.spec.num_nodes):
            if pids := self.pids(node):
                raise RuntimeError(
                    f"node {node} still runs processes {pids} of the last launch: wait for them"
                )
        self._num_launches += 1
        self._log_folder.mkdir(parents=True)
        config_file = self.spec.write(
            self._log_folder, self._network.address(0) if self._network else "127.0.0.1"
        )
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
        command += ["--config_file", str(config_file), "--machine_rank"]
        program = [
            "/bin/sh",
            str(self._log_folder / "per_rank.sh"),
            sys.executable,
            "-u",
            str(script),
            *args,
        ]
        self._launchers = []
        for node in range(self.spec.num_nodes):
            more = {**(env or {}), **env_of(node)}
            count = self.spec.num_nodes * self.spec.ranks[node]
            own = ["--num_processes", str(count), "--no_python"]
            self._launchers.append(self._start(node, [*command, str(node), *own, *program], more))

    def wait(
        self,
        timeout_s: float = 300.0,
        *,
        grace_s: float | None = None,
        progress: Progress | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[int | None]:
        """
        Wait until all launchers have ended, and print a line of progress every 10 s.

        Args:
            timeout_s (`float`, *optional*, defaults to `300.0`):
                Seconds to wait.
            grace_s (`float`, *optional*):
                Seconds to wait for the other launchers when one has failed. Default: no limit of their own.
            progress (`Progress`, *optional*):
                Function that returns the line of progress, given the seconds so far. Default: rank 0's last line.
            meanwhile (`Callable[[], None]`, *optional*):
                Function that is called several times a second; its errors end the wait.

        Returns:
            `list[int | None]`: the launchers' exit codes by node; minus the signal number for a launcher that was
                killed, and `None` for one that still runs after `grace_s`.

        Raises:
            TimeoutError: some did not end in time and still run; the message holds the tails of all logs.
            RuntimeError: nothing was launched.
        """
        if not self._launchers:
            raise RuntimeError("there is nothing to wait for: call launch() first")
        deadline = float("inf")

        def over() -> bool:
            nonlocal deadline
            meanwhile()
            if grace_s is not None and any(launcher.poll() for launcher in self._launchers):
                deadline = min(deadline, time.monotonic() + grace_s)
            return not self._running_nodes() or time.monotonic() > deadline

        self._until(over, timeout_s, "all launchers to end", progress)
        return [launcher.poll() for launcher in self._launchers]

    def wait_for(self, rank: int, text: str, timeout_s: float = 120.0) -> str:
        """
        Wait until `rank` has printed `text`.

        Returns:
            `str`: the first line of the rank's log that holds `text`.

        Raises:
            TimeoutError: the rank did not print it in time; the message holds the tails of all logs.
            RuntimeError: all launchers ended without it; the message holds the tails of all logs.
        """

        def found() -> str | None:
            # checked before the log is read, or a last line could be missed
            ended = not self._running_nodes()
            line = next((line for line in self.rank_log(rank).splitlines() if text in line), None)
            if line is None and ended:
                raise RuntimeError(
                    f"{self._where(rank)} ended without printing {text!r}.\n{self.tails()}"
                )
            return line

        return self._until(found, timeout_s, f"{self._where(rank)} to print {text!r}")

    # ---- end

    def close(self) -> None:
        """
        End the remaining processes (SIGTERM to the launchers, after 5 s SIGKILL to every process of `pids`) and remove
        namespaces and temporary folders. Logs stay. Further calls are harmless.

        Raises:
            RuntimeError: processes survived SIGKILL for 10 s.
        """
        try:
            for launcher in self._launchers:
                if launcher.poll() is None:
                    launcher.terminate()
            wait_until(lambda: not self._running_nodes(), TERMINATE_GRACE_S)
            if not wait_until(lambda: not self._kill_all(), KILL_LIMIT_S):
                raise RuntimeError(
                    f"processes {self._all_pids()} survive SIGKILL: /proc/<pid>/stack shows where"
                )
            wait_until(lambda: not self._running_nodes(), KILL_LIMIT_S)  # reap the killed launchers
        finally:
            if self._network is not None:
                self._network.close()
            shutil.rmtree(self._private, ignore_errors=True)
            atexit.unregister(self.close)

    # ---- inside

    def _start(
        self, node: int, command: list[str], env: Mapping[str, str]
    ) -> subprocess.Popen | ForkedProcess:
        environment = self._environment(node) | {**self.spec.env, **env}
        if environment.get(HOOK, "").startswith(FORKED):
            environment[HOOK] = from_template(environment[HOOK], environment)
        network = self._network
        with open(self._log_folder / f"node{node}.log", "ab") as log:
            if self._forked:
                place = (
                    (network.namespace(node), network.mounts(node, self._private))
                    if network
                    else None
                )
                # without `python -m accelerate_cli`
                return fork_launcher(command[3:], environment, log, place)
            if network is not None:
                command = [*network.enter(node, self._private), *command]
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the caller only, whose `close` then ends the nodes
                # a killed caller closes nothing
                preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
            )

    def _environment(self, node: int) -> dict[str, str]:
        # By default gloo resolves the host name, to an address that other namespaces cannot reach
        interface = INTERFACE if self._network else "lo"
        tmpdir = self._private if self._network else self.tmpdir(node)
        return node_environment(self._marker(node), interface, tmpdir) | core_of_engines(node)

    def _until(
        self,
        condition: Callable[[], Any],
        timeout_s: float,
        what: str,
        progress: Progress | None = None,
    ) -> Any:
        """Poll until `condition` returns a true value, and return it; print progress, and raise at the deadline."""
        start = reported = time.monotonic()
        while not (result := condition()):
            now = time.monotonic()
            if now - start > timeout_s:
                raise TimeoutError(
                    f"Waited {timeout_s:.0f} s for {what}; {self._still_running()}\n"
                    f"{self.what_ranks_do()}"
                )
            if now - reported > PROGRESS_EVERY_S:
                last = (self.rank_log(0).rstrip().splitlines() or ["nothing printed yet"])[-1]
                usual = f"[nodes] {now - start:.0f} s, waiting for {what}; rank 0: {last[-160:]}"
                print(usual if progress is None else progress(now - start), flush=True)
                reported = now
            time.sleep(POLL_S)
        return result

    def _still_running(self) -> str:
        running = self._running_nodes()
        return (
            f"launchers still running on nodes {running}" if running else "all launchers have ended"
        )
