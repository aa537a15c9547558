"""TRL's GRPO on many nodes: every node trains on most of its GPUs and generates with vLLM on the rest.

```python
from trl_multinode import GRPOConfig, GRPOTrainer   # instead of: from trl import GRPOConfig, GRPOTrainer
```

TRL's other trainers that generate with vLLM keep their names here too; see docs/trainers.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .libraries import explanation

if TYPE_CHECKING:
    from .config import MultiNodeGRPOConfig
    from .config import MultiNodeGRPOConfig as GRPOConfig
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

__version__ = "0.1.0"

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
    }.items()
    for kind in ("Config", "Trainer")
}
__all__ = [
    "GRPOConfig", "GRPOTrainer", "MultiNodeGRPOConfig", "MultiNodeGRPOTrainer",
    "RLOOConfig", "RLOOTrainer", "MultiNodeRLOOConfig", "MultiNodeRLOOTrainer",
    "DistillationConfig", "DistillationTrainer", "MultiNodeDistillationConfig", "MultiNodeDistillationTrainer",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """
    Return a class by TRL's name or its `MultiNode...` name, those of TRL's experimental trainers included.

    Raises:
        `ImportError`: if the installed TRL or transformers lacks a name that the class needs; the message names it.
    """
    own = name.removeprefix("MultiNode")
    if own not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(f".{_HOMES[own]}", __name__)
    except (ImportError, RuntimeError) as error:  # TRL raises `RuntimeError` if it cannot import itself
        if (reason := explanation(error, name)) is None:
            raise
        raise ImportError(reason) from error
    return getattr(home, f"MultiNode{own}")


def __dir__() -> list[str]:
    return sorted(_HOMES) + [f"MultiNode{name}" for name in sorted(_HOMES)]
