"""TRL's GRPO on many nodes: every node trains on most of its GPUs and generates with vLLM on the rest.

```python
from trl_multinode import GRPOConfig, GRPOTrainer   # instead of: from trl import GRPOConfig, GRPOTrainer
```
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import MultiNodeGRPOConfig
    from .config import MultiNodeGRPOConfig as GRPOConfig
    from .trainer import MultiNodeGRPOTrainer
    from .trainer import MultiNodeGRPOTrainer as GRPOTrainer

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "GRPOTrainer", "MultiNodeGRPOConfig", "MultiNodeGRPOTrainer"]

# Loaded on first use: vLLM's processes import this package for its plugin and must not load TRL.
_HOMES = {
    "GRPOConfig": ("config", "MultiNodeGRPOConfig"),
    "GRPOTrainer": ("trainer", "MultiNodeGRPOTrainer"),
    "MultiNodeGRPOConfig": ("config", "MultiNodeGRPOConfig"),
    "MultiNodeGRPOTrainer": ("trainer", "MultiNodeGRPOTrainer"),
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(f".{module}", __name__), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
