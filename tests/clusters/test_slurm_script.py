"""Batch script of `trl-multinode render slurm`, with stand-ins for the commands that `test_slurm.py` really runs."""

import os
import subprocess
from pathlib import Path

import pytest
from check_kit import CONFIGS

from trl_multinode.tools import main

FILE = str(CONFIGS / "2node_6+2.yaml")
# One task per node, in turn. With WARN the batch script gets SLURM's signal first. The last code is the step's
SRUN = """\
trap : USR1
echo "srun $*" >> calls
[ -z "$WARN" ] || kill -USR1 $PPID
while [ "$1" != bash ]; do shift; done
code=0
for k in 0 1; do SLURM_NODEID=$k "$@" || code=$?; done
exit $code"""
TRL_MULTINODE = """\
printf "<%s>" "$@"; echo " node=$SLURM_NODEID limit=$TORCH_ELASTIC_SHUTDOWN_TIMEOUT"; exit ${CODE:-0}"""
STAND_INS = {
    "srun": SRUN,
    "trl-multinode": TRL_MULTINODE,
    "scontrol": 'echo "scontrol $*" >> calls; echo "JobId=7 JobState=$STATE PreemptTime=$TIME SuspendTime=None"',
    "squeue": 'echo "$END"',
    "sleep": "exec /bin/sleep 0.05",
}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a rendered script. Returns the finished process, and the calls of SLURM's commands."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    def run_script(
        *flags: str, script: str = "train.py", **env: str
    ) -> tuple[subprocess.CompletedProcess, str]:
        assert main(["render", "slurm", FILE, "--script", script, *flags]) == 0
        Path("job.sbatch").write_text(capsys.readouterr().out)
        environment = os.environ | {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
        }
        environment |= {
            "SLURM_CPUS_ON_NODE": "96",
            "STATE": "RUNNING",
            "TIME": "None",
            "END": "",
            "WARN": "",
        } | env
        done = subprocess.run(
            ["bash", "job.sbatch"], env=environment, capture_output=True, text=True
        )
        return done, Path("calls").read_text() if Path("calls").exists() else ""

    return run_script


def test_every_node_meets_the_others_and_starts_its_share(run):
    script = """train.py --system "it's $5" --max_steps 9"""
    done, calls = run(
        "--sbatch=--partition=h100",
        "--srun=--container-image=a.sqsh",
        "--grace",
        "90",
        script=script,
    )
    lines = done.stdout.splitlines()
    words = ["launch", FILE, "--timeout", "600", "train.py"]
    words += ["--system", "it's ", "--max_steps", "9"]
    for node in range(2):
        said = "".join(f"<{word}>" for word in words) + f" node={node} limit=95"
        assert lines[node] == said, done.stderr
    assert (
        "--kill-on-bad-exit=1 --cpus-per-task=96 " in calls
        and "--container-image=a.sqsh bash -c" in calls
    )
    head = Path("job.sbatch").read_text().partition("set -uo")[0].splitlines()
    wanted = {
        "nodes=2",
        "gpus-per-node=8",
        "exclusive",
        "requeue",
        "open-mode=append",
        "signal=B:USR1@120",
    }
    assert {f"#SBATCH --{flag}" for flag in wanted | {"partition=h100"}} - set(head) == set()
    assert done.returncode == 0 and "requeue" not in calls


@pytest.mark.parametrize(
    ("code", "environment", "reason"),
    [
        ("143", {"TIME": "2030-01-01T00:00:00"}, "pre-empted"),
        # a process that the signal has killed
        (
            "6",
            {"TIME": "2030-01-01T00:00:00"},
            "pre-empted",
        ),
        ("143", {"WARN": "1"}, "time limit"),
        ("6", {"WARN": "1"}, None),  # an error of its own
        ("143", {}, None),  # a signal by hand
        ("143", {"STATE": "CANCELLED", "TIME": "2030-01-01T00:00:00"}, None),
        # SLURM has put it back itself
        (
            "143",
            {"STATE": "PENDING", "TIME": "2030-01-01T00:00:00"},
            None,
        ),
        ("0", {"WARN": "1"}, None),  # it has ended in time
        ("0", {"TIME": "2030-01-01T00:00:00"}, None),
    ],
)
def test_the_job_goes_back_into_the_queue_only_if_slurm_has_stopped_it(
    run, code, environment, reason
):
    done, calls = run(CODE=code, **environment)
    assert done.returncode == int(code), done.stderr
    assert ("scontrol requeue 7" in calls) == (reason is not None)
    assert reason is None or (reason in done.stdout and f"code {code}" in done.stdout)


