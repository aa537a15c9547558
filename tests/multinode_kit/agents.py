"""Agents for tests: processes of `trl-multinode engines` beside the nodes of a launch."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import yaml

from trl_multinode.wire.process_end import end_with_parent
from trl_multinode.wire.secret import SECRET

from .nodes import Nodes

LIMIT_S = 60.0
SECRET_OF_TESTS = {SECRET: "secret of these tests"}


@contextmanager
def running_agent(
    nodes: Nodes, folder: Path, env: Mapping[str, str], host: int | None = None
) -> Iterator[subprocess.Popen]:
    """Run an agent of the present launch of `nodes`, whose output is `folder/agent.log`; the exit ends it.

    Args:
        nodes (`Nodes`):
            Nodes that have been launched.
        folder (`Path`):
            Folder of its logs.
        env (`Mapping[str, str]`):
            Variables of the agent and its engines, as for `Nodes`.
        host (`int`, *optional*):
            Namespace in which it runs. Default: none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = yaml.safe_load((nodes.logs / "accelerate.yaml").read_text())
    address = f"{config['main_process_ip']}:{config['main_process_port']}"
    command = [sys.executable, "-m", "trl_multinode.tools", "engines", "--join", address]
    command += ["--logs", str(folder)]
    if host is not None:
        command = [*nodes.enter(host), *command]
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with open(folder / "agent.log", "ab") as log:
        agent = subprocess.Popen(
            command,
            env={**os.environ, **own, **SECRET_OF_TESTS, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
        )
    try:
        yield agent
    finally:
        agent.terminate()
        try:
            agent.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()
            raise
