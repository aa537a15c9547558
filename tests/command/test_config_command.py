"""`trl-multinode config`: the shipped files are its output, `check` accepts all of them, and no file is replaced."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import check_kit
import pytest
import yaml
from check_kit import CONFIGS, ROOT

from trl_multinode.tools import main

pytestmark = pytest.mark.nightly  # the shipped files change rarely; launches use them
quiet_machine = check_kit.quiet_machine  # no port in use, no hidden GPU
SPLITS = {
    f"{nodes}node{suffix}": f"{nodes}x8{flags}"
    for nodes in (2, 4, 8)
    for suffix, flags in {"": "", "_6+2": " --engine_gpus 2", "_4+4": " --engine_gpus 4"}.items()
}
SHIPPED = {"1node_1gpu": "1x1", "1node": "1x8", "2node_cpu": "2x2 --cpu", **SPLITS}
SCRIPT = """\
from trl_multinode import GRPOConfig, TrlParser

parser = TrlParser(GRPOConfig)
(args,) = parser.parse_args_and_config()
"""
OTHERS = ("1x2", "3x4 --engine_gpus 2", "16x8 --zero 2", "2x8 --zero 1", "1x3 --cpu", "4x1")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    (tmp_path / "accelerate_configs").mkdir()
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)


def config(typed: str, *more: str) -> int:
    return main(["config", *typed.split(), *more])


def run_check(line: str) -> int:
    """Exit status of a printed check line, on node 0."""
    command, *arguments = line.replace(" K", " 0").replace("HOST0", "node0").split()
    assert command == "trl-multinode"
    return main(arguments)


def test_every_shipped_file_is_listed_and_a_wheel_has_the_same_ones():
    assert {path.stem for path in CONFIGS.iterdir()} == set(SHIPPED)
    assert (ROOT / "trl_multinode" / "accelerate_configs").resolve() == CONFIGS.resolve()


@pytest.mark.parametrize(("name", "typed"), SHIPPED.items())
def test_a_shipped_file_is_the_output_byte_for_byte(name, typed):
    out = f"accelerate_configs/{name}.yaml"
    assert config(typed, "--out", out) == 0
    assert Path(out).read_bytes() == (ROOT / out).read_bytes()
    assert config(typed) == 0 and Path(f"{name}.yaml").exists(), (
        "without --out it has the name of the shipped file"
    )


@pytest.mark.parametrize("typed", [*SHIPPED.values(), *OTHERS])
def test_accelerate_reads_every_key_and_check_finds_no_problem(typed, capsys):
    assert config(typed, "--out", "c.yaml") == 0
    out = capsys.readouterr().out
    launch, line = (text.strip() for text in out.splitlines() if text.startswith("  "))
    header = Path("c.yaml").read_text().partition("\n\n")[0]
    assert f"#   {launch}\n" in header and header.endswith(f"#   {line}")
    assert run_check(line) == 0, capsys.readouterr().out


@pytest.mark.parametrize("typed", ["4x8", "2x4 --engine_gpus 2"])
def test_the_printed_render_line_reads_the_file(typed, capsys):
    assert config(typed) == 0
    line = capsys.readouterr().out.splitlines()[-1].removeprefix("A job file: trl-multinode ")
    assert main(shlex.split(line.replace("slurm|k8s|ssh|skypilot", "slurm"))) == 0
    assert f"#SBATCH --nodes={typed[0]}\n" in capsys.readouterr().out


def test_flags_become_keys():
    config("3x4 --engine_gpus 2 --zero 2 --out c.yaml")
    file = yaml.safe_load(Path("c.yaml").read_text())
    assert (
        file["num_machines"],
        file["num_processes"],
        file["deepspeed_config"]["zero_stage"],
    ) == (3, 6, 2)
    assert file["deepspeed_config"]["zero3_init_flag"] is False


def test_a_file_that_exists_stays(capsys):
    Path("4node.yaml").write_text("mine")
    assert config("4x8") == 1
    assert "4node.yaml" in capsys.readouterr().err
    assert Path("4node.yaml").read_text() == "mine"
    assert config("4x8 --out none/c.yaml") == 1


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("4", "'4'"),
        ("0x8", "'0x8'"),
        ("2x4 --engine_gpus 4", "--engine_gpus 4"),
        ("1x1 --engine_gpus 1", "--engine_gpus"),
        ("2x2 --cpu --engine_gpus 1", "--engine_gpus"),
        ("4x8 --engine_gpus 0", "0"),
    ],
)
def test_a_layout_that_cannot_run_is_refused(typed, message, capsys):
    with pytest.raises(SystemExit) as stop:
        config(typed)
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert list(Path().glob("*.yaml")) == []


# ---- the command itself


@pytest.mark.real
def test_the_command_and_its_config_load_no_library():
    code = """
import sys
from trl_multinode.tools import main
main(["config", "4x8"]); main(["--help"]); main(["--version"])
print([name for name in ("torch", "trl", "transformers", "accelerate", "yaml", "rich") if name in sys.modules])
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    ("typed", "hint"), [("confg", "config"), ("train", "config, check, launch")]
)
def test_an_unknown_command_is_an_error_with_a_hint(typed, hint, capsys):
    assert main([typed]) == 2
    assert hint in capsys.readouterr().err