def test_a_job_that_may_lose_nodes_says_with_how_many_it_starts_again(run):
    done, calls = run("--min_nodes", "1", CODE="143", WARN="1", SLURM_JOB_NUM_NODES="1")
    assert "<--min_nodes><1>" in done.stdout and "with 1 to 2 nodes" in done.stdout
    assert "#SBATCH --nodes=1-2\n" in Path("job.sbatch").read_text()
    assert "scontrol requeue 7" in calls and "--ntasks=1 " in calls


@pytest.mark.parametrize("flags", [["--min_nodes", "2"], ["--min_nodes", "1", "--ranks", "6,6"]])
def test_a_job_that_can_lose_no_node_is_refused(flags, capsys, tmp_path):
    (tmp_path / "train.py").touch()
    assert main(["render", "slurm", FILE, "--script", f"{tmp_path}/train.py", *flags]) == 2
    assert "--min_nodes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("end", "refused"), [("1 minute", True), ("2 hours", False), ("N/A", False), ("", False)]
)
def test_a_time_limit_below_the_warning_is_refused_at_the_start(run, end, refused):
    done, calls = run(END=end)
    assert (done.returncode, "srun" in calls) == ((2, False) if refused else (0, True)), done.stderr
    assert (
        "630 s" in done.stderr and "--signal" in done.stderr and "--time" in done.stderr
    ) == refused


def test_a_node_without_gpus_asks_for_none(run, capsys):
    assert main(["render", "slurm", str(CONFIGS / "2node_cpu.yaml"), "--script", "train.py"]) == 0
    assert "gpus-per-node" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "gone", "kept"),
    [
        ("--gres=gpu:h100:8", "gpus-per-node", "exclusive"),
        ("--oversubscribe", "exclusive", "gpus-per-node=8"),
        ("--gpus-per-node=h100:8", "gpus-per-node=8", "exclusive"),
    ],
)
def test_a_line_of_the_cluster_replaces_that_of_the_file(run, given, gone, kept, capsys):
    assert main(["render", "slurm", FILE, "--script", "train.py", f"--sbatch={given}"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#SBATCH")]
    assert f"#SBATCH {given}" in lines and f"#SBATCH --{kept}" in lines
    assert not any(line.startswith(f"#SBATCH --{gone}") for line in lines)


@pytest.mark.parametrize("given", ["--nodes=3", "partition", "-J x", "--signal=USR2", "--a\nb"])
def test_a_line_that_is_no_flag_or_one_of_the_file_is_refused(run, given, capsys):
    with pytest.raises(SystemExit):
        main(["render", "slurm", FILE, "--script", "train.py", f"--sbatch={given}"])
    assert given.split("=")[0].split()[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--time=00:10:30", "got 630 s, expected more than the 630 s"),
        ("-t 10", "got 600 s"),
        ("--time=5:30", "got 330 s"),
        ("--gpus-per-node=4", "got 4, expected 8"),
        ("--gres=gpu:h100:4,nvme:1", "got 4, expected 8"),
        ("-G 8", "got 8, expected 16"),
    ],
)
def test_a_line_that_does_not_fit_the_job_is_refused(run, given, message, capsys):
    assert main(["render", "slurm", FILE, "--script", "train.py", f"--sbatch={given}"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    ["--time=00:11:00", "--time=1-0", "-t 1:00:00", "--time=UNLIMITED", "--gres=gpu:8,nvme:1", "-G 16"],
)  # fmt: skip
def test_a_line_that_fits_the_job_is_kept(run, given, capsys):
    assert main(["render", "slurm", FILE, "--script", "train.py", f"--sbatch={given}"]) == 0
    assert f"#SBATCH {given}\n" in capsys.readouterr().out
