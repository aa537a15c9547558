"""What a real engine shows to other hosts and leaves behind, on a node whose host name resolves to its address."""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from left_behind import left_in

from multinode_kit.namespaces import Namespaces, namespaces_available

SCRIPT = Path(__file__).parents[1] / "isolated.py"
SECRETS = (
    "HF_TOKEN",
    "WANDB_API_KEY",
    "VLLM_API_KEY",
    "PYTHON_SECRET",
    "CUDA_PASSWORD",
    "NCCL_CREDENTIALS",
    "TRL_MULTINODE_SECRET",
)
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        namespaces_available() is not None, reason=f"namespaces: {namespaces_available()}"
    ),
]


class Node:
    """A network namespace with a temporary folder and a /dev/shm of its own."""

    def __init__(self, network: Namespaces, folder: Path):
        self._network, self._folder = network, folder
        self._hosts = folder / "hosts"
        self._hosts.write_text(f"127.0.0.1 localhost\n{network.address(0)} {os.uname().nodename}\n")
        # short: sockets have their paths in it
        self.temporary = tempfile.mkdtemp(prefix="iso", dir="/tmp")
        self.canary = f"canary{secrets.token_hex(8)}"

    def run(self, *command: str) -> subprocess.CompletedProcess:
        named = [
            "/bin/sh",
            "-c",
            'mount --bind "$1" /etc/hosts && shift && exec "$@"',
            "named",
            str(self._hosts),
        ]
        environment = os.environ | dict.fromkeys(SECRETS, self.canary) | {"TMPDIR": self.temporary}
        environment |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_SERVER_DEV_MODE": "1"}
        enter = self._network.enter(0, Path(self.temporary))
        return subprocess.run(
            [*enter, *named, *command], env=environment, capture_output=True, text=True, timeout=400
        )

    def left(self) -> list[str]:
        places = self._network.tmpdir(0), self._network.shared_memory(0)
        return left_in(places)

    def clean(self) -> list[str]:
        """What `clean` prints of this node; the engine's killed processes may take a moment to be gone."""
        deadline = time.monotonic() + 60
        while True:
            done = self.run(sys.executable, "-m", "trl_multinode.tools", "clean")
            assert done.returncode == 0, done.stderr
            found = [line for line in done.stdout.splitlines() if line.startswith(self.temporary)]
            if time.monotonic() > deadline or not any("its run lives" in line for line in found):
                return found


@pytest.fixture
def node(tmp_path):
    network = Namespaces(f"iso{os.getpid()}", 1)
    try:
        node = Node(network, tmp_path)
        yield node
        os.rmdir(node.temporary)
    finally:
        network.close()


@pytest.mark.parametrize(("workers", "end"), [(1, "orderly"), (2, "kill")])
def test_row_38_a_real_engine_is_reached_by_no_other_host_and_leaves_nothing(
    workers, end, node, tmp_path
):
    done = node.run(sys.executable, str(SCRIPT), str(tmp_path), str(workers), end)
    assert done.returncode == (-9 if end == "kill" else 0), done.stdout + done.stderr[-3000:]
    processes = json.loads((tmp_path / "facts.json").read_text())
    listeners = [ip for process in processes for ip in process["listeners"]]
    assert len(listeners) > 5 and set(listeners) == {"127.0.0.1"}, listeners
    for process in processes:
        names = {entry.partition("=")[0] for entry in process["environment"]}
        assert not names & {
            *SECRETS,
            "VLLM_ALLOW_INSECURE_SERIALIZATION",
            "VLLM_SERVER_DEV_MODE",
        }, process["title"]
        assert not any(
            node.canary in entry for entry in (*process["environment"], process["title"])
        )
    assert not [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and node.canary.encode() in path.read_bytes()
    ]
    if end == "kill":
        left = node.left()
        assert [name for name in left if name.startswith("psm_")]
        # vLLM's collectives in shared memory are in its build for AVX-512 only
        has_collectives = "avx512f" in Path("/proc/cpuinfo").read_text()
        assert has_collectives == any("-cpushm_" in name for name in left)
        (removed,) = node.clean()
        assert removed.endswith("bytes  removed")
    assert node.left() == []
