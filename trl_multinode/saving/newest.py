"""The newest finished checkpoint, as far as one node sees it; `CheckpointLog.last_whole` asks all ranks."""

from pathlib import Path

from .checkpoint_files import why_unusable
from .rotation import step_of


def newest_whole(output_dir: Path) -> Path | None:
    """Return the newest checkpoint in a folder that is finished and undamaged on this node, or `None`."""
    folders = [path for path in output_dir.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return next((path for path in sorted(folders, key=step_of, reverse=True) if why_unusable(path) is None), None)
