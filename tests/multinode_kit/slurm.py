"""A real SLURM on one computer, for tests: slurmctld, one slurmd per network namespace, munge and fake GPUs."""

import atexit
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .launch_files import node_environment
from .namespaces import INTERFACE, Namespaces, namespaces_available
from .slurm_files import write_files
from .waiting import wait_until

DAEMONS = ("slurmctld", "slurmd", "munged")
PACKAGES = "slurmctld slurmd slurm-client munge"  # of Debian 12
START_LIMIT_S = 30.0
COMMAND_LIMIT_S = 30.0
KILL_LIMIT_S = 10.0
TAIL_LINES = 15
SOCKET_NAME = "/spool-n0/n0_1.4294967291"  # of a batch script's step, below the private folder
LONGEST_SOCKET = (
    107  # characters; the kernel's limit. slurmd shortens a longer name, and no job starts
)
GONE = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}

# A node has a host name, /etc/hosts, TMPDIR and /dev/shm of its own. `ip netns exec` would mount another /sys, without
# the cgroups that slurmd looks for.
ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind "$3" "$4" && mount --bind "$5" /dev/shm && '
ENTER += 'shift 5 && exec "$@"'


class SlurmCluster:
    """
    A SLURM cluster on this computer. Its nodes `n0`, `n1` ... are network namespaces; it starts in about 6 s.

    ```python
    with SlurmCluster(2, folder=tmp_path) as cluster:  # the exit ends and removes everything
        job = cluster.submit("job.sbatch", "--time", "10")
        cluster.wait_for(job, "RUNNING", timeout_s=20)
        cluster.run("scancel", job)
        assert cluster.wait_for(job, "CANCELLED", timeout_s=40)["ExitCode"] == "0:15"
        assert not cluster.job_processes()
    ```

    A job of the partition `urgent` pre-empts those of `main`, the default one, and of `at_once`: their steps get
    SIGTERM, and SLURM requeues those of `main` after 120 s, those of `at_once` immediately. Jobs run as root, start in
    `folder`, and have the environment of this process with the variables of `launch_files.node_environment`.

    Args:
        num_nodes (`int`, *optional*, defaults to `2`):
            Number of nodes.
        folder (`Path`):
            Working directory of the jobs. The daemons' logs are in its folder `slurm/` and stay.
        gpus_per_node (`int`, *optional*, defaults to `8`):
            Number of fake GPUs of each node.
        env (`Mapping[str, str]`, *optional*):
            Variables for all jobs.

    Raises:
        RuntimeError: the cluster cannot be made here, or a daemon did not start; the message holds the reason.
    """

    def __init__(
        self,
        num_nodes: int = 2,
        *,
        folder: str | os.PathLike[str],
        gpus_per_node: int = 8,
        env: Mapping[str, str] | None = None,
    ):
        if reason := slurm_available():
            raise RuntimeError(f"SlurmCluster cannot work: {reason}")
        self.num_nodes = num_nodes
        self.folder = Path(folder).resolve()
        self._private = private_folder()
        self._logs = self.folder / "slurm"
        self._tmpdir = self._private / "tmp"
        self._processes: list[subprocess.Popen] = []
        self._network: Namespaces | None = None
        self._env = {**(env or {})}
        self._daemons: set[int] = set()  # and their children
        atexit.register(self.close)
        try:
            self._start(gpus_per_node)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "SlurmCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- jobs

    def run(self, *command: str) -> str:
        """Run a command on node 0, such as `sinfo`, and return its output.

        Raises:
            RuntimeError: the command failed; the message holds its output.
        """
        done = subprocess.run(
            [*self._on(0), *command],
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
        )
        if done.returncode:
            raise RuntimeError(
                f"`{' '.join(command)}` failed with {done.returncode}: {done.stderr}{done.stdout}"
            )
        return done.stdout

    def submit(self, *arguments: str) -> str:
        """Submit a job with the arguments of `sbatch`, and return its number."""
        return self.run("sbatch", "--parsable", *arguments).strip()

    def job(self, job: str) -> dict[str, str]:
        """Return the fields of a job: `JobState`, `Restarts`, `PreemptTime`, `ExitCode` and others."""
        return dict(
            re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", job, "--oneliner"))
        )

    def wait_for(
        self,
        job: str,
        state: str,
        timeout_s: float,
        and_also: Callable[[dict[str, str]], bool] = lambda _: True,
    ) -> dict[str, str]:
        """
        Wait until a job is in a state, and return its fields.

        Args:
            job (`str`):
                Number of the job.
            state (`str`):
                Value of `JobState`.
            timeout_s (`float`):
                Seconds to wait.
            and_also (`Callable`, *optional*):
                Function of the fields that must hold, too.

        Raises:
            TimeoutError: it did not come so far in time; the message holds its fields and the ends of all logs.
            RuntimeError: it has ended in another state; the message is the same.
        """
        deadline = time.monotonic() + timeout_s
        while (fields := self.job(job))["JobState"] != state or not and_also(fields):
            what = f"job {job} is {fields['JobState']} (restart {fields['Restarts']}), expected {state}"
            if fields["JobState"] in GONE - {state}:
                raise RuntimeError(f"{what}\n{self.tails()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} within {timeout_s:.0f} s\n{fields}\n{self.tails()}")
            time.sleep(0.2)
        return fields

    def tails(self) -> str:
        """Return the ends of all logs of the daemons and of the jobs, for an error message."""
        logs = [*sorted(self._logs.glob("*.log")), *sorted(self.folder.glob("*.log"))]
        ends = {
            log: "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
            for log in logs
        }
        return "\n".join(f"--- end of {log}\n{end}" for log, end in ends.items())

    # ---- processes

    def job_processes(self) -> dict[int, str]:
        """Return the command lines of all live processes of the nodes, by pid, without those of the daemons."""
        found = {pid: _command_line(pid) for pid in self.pids() if pid not in self._daemons}
        return {pid: words for pid, words in found.items() if words}

    def pids(self) -> list[int]:
        """Return the pids of all live processes of the nodes, daemons included, without zombies."""
        network = self._network
        if network is None:
            return []
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        return sorted(
            p for p in pids if any(network.holds(node, p) for node in range(self.num_nodes))
        )

    def shared_memory(self, node: int) -> Path:
        """Return the /dev/shm of `node`, as this process sees it."""
        assert self._network is not None
        return self._network.shared_memory(node)

    def close(self) -> None:
        """
        Kill jobs and daemons, and remove namespaces, key and folders; logs stay. Further calls are harmless.

        Raises:
            RuntimeError: processes survived SIGKILL for 10 s.
        """
        try:
            for process in self._processes:
                process.kill()
            if not wait_until(lambda: not self._kill_all(), KILL_LIMIT_S):
                raise RuntimeError(
                    f"processes {self.pids()} survive SIGKILL: /proc/<pid>/stack shows where"
                )
            for process in self._processes:
                process.wait(KILL_LIMIT_S)
        finally:
            if self._network is not None:
                self._network.close()
            self._network, self._processes = None, []
            shutil.rmtree(self._private, ignore_errors=True)
            atexit.unregister(self.close)

    # ---- inside

    def _start(self, gpus: int) -> None:
        for folder in (self._logs, self._tmpdir):
            folder.mkdir(parents=True, exist_ok=True)
        self._private.chmod(0o755)  # munge's socket is for every user
        self._network = Namespaces(self._private.name, self.num_nodes)
        addresses = [self._network.address(node) for node in range(self.num_nodes)]
        write_files(self._private, addresses, gpus)
        self._start_munge()
        self._daemon("slurmctld", [*self._on(0), "slurmctld", "-D", "-i"])
        for node in range(self.num_nodes):
            self._daemon(f"slurmd{node}", [*self._on(node), "slurmd", "-D"])
        self._until(lambda: self._states() == ["idle"] * self.num_nodes, "all nodes to be idle")
        self._daemons = set(self.pids())

    def _start_munge(self) -> None:
        files = {name: f"{self._private}/munge.{name}" for name in ("key", "socket", "pid", "seed")}
        words = [
            "munged",
            "--foreground",
            "--force",
            f"--key-file={files['key']}",
            f"--socket={files['socket']}",
        ]
        words += [f"--pid-file={files['pid']}", f"--seed-file={files['seed']}"]
        self._daemon("munged", words)
        self._until(Path(files["socket"]).exists, "munge's socket")

    def _daemon(self, name: str, command: list[str]) -> None:
        with open(self._logs / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the caller only, whose `close` then ends them
            )
        self._processes.append(process)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        def over() -> bool:
            return condition() or any(process.poll() is not None for process in self._processes)

        if not wait_until(over, START_LIMIT_S) or not condition():
            raise RuntimeError(f"waited for {what}, without success\n{self.tails()}")

    def _states(self) -> list[str]:
        try:
            return self.run(
                "sinfo", "--noheader", "--Node", "--partition", "main", "--format", "%t"
            ).split()
        except RuntimeError:  # slurmctld does not listen yet
            return []

    def _on(self, node: int) -> list[str]:
        assert self._network is not None
        words = [
            "nsenter",
            f"--net=/run/netns/{self._network.namespace(node)}",
            "unshare",
            "--mount",
            "--uts",
        ]
        words += ["/bin/sh", "-c", ENTER, "enter-node", f"n{node}", f"{self._private}/hosts"]
        return [*words, *self._network.mounts(node, self._tmpdir)]

    def _environment(self) -> dict[str, str]:
        usual = node_environment(self._private.name, INTERFACE, self._tmpdir)
        usual = {
            name: value
            for name, value in usual.items()
            if not name.startswith(("SLURM_", "SBATCH_"))
        }
        # Debian's daemons are in /usr/sbin, which a user's PATH may lack
        path = f"{usual['PATH']}:/usr/sbin:/sbin"
        return usual | {"PATH": path, "SLURM_CONF": f"{self._private}/slurm.conf"} | self._env

    def _kill_all(self) -> list[int]:
        """Send SIGKILL to all live processes of the nodes and return their pids."""
        pids = self.pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids


def private_folder() -> Path:
    """Make the folder for keys and sockets in the temporary folder, whose path must be short.

    Raises:
        RuntimeError: the paths of sockets in it would be too long.
    """
    folder = Path(tempfile.mkdtemp(prefix="tmn-slurm-"))
    if (length := len(f"{folder}{SOCKET_NAME}")) > LONGEST_SOCKET:
        folder.rmdir()
        raise RuntimeError(
            f"SlurmCluster: sockets in {folder.parent} would have paths of {length} characters, expected at most "
            f"{LONGEST_SOCKET}: set TMPDIR to a folder with a shorter path"
        )
    return folder


def _command_line(pid: int) -> str:
    """Return the words of a live process; empty if it has ended."""
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        return ""


@functools.cache
def slurm_available() -> str | None:
    """Return `None` if [`SlurmCluster`] works here, else the reason."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if missing := [name for name in (*DAEMONS, "srun") if shutil.which(name, path=path) is None]:
        return f"{', '.join(missing)} not installed (Debian packages {PACKAGES})"
    return namespaces_available()
