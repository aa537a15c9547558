"""TRL's GRPO on many nodes: every node trains on most of its GPUs and generates with vLLM on the rest.

```python
from trl_multinode import GRPOConfig, GRPOTrainer   # instead of: from trl import GRPOConfig, GRPOTrainer
```

TRL's other trainers that generate with vLLM keep their names here too (docs/use/trainers.md). Every other public name
of `trl` is TRL's own, so a script changes only `trl` to `trl_multinode` in `from trl import`.
"""

import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

from .former_arguments import nearest
from .libraries import explanation
from .run.watch.early import start as _start_watch

if TYPE_CHECKING:
    from .config import MultiNodeGRPOConfig
    from .config import MultiNodeGRPOConfig as GRPOConfig
    from .sessions.harness import Harness, Session
    from .trainer import MultiNodeGRPOTrainer
    from .trainer import MultiNodeGRPOTrainer as GRPOTrainer
    from .trainers import (
        MultiNodeDistillationConfig,
        MultiNodeDistillationTrainer,
        MultiNodeRLOOConfig,
        MultiNodeRLOOTrainer,
    )
    from .trainers import MultiNodeDistillationConfig as DistillationConfig
    from .trainers import MultiNodeDistillationTrainer as DistillationTrainer
    from .trainers import MultiNodeRLOOConfig as RLOOConfig
    from .trainers import MultiNodeRLOOTrainer as RLOOTrainer

    __all__ = [
        "GRPOConfig", "GRPOTrainer", "MultiNodeGRPOConfig", "MultiNodeGRPOTrainer", "Harness", "Session",
        "RLOOConfig", "RLOOTrainer", "MultiNodeRLOOConfig", "MultiNodeRLOOTrainer",
        "DistillationConfig", "DistillationTrainer", "MultiNodeDistillationConfig", "MultiNodeDistillationTrainer",
    ]  # fmt: skip

__version__ = "0.1.0"

_start_watch()  # of a rank of a launch; it loads nothing

# Classes load on first use, because vLLM's processes import this package for its plugin and must not load TRL.
_HOMES = {"GRPOConfig": "config", "GRPOTrainer": "trainer"} | {
    f"{trainer}{kind}": home
    for trainer, home in {
        "RLOO": "trainers",
        "Distillation": "trainers",
        "SDFT": "experimental.sdft",
        "SDPO": "experimental.sdpo",
        "GOLD": "experimental.gold",
        "IWOPD": "experimental.iw_opd",
        "GMPO": "experimental.gmpo",
        "ServerDistillation": "experimental.server_distillation",
    }.items()
    for kind in ("Config", "Trainer")
}

_OF_AGENTS = ("Harness", "Session")  # classes without TRL's counterpart

# TRL's experimental trainers that start or drive vLLM themselves -> their folder; docs/use/trainers.md has the reasons
_OWN_VLLM = {
    "OnlineDPO": "online_dpo",
    "AsyncGRPO": "async_grpo",
    "AsyncDistillation": "async_distillation",
}


def __getattr__(name: str) -> Any:
    """
    Return a class of node mode by TRL's name or its `MultiNode...` name (those of TRL's experimental trainers
    included), or another public name of TRL. `__all__` is TRL's.

    Raises:
        `ImportError`: if the installed TRL or transformers lacks a name that the class needs; the message names it.
        `AttributeError`, or `ImportError` for `from trl_multinode import name`: if neither package has the name.
    """
    own = name.removeprefix("MultiNode")
    if own in _HOMES:
        return _load(f".{_HOMES[own]}", f"MultiNode{own}", name)
    if name in _OF_AGENTS:
        return _load(".sessions.harness", name, name)
    if (name.startswith("_") and name != "__all__") or find_spec(f"{__name__}.{name}") is not None:
        # a tool's probe, or a module of ours that is not imported yet: neither may load TRL
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    exported = _load("trl", "__all__", name)
    if name == "__all__":
        return exported
    if name not in exported:
        _raise_missing(name, exported)
    if name.endswith("Trainer"):
        _report_without_node_mode(name)
    return _load("trl", name, name)


def _load(module: str, name: str, wanted: str) -> Any:
    """Return a name of a module; `wanted` is the name for which a caller asked."""
    try:
        return getattr(import_module(module, __name__), name)
    # TRL raises `RuntimeError` if it cannot import itself
    except (
        ImportError,
        RuntimeError,
    ) as error:
        if (reason := explanation(error, wanted)) is None:
            raise
        raise ImportError(reason) from error


def _raise_missing(name: str, exported: list[str]) -> NoReturn:
    similar = nearest(name, [*_HOMES, *exported])
    text = f"neither {__name__} nor trl has a name {name!r}{similar}"
    if folder := _OWN_VLLM.get(name.removesuffix("Trainer").removesuffix("Config")):
        text = f"{name} drives vLLM itself and has no node mode: docs/use/trainers.md has the reason. Use TRL's own: "
        text += f"`from trl.experimental.{folder} import {name}`"
    # in `from trl_multinode import name` Python would put a message of its own in the place of an `AttributeError`'s
    if sys._getframe(2).f_code.co_name == "_handle_fromlist":
        raise ImportError(text, name=__name__)
    raise AttributeError(text)


@cache
def _report_without_node_mode(name: str) -> None:
    """Print once, on the main process, that a trainer of TRL could use vLLM but has no node mode."""
    from dataclasses import fields, is_dataclass

    config = getattr(import_module("trl"), name.removesuffix("Trainer") + "Config", None)
    names = [field.name for field in fields(config)] if is_dataclass(config) else []
    if any("vllm" in field for field in names) and os.environ.get("RANK", "0") == "0":
        from .run.reporter import report

        report(
            f"{name} is TRL's own: it has no node mode, and generates as TRL does. "
            "docs/use/trainers.md lists the trainers with node mode."
        )


def __dir__() -> list[str]:
    own = {*_HOMES, *(f"MultiNode{name}" for name in _HOMES), *_OF_AGENTS}
    return sorted({*own, *__getattr__("__all__")})
