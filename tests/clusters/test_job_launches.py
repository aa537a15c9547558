"""Real launches by the command of a Kubernetes pod, and by `trl-multinode grpo`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from waiting import HANG_S, until

from multinode_kit.launch_files import free_port, fresh_environment
from trl_multinode.tools import main

# test_slurm_script.py and test_render.py divide the same launch with bash; test_grpo_command.py has the words
pytestmark = [pytest.mark.two_node, pytest.mark.nightly]
ROOT = Path(__file__).parents[2]
NEEDED = ["--dataset_name", "d", "--reward_funcs", "think_format_reward", "my.rewards:length"]
# Stands for the training script: says what each rank got, without loading a model
PROBE = """
import json, os, sys
folder = os.environ["PROBE"]
with open(f"{folder}/{os.environ['RANK']}", "w") as file:
    json.dump([os.environ["WORLD_SIZE"], *sys.argv[1:]], file)
"""
# Ends as a pre-empted rank: with a file that holds the code, because torchrun turns every code into 1.
SCRIPT = """\
import json, os, signal, sys
from pathlib import Path
import torch.distributed as dist

def preempted(*_):
    Path(os.environ["TRL_MULTINODE_ENDING_FILE"]).write_text(json.dumps({"code": 143, "cause": "pre-empted"}))
    sys.exit(143)

signal.signal(signal.SIGTERM, preempted)
dist.init_process_group("gloo")
dist.barrier()
limit = os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, {limit} s, {sys.argv[1]}", flush=True)
while True:
    signal.pause()
"""


def test_pods_meet_launch_and_end_with_the_code_of_the_run(tmp_path, monkeypatch, capsys):
    """Two pods on this machine: roll-call, launch, then SIGTERM to the first process of each, as at an eviction."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)
    assert main(["config", "2x1", "--cpu", "--out", "c.yaml"]) == 0
    capsys.readouterr()
    options = ["--image", "i", "--env", "A=1", "--timeout", "600", "--grace", "20"]
    assert (
        main(["render", "k8s", "c.yaml", "--script", "script.py $A-$PET_NODE_RANK", *options]) == 0
    )
    documents = {
        document["kind"]: document for document in yaml.safe_load_all(capsys.readouterr().out)
    }
    port = free_port()
    text = documents["ConfigMap"]["data"]["accelerate.yaml"].replace("29500", str(port))
    Path("accelerate.yaml").write_text(text)
    command = documents["TrainJob"]["spec"]["trainer"]["command"]
    command = [word.replace("/etc/trl-multinode", str(tmp_path)) for word in command]
    pods, logs = [], [Path(f"pod{rank}.log") for rank in range(2)]
    for rank, log in enumerate(logs):
        variables = {"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "127.0.0.1",
                     "PET_MASTER_PORT": "29400", "PET_NPROC_PER_NODE": "auto", "JOB_COMPLETION_INDEX": str(rank),
                     "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "lo",
                     "PYTHONPATH": os.environ["PYTHONPATH"]}  # fmt: skip
        with log.open("wb") as file:
            pods.append(
                subprocess.Popen(
                    command,
                    env=fresh_environment() | variables,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        until(
            lambda: all(" of 2, " in log.read_text() for log in logs),
            lambda: str([log.read_text() for log in logs]),
        )
        for pod in pods:
            pod.send_signal(signal.SIGTERM)
        assert [pod.wait(HANG_S) for pod in pods] == [143, 143], [log.read_text() for log in logs]
    finally:
        for pod in pods:
            pod.kill()
    for rank, log in enumerate(logs):
        assert "2 of 2 nodes here" in log.read_text()
        assert f"rank {rank} of 2, 25 s, 1-{rank}\n" in log.read_text()


def test_two_ranks_run_the_module_with_the_scripts_words(tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    code = "from trl_multinode.tools import grpo; import sys; grpo.MODULE = 'probe'; grpo.main(sys.argv[1:])"
    config = tmp_path / "c.yaml"
    assert main(["config", "1x2", "--cpu", "--out", str(config)]) == 0
    words = ["--accelerate_config", str(config), "--main_process_port", "0", *NEEDED]
    environment = os.environ | {
        "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{tmp_path}",
        "PROBE": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [json.loads((tmp_path / rank).read_text()) for rank in "01"] == [["2", *NEEDED]] * 2
