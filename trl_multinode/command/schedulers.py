"""Job files for SLURM and Kubernetes, from the files of `launch_templates/`."""

from pathlib import Path

from .layout import Layout

TEMPLATES = Path(__file__).parents[1] / "launch_templates"
SCHEDULERS = {"slurm": "slurm.sh", "kubernetes": "kubernetes.yaml"}


def job_file(scheduler: str, layout: Layout, config: Path) -> str:
    """Return the job file of a layout.

    Args:
        scheduler (`str`):
            Key of `SCHEDULERS`.
        layout ([`Layout`]):
            Nodes and devices.
        config (`Path`):
            Config file of `accelerate launch`.
    """
    text = (TEMPLATES / SCHEDULERS[scheduler]).read_text()
    values = {"NODES": layout.nodes, "GPUS": layout.devices, "CONFIG": config, "CONFIG_NAME": config.name}
    for name, value in {**values, "SCRIPT_FLAGS": layout.script_flags}.items():
        text = text.replace(f"@{name}@", str(value))
    return text
