"""Stages e, f and i: short GRPO runs, started with `accelerate launch` as a user starts them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from multinode_kit.launch_files import ZERO3, NodesSpec, free_port, fresh_environment
from multinode_kit.models import tiny_tokenizer

from .machine import Machine, build_model
from .record import require
from .running import end

HERE = Path(__file__).resolve()
CONFIG = HERE.parents[2] / "accelerate_configs" / "1node.yaml"
LAUNCH_LIMIT_S = 230.0
LONGEST = 768
CONTROL_IF_BELOW_S = (
    140.0  # two launches took so long that the third would exceed the limit of a stage
)


def saved_model(machine: Machine, folder: Path, shape: str = "0.5B") -> Path:
    """Save a model in a folder, as a user has it, and free the GPU memory of this process."""
    path = folder / "model"
    model = build_model(machine, shape, "fp32" if machine.rehearsal else "bf16")
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    del model
    if not machine.rehearsal:
        torch.cuda.empty_cache()
    return path


def launch(machine: Machine, folder: Path, arm: str, model: Path, **options) -> dict:
    """Start a run and return its figures; raise `RuntimeError` with the last error line of its log if it fails."""
    precision: list[str] = []
    own = folder / options.pop("name", arm)
    own.mkdir(parents=True)
    config = NodesSpec((1,), {}, ZERO3).write(own, "127.0.0.1") if machine.rehearsal else CONFIG
    arguments = [
        "--arm",
        arm,
        "--model",
        str(model),
        "--folder",
        str(own),
        *(["--cpu"] if machine.rehearsal else []),
    ]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        arguments += [flag] if value is True else [flag, str(value)]
    # the YAML file sets bf16, which would override the script's own arguments
    if options.get("fp32"):
        precision = ["--mixed_precision", "no"]
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), "--num_processes", "1",
        *precision, "--main_process_port", str(free_port()), "-m", "gpu_kit.train_rank", *arguments,
    ]  # fmt: skip
    path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**fresh_environment(), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    if machine.rehearsal:
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    else:
        environment.pop("DS_ACCELERATOR", None)
    with open(own / "run.log", "wb") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(LAUNCH_LIMIT_S)
        finally:
            end(process)
    if code != 0:
        raise RuntimeError(f"{arm} ended with code {code}: {cause(own / 'run.log')}")
    return json.loads((own / "figures.json").read_text())


def cause(log: Path) -> str:
    """Return the last line that looks like an error, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return " ".join((errors or lines)[-1:])[-250:]


def optimizer_steps(machine: Machine, figures: dict, folder: Path) -> None:
    """Run stage e: generation, weight sync and training on one GPU under ZeRO-3, with a user's launch command."""
    small = {"rows": 8, "micro_batch": 4, "completion": 32} if machine.rehearsal else {}
    figures |= launch(machine, folder, "ours", saved_model(machine, folder), steps=3, **small)
    require(figures["steps"] == 3, f"{figures['steps']} of 3 steps")
    require(figures["sync_version"] >= 3, f"{figures['sync_version']} weight updates")


def balanced(machine: Machine, figures: dict, folder: Path) -> None:
    """Run stage e: balanced micro-batches and TRL's on the same rows in float32; compare seconds, memory, gradient."""
    rows, longest = (16, 96) if machine.rehearsal else (64, LONGEST)
    model, found = saved_model(machine, folder), {}
    for name, arm in (("trl", "replay"), ("balanced", "balanced"), ("trl_again", "replay")):
        found[name] = launch(
            machine, folder, arm, model, name=name, fp32=True, rows=rows, micro_batch=4, steps=2, prompt=24,
            completion=longest, cap=4 * (longest + 32),
        )  # fmt: skip
        figures |= {
            f"{name}_{key}": found[name][key]
            for key in ("train_s", "peak_gib")
            if key in found[name]
        }
    figures["speedup"] = found["trl"]["train_s"] / found["balanced"]["train_s"]
    figures["control"] = found["trl"]["train_s"] / found["trl_again"]["train_s"]
    figures["gradient_difference"] = gradient_difference(folder / "trl", folder / "balanced")
    figures["gradient_control"] = gradient_difference(folder / "trl", folder / "trl_again")
    require(
        figures["gradient_difference"] <= 1e-4,
        f"the gradient differs by {figures['gradient_difference']:.2g}",
    )


def gradient_difference(one: Path, other: Path) -> float:
    """Return |a - b| / |a| over the recorded parameters."""
    a, b = (torch.load(folder / "gradient.pt") for folder in (one, other))
    apart = sum((a[name] - b[name]).double().pow(2).sum() for name in a)
    return float((apart / sum(value.double().pow(2).sum() for value in a.values())).sqrt())


def colocation(machine: Machine, figures: dict, folder: Path) -> None:
    """Run stage f: TRL's colocation, ours, and ours again as the control, with the same model and rows."""
    model, start = saved_model(machine, folder), time.monotonic()
    for name, arm in (("trl", "colocate"), ("ours", "ours"), ("ours_again", "ours")):
        if name == "ours_again" and time.monotonic() - start > CONTROL_IF_BELOW_S:
            figures["control"] = "not run, for lack of time"
            break
        found = launch(machine, folder, arm, model, name=name, steps=5)
        figures |= {
            f"{name}_{key}": found[key]
            for key in ("step_s", "peak_gib", "gpu_used_gib")
            if key in found
        }
    else:
        figures["control"] = figures["ours_again_step_s"] / figures["ours_step_s"]
    figures["trl_over_ours"] = figures["trl_step_s"] / figures["ours_step_s"]


def long_rows(machine: Machine, figures: dict, folder: Path) -> None:
    """Run stage i: send rows of 32k tokens through engine, exchange and training."""
    prompt, completion = (64, 64) if machine.rehearsal else (30720, 2048)
    figures |= launch(
        machine, folder, "ours", saved_model(machine, folder), rows=4, micro_batch=1, steps=2, prompt=prompt,
        completion=completion,
    )  # fmt: skip
    figures["tokens_per_row"] = prompt + completion
