"""The script for ssh, with a real sshd on each of two hosts, which are network namespaces."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from waiting import HANG_S, until

from multinode_kit.engines import FAKE
from multinode_kit.launch_files import fresh_environment
from multinode_kit.namespaces import Namespaces, namespaces_available
from trl_multinode.tools import main

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
SCRIPT = Path(__file__).parent / "scripts" / "endless_run.py"
ROOT = Path(__file__).parents[2]
CONFIG = """\
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PidFile none
PermitRootLogin prohibit-password
"""

# sshd wants a user of its name, which a machine lacks when the installation of the package was cut short. The mount
# ends with the daemon and its sessions
WITH_ACCOUNTS = 'mount --bind "$1" /etc/passwd && shift && exec "$@"'
ACCOUNT = "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n"


def missing() -> str | None:
    if SSHD is None or shutil.which("ssh") is None:
        return "sshd and ssh are not installed (Debian package openssh-server)"
    return namespaces_available()


pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.two_node,
    pytest.mark.nightly,
]


@dataclass
class Hosts:
    """Two hosts with sshd, and a folder that both see."""

    network: Namespaces
    folder: Path
    private: Path

    def start(self, script: Path, *hosts: str) -> subprocess.Popen:
        """Start the script on host 0, in a terminal's process group of its own, without the venv in the PATH."""
        environment = fresh_environment() | {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        environment["SSH_OPTIONS"] = (
            f"-i {self.folder}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
        )
        with open(self.folder / "output.log", "wb") as log:
            command = [*self.network.enter(0, self.private), "bash", str(script), *hosts]
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def output(self) -> str:
        return (self.folder / "output.log").read_text()


def started_or_ended(daemon: subprocess.Popen, log: Path) -> bool:
    return "listening" in log.read_text() or daemon.poll() is not None


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    folder = Path(tempfile.mkdtemp(prefix="ssh-"))
    (folder / "private").mkdir()
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True
    )
    (folder / "sshd.conf").write_text(CONFIG.format(folder=folder))
    accounts = Path("/etc/passwd").read_text()
    (folder / "passwd").write_text(accounts if "\nsshd:" in accounts else accounts + ACCOUNT)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd refuses to start without it
    network, daemons = Namespaces(f"ssh{secrets.token_hex(3)}", 2), []
    try:
        for node in range(2):
            assert SSHD is not None
            words = [
                *network.enter(node, folder / "private"),
                "/bin/sh",
                "-c",
                WITH_ACCOUNTS,
                "with-accounts",
                str(folder / "passwd"),
                SSHD,
                "-D",
                "-e",
                "-f",
                str(folder / "sshd.conf"),
            ]
            with open(folder / f"sshd{node}.log", "wb") as log:
                daemons.append(subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT))
        logs = [folder / f"sshd{node}.log" for node in range(2)]
        for daemon, log in zip(daemons, logs, strict=True):
            until(partial(started_or_ended, daemon, log), log.read_text)
            assert daemon.poll() is None, f"sshd did not start: {log.read_text()}"
        yield Hosts(network, folder, folder / "private")
    finally:
        # what a failed test has left, and sshd
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if any(network.holds(node, int(pid)) for node in range(2)):
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for daemon in daemons:
            daemon.wait()
        network.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def script(hosts, monkeypatch, capsys) -> Path:
    monkeypatch.chdir(hosts.folder)
    for name in ("run.sh", "c.yaml"):
        Path(name).unlink(missing_ok=True)
    assert main(["config", "2x1", "--cpu", "--out", "c.yaml"]) == 0
    variables = {"GLOO_SOCKET_IFNAME": "eth0", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": 1,
                 "TRL_MULTINODE_ENGINE_MODULE": FAKE, "TMPDIR": hosts.private, "HF_HUB_OFFLINE": 1}  # fmt: skip
    variables |= {
        name: os.environ[name]
        for name in ("PYTHONPATH", "TORCH_EXTENSIONS_DIR")
        if name in os.environ
    }
    options = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    options += [
        "--setup",
        f"export PATH={Path(sys.executable).parent}:$PATH",
        "--grace",
        "60",
        "--out",
        "run.sh",
    ]
    arguments = [
        "--script",
        f"'{SCRIPT}' $PWD/run",
        "--hosts",
        "10.77.0.1,10.77.0.2",
        "--timeout",
        "60",
    ]
    assert main(["render", "ssh", "c.yaml", *arguments, *options]) == 0
    assert "bash run.sh" in capsys.readouterr().err
    return hosts.folder / "run.sh"


