"""The newest finished checkpoint, as far as one node sees it; `CheckpointLog.last_whole` asks all ranks."""

from pathlib import Path

from .checkpoint_files import why_unfinished
from .rotation import step_of


def newest_whole(output_dir: Path) -> Path | None:
    """Return the newest checkpoint in a folder that this node's files show as finished, or `None`."""
    folders = [path for path in output_dir.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return next((path for path in sorted(folders, key=step_of, reverse=True) if why_unfinished(path) is None), None)
