"""`trl-multinode render`: errors of its command line, what it prints, and what the templates may use."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import check_kit
import pytest
from check_kit import CONFIGS
from jinja2 import UndefinedError

from trl_multinode.run.preemption import grace_after
from trl_multinode.tools import main
from trl_multinode.tools.render.command import KINDS
from trl_multinode.tools.render.job import read_job
from trl_multinode.tools.text import environment

quiet_machine = check_kit.quiet_machine
FILE = str(CONFIGS / "4node.yaml")
TOKEN = "hf_" + "x" * 30
NEEDED = {
    "slurm": [],
    "k8s": ["--image", "i"],
    "ssh": [],
    "skypilot": ["--gpu", "H100"],
    "docker": [],
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("4node.yaml").write_text(Path(FILE).read_text())


# ---- templates


def test_a_template_leaves_the_shell_alone_and_a_value_that_is_missing_is_an_error():
    text = '@@ if setup\n  @{setup|indent(2)}\n@@ endif\n  echo "$X ${Y[@]} ${#Y[@]} $(z) {{ @b" @{name}  # @{name}\n'
    template = environment().from_string(text)
    shell = '  echo "$X ${Y[@]} ${#Y[@]} $(z) {{ @b" n  # n\n'
    assert template.render(setup="a\nb", name="n") == "  a\n  b\n" + shell
    assert template.render(setup="", name="n") == shell
    with pytest.raises(UndefinedError, match="name"):
        template.render(setup="")


def test_the_limits_leave_the_grace_of_the_package(monkeypatch):
    job = read_job(FILE, "train.py --preemption_grace=900")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(job.launcher_s))
    assert job.grace_s == grace_after(signal.SIGTERM, 900.0) == 900.0
    assert job.kill_s > job.launcher_s
    assert read_job(FILE, "train.py --preemption-grace 30").grace_s == 30
    assert read_job(FILE, "train.py --preemption_grace 30", grace_s=40).grace_s == 40
    assert read_job(FILE, "train.py").grace_s == 600


def test_the_launch_is_shell_text_that_bash_divides_as_meant():
    """A path with a blank, a variable of the node in the script, and the flags as two words each."""
    Path("my file.yaml").write_text(Path(FILE).read_text())
    job = read_job("my file.yaml", """train.py --output_dir $OUT/run --name 'a b'""", gpus=7)
    shell = f"trl-multinode() {{ printf '%s\\n' \"$@\"; }}; {job.launch('--machine_rank 1 --main_process_ip a')}"
    done = subprocess.run(
        ["bash", "-c", shell], env={"OUT": "/runs"}, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [
        *("launch", "my file.yaml", "--timeout", "600", "--gpus_per_node", "7"),
        *("--machine_rank", "1", "--main_process_ip", "a"),
        *("train.py", "--output_dir", "/runs/run", "--name", "a b"),
    ]


# ---- the command


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_steps_name_the_file_and_a_check_that_passes(kind, capsys):
    Path("train.py").write_text(
        "from trl_multinode import GRPOConfig, TrlParser\nTrlParser(GRPOConfig)\n"
    )
    command = ["render", kind, "4node.yaml", "--script", "train.py", "--out", "job", *NEEDED[kind]]
    assert main(command) == 0
    out, error = capsys.readouterr()
    assert out == "" and "600 s" in error and "job" in error.splitlines()[-1]
    (line,) = (line for line in error.splitlines() if line.startswith("  trl-multinode check"))
    assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().out
    written = Path("job").read_text()
    assert shlex.join(["trl-multinode", *command]) in written and "@{" not in written
    assert main(command) == 1 and Path("job").read_text() == written
    assert "job" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_that_differ_are_launched_with_the_ranks_of_each(kind, capsys):
    """Every node gets the same words and the same number of GPUs."""
    Path("train.py").write_text(
        "from trl_multinode import GRPOConfig, TrlParser\nTrlParser(GRPOConfig)\n"
    )
    # the number of the file does not count
    text = Path("4node.yaml").read_text().replace("num_processes: 28", "num_processes: 30")
    Path("4node.yaml").write_text(text)
    own = ["--ranks", "7,8,8,8", "--gpus_per_node", "9"]
    words = ["render", kind, "4node.yaml", "--script", "train.py --num_generations 31", *own]
    assert main([*words, *NEEDED[kind]]) == 0
    out, error = capsys.readouterr()
    assert "--gpus_per_node 9 --ranks 7,8,8,8 " in out.partition("trl-multinode launch")[2]
    (line,) = (line for line in error.splitlines() if line.startswith("  trl-multinode check"))
    assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("ranks", "message"),
    [("7,8,8", "got 3, expected `num_machines` 4"), ("7,8,8,9", "got 9 ranks")],
)
def test_ranks_of_other_nodes_or_beyond_the_gpus_are_refused(ranks, message, capsys):
    words = ["render", "slurm", "4node.yaml", "--script", "train.py", "--ranks", ranks]
    assert main(words) == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "script", "message"),
    [
        (("num_processes: 28", "num_processes: 30"), "train.py", "got 30 "),
        (("num_processes: 28", "num_processes: 36"), "train.py", "`num_processes` 36"),
        (("num_machines: 4", "num_machines: '4x'"), "train.py", "`num_machines` must be a number from 1 (got '4x')"),
        (("num_processes: 28\n", ""), "train.py", "`num_processes` must be a number from 1 (got None)"),
        (("num_machines: 4", "num_machines: ["), "train.py", "4node.yaml"),
        (("", ""), "  ", "got nothing"),
        (("", ""), "train.py\n--max_steps 1", "got several lines"),
        (("", ""), "train.py 'a", "No closing quotation"),
        (("", ""), "accelerate launch train.py", "`accelerate launch`"),
        (("", ""), "train.py --preemption_grace soon", "'soon'"),
    ],
)  # fmt: skip
def test_a_launch_that_cannot_run_is_refused(change, script, message, capsys):
    Path("4node.yaml").write_text(Path(FILE).read_text().replace(*change))
    assert main(["render", "slurm", "4node.yaml", "--script", script, "--out", "job"]) == 2
    assert message in capsys.readouterr().err and not Path("job").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slurm", "none.yaml", "--script", "a"], "none.yaml"),
        (["ssh", "4node.yaml", "--script", "a", "--hosts", "a,b"], "got 2, expected 4"),
    ],
)
def test_a_missing_file_and_missing_hosts_are_named(arguments, message, capsys):
    assert main(["render", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.real
def test_it_runs_on_a_login_node_without_torch():
    code = "import sys; sys.modules |= dict.fromkeys(('torch', 'accelerate', 'trl', 'transformers', 'numpy'))\n"
    code += f"from trl_multinode.tools import main; sys.exit(main({['render', 'ssh', FILE, '--script', 'a']!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("content", [None, "def broken(:\n"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_script_that_is_not_there_or_no_python_is_refused_where_it_must_be_here(
    kind, content, capsys
):
    if content is not None:
        Path("other.py").write_text(content)
    words = ["render", kind, "4node.yaml", "--script", "other.py --a 1", *NEEDED[kind]]
    assert main(words) == (0 if kind == "k8s" else 2)
    assert ("other.py" in capsys.readouterr().err) or kind == "k8s"


@pytest.mark.parametrize(
    ("kind", "flag", "text", "cure"),
    [
        ("slurm", "--setup", f"export HF_TOKEN={TOKEN}", "source"),
        ("slurm", "--setup", "export WANDB_API_KEY=abc; cd /a", "source"),
        ("slurm", "--sbatch", "--export=ALL,HF_TOKEN=abc", "source"),
        ("slurm", "--srun", f"--container-image={TOKEN}", "source"),
        ("slurm", "--script", "train.py --hub_token abc", "source"),
        ("k8s", "--setup", f"export HF_TOKEN={TOKEN}", "--secret"),
        ("k8s", "--env", "HF_TOKEN=abc", "--secret"),
        ("docker", "--package", "git+https://me:word@host/a", "source"),
    ],
)
def test_a_secret_in_any_option_is_refused_with_the_way_of_this_kind(
    kind, flag, text, cure, capsys
):
    words = ["render", kind, "4node.yaml", "--script", "train.py", *NEEDED[kind]]
    with pytest.raises(SystemExit) as stop:
        main([*words, f"{flag}={text}"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and flag in error and cure in error and TOKEN not in error
    assert main([*words, "--setup", "export HF_TOKEN=$(cat ~/token) PAD_TOKEN=x"]) == 0


@pytest.mark.parametrize(
    ("kind", "option"),
    [("k8s", "--toleration=a:NoSchedul"), ("skypilot", "--gpu=H100:4")],
)
def test_a_word_that_kubernetes_or_skypilot_would_misread_is_refused(kind, option, capsys):
    with pytest.raises(SystemExit):
        main(["render", kind, "4node.yaml", "--script", "train.py", *NEEDED[kind], option])
    assert option.partition("=")[0] in capsys.readouterr().err
