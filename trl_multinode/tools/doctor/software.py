"""Versions of this node's libraries, and the tracker to which rank 0 reports."""

import hashlib
import importlib.util
import netrc
import platform
from contextlib import suppress
from pathlib import Path

from ...run.versions import MISSING, local_versions
from ..check.rules_nodes import DEFAULT_PORT
from ..text import PACKAGE, joined
from .case import Case
from .facts import Fact, Finding, Results

# Package of a tracker -> variable of its key, and host under which `.netrc` may keep it
KEYS = {
    "wandb": ("WANDB_API_KEY", "api.wandb.ai"),
    "comet_ml": ("COMET_API_KEY", ""),
    "neptune": ("NEPTUNE_API_TOKEN", ""),
    "swanlab": ("SWANLAB_API_KEY", "api.swanlab.cn"),
}
PACKAGES = (*KEYS, "trackio", "mlflow", "clearml")


def examine_launch(case: Case) -> Results:
    """Yield what this node would start. The same words must mean the same launch on all nodes."""
    launch = case.launch
    yield Fact(
        "launch",
        f"{launch.num_nodes} nodes x {joined(launch.table) or launch.started} ranks, {launch.file['distributed_type']}"
        f", port {launch.port or DEFAULT_PORT}",
        same=True,
        nodes="error",
    )
    script = Path(launch.script.name or "")
    if script.is_file():
        digest = hashlib.sha256(script.read_bytes()).hexdigest()[:8]
        yield Fact("script", f"{script} (SHA-256 {digest})", same=True)


def examine_versions(case: Case) -> Results:
    """Yield the versions of the libraries and of the system, and an error for a library that a run needs."""
    found = local_versions()
    yield Fact(
        "versions",
        ", ".join(f"{name} {version}" for name, version in found.items() if version != MISSING),
    )
    yield Fact("system", f"Linux {platform.release()}, {platform.machine()}")
    needed = [
        "torch",
        "trl",
        "transformers",
        "accelerate",
        *(["vllm"] if case.launch.script.node_mode else []),
    ]
    needed += ["deepspeed"] if case.launch.args.use_deepspeed else []
    for name in needed:
        if found.get(name) == MISSING:
            yield Finding(
                "error",
                "versions",
                f"{name} is not installed on this node (got none, expected a version)",
                f"run `pip install '{PACKAGE}'` in the environment of the run",
            )


def examine_tracker(case: Case) -> Results:
    """Yield the trackers of the script, and findings for a missing package or key. Only rank 0 reports."""
    given = case.value("report_to", "none")
    names = [
        name
        for name in ([given] if isinstance(given, str) else given)
        if name not in ("none", "all")
    ]
    yield Fact("tracker", ", ".join(names) or "none")
    severity = "error" if case.rank == 0 else "warning"
    for name in names:
        variable, host = KEYS.get(name, ("", ""))
        if name in PACKAGES and importlib.util.find_spec(name) is None:
            yield Finding(
                severity,
                "tracker",
                f"`report_to` {name}: the package is not installed on this node",
                f"run `pip install {name}`, or change `report_to`",
            )
        elif variable and not _has_key(case, name, variable, host):
            yield Finding(
                severity,
                "tracker",
                f"`report_to` {name}: no key on this node ({variable} is not set), so a run would stop and ask for it",
                f"export {variable} on node 0"
                + (", or run `wandb login` there" if name == "wandb" else ""),
            )


def _has_key(case: Case, name: str, variable: str, host: str) -> bool:
    """Return whether a tracker has its key, or needs none because it is offline."""
    modes = {case.environ.get(f"{name.upper()}_MODE"), case.environ.get("WANDB_DISABLED")}
    if case.environ.get(variable) or modes & {"offline", "disabled", "true"}:
        return True
    with suppress(OSError, netrc.NetrcParseError):
        return (
            bool(host) and netrc.netrc(str(Path.home() / ".netrc")).authenticators(host) is not None
        )
    return False