def test_ctrl_c_saves_a_checkpoint_on_both_hosts_and_the_code_comes_back(hosts, script):
    """Roll-call, then a training on two hosts, with Ctrl-C in the terminal of the script during a step."""
    process = hosts.start(script)
    until(lambda: "step 2" in hosts.output() or process.poll() is not None, hosts.output)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(HANG_S) == 143, hosts.output()
    logs = [(hosts.folder / "grpo-logs" / f"node{node}.log").read_text() for node in range(2)]
    for node, log in enumerate(logs):
        assert "2 of 2 nodes here" in log and f"rank {node} of 2" in log
        assert f"node {node} (10.77.0.{node + 1}) ended with code 143" in hosts.output()
    assert "rank 0 of 2" in hosts.output() and "rank 1 of 2" not in hosts.output()
    endings = [
        json.loads(path.read_text())
        for path in (hosts.folder / "run" / "_multinode").glob("ending-*.json")
    ]
    assert [ending["code"] for ending in endings] == [143, 143]
    assert all(Path(ending["checkpoint"]).is_dir() for ending in endings)


STAND_IN = """\
#!/usr/bin/env bash
words=$* rank=${words#*--machine_rank } rank=${rank%% *}
trap 'echo "$*" > ended$rank; exit 143' TERM
touch started$rank
[[ ! -e fails$rank ]] || exit 5
while :; do sleep 0.1; done
"""


@pytest.fixture
def quick_script(script, hosts) -> Path:
    """The same script with a stand-in for the roll-call and the launch."""
    for path in (
        *hosts.folder.glob("ended*"),
        *hosts.folder.glob("started*"),
        *hosts.folder.glob("fails*"),
    ):
        path.unlink()
    (hosts.folder / "bin").mkdir(exist_ok=True)
    (hosts.folder / "bin" / "trl-multinode").write_text(STAND_IN)
    (hosts.folder / "bin" / "trl-multinode").chmod(0o755)
    venv, ours = f"PATH={Path(sys.executable).parent}:", f"PATH={hosts.folder}/bin:"
    script.write_text(script.read_text().replace(venv, ours))
    return script


def there(hosts: Hosts, *names: str) -> bool:
    return until(lambda: all((hosts.folder / name).exists() for name in names), hosts.output)


def test_the_death_of_the_script_reaches_every_node_as_sigterm(hosts, quick_script):
    process = hosts.start(quick_script)
    assert there(hosts, "started0", "started1"), hosts.output()
    process.kill()
    assert there(hosts, "ended0", "ended1"), hosts.output()
    process.wait()


def test_a_node_that_fails_ends_the_others_and_gives_the_code(hosts, quick_script):
    (hosts.folder / "fails1").touch()
    process = hosts.start(quick_script)
    assert process.wait(HANG_S) == 5, hosts.output()
    assert there(hosts, "ended0") and not (hosts.folder / "ended1").exists()
    assert "node 1 (10.77.0.2) ended with code 5; log: grpo-logs/node1.log" in hosts.output()
    assert "node 0 (10.77.0.1) ended with code 143" in hosts.output()


def test_a_host_without_ssh_is_named_before_any_node_starts(hosts, script):
    process = hosts.start(script, "10.77.0.1", "10.77.0.1:9")
    assert process.wait(HANG_S) == 3
    assert "node 1: no ssh to 10.77.0.1:9" in hosts.output() and "node 0" not in hosts.output()
    assert hosts.start(script, "10.77.0.1").wait(HANG_S) == 2
    assert "got 1 hosts, expected 2" in hosts.output()
