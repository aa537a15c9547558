"""Files that a run left in its nodes' temporary folders and shared memory."""

from collections.abc import Iterable
from pathlib import Path

# torchrun makes a folder for the ranks' logs in every launch, and torch one for compiled code, which later runs use
OF_TORCH = ("torchelastic_", "torchinductor_")


def left_in(places: Iterable[Path]) -> list[str]:
    names = [path.name for place in places for path in place.iterdir()]
    return sorted(name for name in names if not name.startswith(OF_TORCH))
