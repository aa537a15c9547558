"""SkyPilot's task and the Dockerfile, as data: neither SkyPilot nor Docker runs in a test."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from trl_multinode.tools import main
from trl_multinode.tools.text import PACKAGE

pytestmark = pytest.mark.nightly  # a rarely changed kind; SLURM's script decides in every run


@pytest.fixture
def render(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main(["config", "4x8", "--out", "c.yaml"]) == 0

    def run(kind: str, *options: str) -> str:
        capsys.readouterr()
        code = main(["render", kind, "c.yaml", "--script", "train.py --output_dir $OUT", *options])
        text, error = capsys.readouterr()
        assert code == 0 or not text
        return text or error

    return run


def launch_of(shell: str) -> list[str]:
    """Words of the launch at the end of a shell script."""
    assert subprocess.run(["bash", "-n"], input=shell, text=True).returncode == 0
    return shlex.split(shell.partition("exec ")[2].replace("\\\n", ""))


def test_the_task_has_the_nodes_their_gpus_and_the_launch(render):
    options = ["--gpu", "H100", "--spot", "--bucket", "s3://runs:/runs", "--env", "OUT=/runs/a"]
    task = yaml.safe_load(render("skypilot", *options))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (4, "H100:8")
    assert task["resources"]["use_spot"] is True
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [143]}
    assert task["file_mounts"] == {"/runs": {"source": "s3://runs", "mode": "MOUNT_CACHED"}}
    words = ["c.yaml", "--timeout", "600", "train.py", "--output_dir", "$OUT"]
    assert launch_of(task["run"]) == ["trl-multinode", "launch", *words]
    assert "export OUT=/runs/a\n" in task["run"]
    assert f"'{PACKAGE}'" in task["setup"] and "bin/activate" in task["run"]


def test_a_setup_of_the_users_own_follows_the_activation(render):
    task = yaml.safe_load(render("skypilot", "--gpu", "H100", "--setup", "export A=1"))
    assert "source ~/trl-multinode/bin/activate && export A=1\n" in task["run"]


def test_a_local_package_is_in_the_image_before_pip_looks_for_it(render):
    lines = render("docker", "--package", "./[gpu]").splitlines()
    assert lines.index("COPY . .") < lines.index("RUN pip install --no-cache-dir './[gpu]'")
    # the layer of one from an index stays when the folder changes
    lines = render("docker").splitlines()
    assert lines.index("COPY . .") > lines.index(f"RUN pip install --no-cache-dir '{PACKAGE}'")


def test_an_image_takes_the_place_of_the_installation(render):
    task = yaml.safe_load(render("skypilot", "--gpu", "H100", "--image", "registry/grpo:1"))
    assert task["resources"]["image_id"] == "docker:registry/grpo:1"
    assert "use_spot" not in task["resources"] and "file_mounts" not in task
    assert "pip" not in task["setup"] and "activate" not in task["run"]


def test_a_kind_of_gpu_is_needed(render):
    assert "--gpu H100" in render("skypilot")


def test_the_image_starts_a_node_by_itself(render):
    text = render("docker", "--env", 'A=b "c" $d', "--setup", "echo hello", "--base", "debian:13")
    lines = text.splitlines()
    assert "FROM debian:13" in lines and f"RUN pip install --no-cache-dir '{PACKAGE}'" in lines
    assert "COPY . ." in lines and r'ENV A="b \"c\" \$d"' in lines
    assert 'ENV TORCH_ELASTIC_SHUTDOWN_TIMEOUT="605"' in lines
    bash, option, shell = json.loads(lines[-1].removeprefix("CMD "))
    assert (bash, option) == ("bash", "-c")
    assert shell.startswith("set -eo pipefail\necho hello\nexec trl-multinode")
    assert launch_of(shell)[:3] == ["trl-multinode", "launch", "c.yaml"]


def test_a_config_file_outside_of_the_image_is_refused(render, capsys):
    file = str(Path(__file__).parents[2] / "accelerate_configs" / "4node.yaml")
    assert main(["render", "docker", file, "--script", "train.py"]) == 2
    assert "4node.yaml" in capsys.readouterr().err
