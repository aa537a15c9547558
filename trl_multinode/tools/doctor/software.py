"""Versions of this node's libraries, and the tracker to which rank 0 reports."""

import hashlib
import importlib.util
import netrc
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ...run.versions import MISSING, local_versions
from ..check.rules_nodes import DEFAULT_PORT
from .case import Case
from .facts import Fact, Finding

# Package to import and, if the tracker needs a key, variable and host under which it may be kept
TRACKERS: dict[str, tuple[str, str, str]] = {
    "wandb": ("wandb", "WANDB_API_KEY", "api.wandb.ai"),
    "comet_ml": ("comet_ml", "COMET_API_KEY", ""),
    "neptune": ("neptune", "NEPTUNE_API_TOKEN", ""),
    "swanlab": ("swanlab", "SWANLAB_API_KEY", "api.swanlab.cn"),
    "trackio": ("trackio", "", ""),
    "mlflow": ("mlflow", "", ""),
    "clearml": ("clearml", "", ""),
}


def examine_launch(case: Case) -> Iterator[Fact | Finding]:
    """Yield what this node would start. The same words must mean the same launch on all nodes."""
    launch = case.launch
    yield Fact(
        "launch",
        f"{launch.num_nodes} nodes x {launch.started} ranks, {launch.file['distributed_type']}"
        f", port {launch.port or DEFAULT_PORT}",
        same=True,
        nodes="error",
    )
    script = Path(launch.script.name or "")
    if script.is_file():
        digest = hashlib.sha256(script.read_bytes()).hexdigest()[:8]
        yield Fact("script", f"{script} (SHA-256 {digest})", same=True)


def examine_versions(case: Case) -> Iterator[Fact | Finding]:
    """Yield the versions of the libraries and of the system, and an error for a library that a run needs."""
    found = local_versions()
    yield Fact("versions", ", ".join(f"{name} {version}" for name, version in found.items() if version != MISSING))
    yield Fact("system", f"Linux {platform.release()}, {platform.machine()}")
    needed = ["torch", "trl", "transformers", "accelerate", *(["vllm"] if case.launch.script.node_mode else [])]
    needed += ["deepspeed"] if case.launch.args.use_deepspeed else []
    for name in needed:
        if found.get(name) == MISSING:
            yield Finding(
                "error",
                "versions",
                f"{name} is not installed on this node (got none, expected a version)",
                "run `pip install 'trl-multinode[gpu]'` in the environment of the run",
            )


def examine_tracker(case: Case) -> Iterator[Fact | Finding]:
    """Yield the trackers of the script, and findings for a missing package or key. Only rank 0 reports."""
    given = case.value("report_to", "none")
    names = [given] if isinstance(given, str) else list(given)
    names = [name for name in names if name not in ("none", "all")]
    yield Fact("tracker", ", ".join(names) or "none")
    severity = "error" if case.rank == 0 else "warning"
    for name in names:
        package, variable, host = TRACKERS.get(name, ("", "", ""))
        if package and importlib.util.find_spec(package) is None:
            yield Finding(
                severity,
                "tracker",
                f"`report_to` {name}: the package is not installed on this node",
                f"run `pip install {package}`, or change `report_to`",
            )
        elif variable and not _has_key(case, variable, host) and not _offline(case, name):
            cure = f"export {variable} on node 0" + (", or run `wandb login` there" if name == "wandb" else "")
            yield Finding(
                severity,
                "tracker",
                f"`report_to` {name}: no key on this node ({variable} is not set), so a run would stop and ask for it",
                cure,
            )


def _has_key(case: Case, variable: str, host: str) -> bool:
    if case.environ.get(variable):
        return True
    with suppress(OSError, netrc.NetrcParseError):
        return bool(host) and netrc.netrc(str(Path.home() / ".netrc")).authenticators(host) is not None
    return False


def _offline(case: Case, name: str) -> bool:
    modes = {case.environ.get(f"{name.upper()}_MODE", ""), case.environ.get("WANDB_DISABLED", "")}
    return bool(modes & {"offline", "disabled", "true"})
