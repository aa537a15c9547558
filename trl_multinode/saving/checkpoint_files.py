"""Files that say what a checkpoint is: whether all ranks finished it, its format, and the epoch it belongs to."""

import json
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..libraries import installed
from .rotation import step_of, sync

PREFIX = "checkpoint-"
STATE_FILE = "trainer_state.json"  # transformers writes it last
METADATA_FILE = "multinode.json"  # plain TRL writes none
OWN = Path("_multinode")  # beside the checkpoints; Hub pushes exclude `_*`
MARKERS = OWN / "saving"
# Users edit these (a learning rate, a chat template), so only their presence and their form are compared.
TEXTS = (".json", ".jinja", ".md", ".model", ".py", ".txt")
END_BYTES = 64 * 1024  # of both ends of a file: headers of safetensors, directories of `torch.save`
# this library may run from its sources
OWN_VERSION = installed("trl_multinode") or "(not installed)"
TAKE_ANOTHER = "Name another one, or use `resume_from_checkpoint=True`, which takes the newest that is finished."


def checkpoints_in(output_dir: Path) -> list[Path]:
    """Return the folders of checkpoints, in any state, by their steps."""
    found = [
        path for path in output_dir.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()
    ]
    return sorted(filter(Path.is_dir, found), key=step_of)


def newest_whole(output_dir: Path) -> Path | None:
    """Return the newest checkpoint in a folder that is finished and undamaged on this node, or `None`.

    `CheckpointLog.last_whole` asks all ranks.
    """
    for folder in reversed(checkpoints_in(output_dir)):
        if why_unusable(folder) is None:
            return folder
    return None


def why_unfinished(folder: Path) -> str | None:
    """Return the reason why a checkpoint is unfinished, as far as this node sees it; `None` if it is finished."""
    if any((folder.parent / MARKERS).glob(f"{folder.name}.rank*")):
        return "unfinished, because the run ended while it was written"
    try:
        epochs_behind(folder)
        was_in_flight(folder)
        if any(folder.glob("global_step*")) and not (folder / "latest").is_file():
            return "unfinished, DeepSpeed's file `latest` is missing on this node"
    except FileNotFoundError:
        return f"unfinished, {STATE_FILE} is missing on this node"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"unfinished, its {STATE_FILE} or {METADATA_FILE} is cut off"
    except OSError as error:
        return f"not readable on this node ({error})"
    return None


def why_damaged(folder: Path) -> str | None:
    """Return the first difference between a checkpoint's files and their record; `None` if there is none.

    The record has the size of each file and a digest of its two ends. Reading 140 GB of weights would take minutes,
    and a file that is empty, cut, or of another model differs there. A bit that changed in the middle is not seen.
    """
    try:
        for name, expected in read_metadata(folder).get("files", {}).items():
            if (reason := _difference(folder / name, expected)) is not None:
                return f"damaged on this node: {name} {reason}"
    except (OSError, ValueError, AttributeError) as error:
        return f"not readable on this node ({error})"
    return None


def why_unusable(folder: Path) -> str | None:
    """Return the reason why a checkpoint is unfinished or damaged, as far as this node sees it."""
    return why_unfinished(folder) or why_damaged(folder)


def _difference(path: Path, expected: list | None) -> str | None:
    try:
        found = _fingerprint(path)
    except FileNotFoundError:
        return "is missing"
    if expected is None:
        if path.suffix != ".json":
            return None
        try:
            json.loads(path.read_text())
        except ValueError:
            return "is no JSON"
        return None
    if found[0] != expected[0]:
        return f"has {found[0]} bytes, and {expected[0]} were written"
    if found != expected:
        return f"has other content than was written, in its first or last {END_BYTES} bytes"
    return None


def _fingerprint(path: Path) -> list:
    """Return the size of a file, in bytes, and a digest of its two ends.

    It opens the file before it asks for the size: NFS promises a fresh answer to another node only then.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = blake2b(file.read(END_BYTES), digest_size=8)
        file.seek(max(0, size - END_BYTES))
        digest.update(file.read(END_BYTES))
    return [size, digest.hexdigest()]


def check_finished(folder: Path, reads_files: bool) -> None:
    """Check that a checkpoint that the script names is finished and, with `reads_files`, that no file is damaged.

    Raises:
        `ConfigurationError`: if a rank did not finish it, if a file changed since, or if it is no checkpoint.
    """
    reason = why_unusable(folder) if reads_files else why_unfinished(folder)
    if reason is not None:
        raise no_resume(folder, f"{folder} cannot be resumed: it is {reason}.", TAKE_ANOTHER)


def no_resume(folder: Path, problem: str, cure: str) -> ConfigurationError:
    """Return the error for a checkpoint from which a run cannot go on."""
    return ConfigurationError(problem, setting="resume_from_checkpoint", got=folder, cure=cure)


def from_its_weights(folder: Path) -> str:
    """Return the way to begin anew from a checkpoint, as the end of a sentence."""
    return f"begin anew from its weights: `model={str(folder)!r}` and no `resume_from_checkpoint`."


def has_optimizer(folder: Path) -> bool:
    """Return whether a checkpoint has the state of the optimizer.

    Raises:
        `ConfigurationError`: if it has only one of optimizer and schedule; transformers would load neither, without a
            word.
    """
    if any(folder.glob("global_step*")):
        return True  # DeepSpeed requires its files, and has its schedule among them
    optimizer, schedule = any(folder.glob("optimizer*")), (folder / "scheduler.pt").is_file()
    if optimizer != schedule:
        present, missing = ("optimizer", "schedule") if optimizer else ("schedule", "optimizer")
        raise no_resume(
            folder,
            f"{folder} has the state of the {present}, but not of the {missing} (files `optimizer.pt` and "
            "`scheduler.pt`), so training would go on with a fresh optimizer.",
            f"Name another checkpoint, or {from_its_weights(folder)}",
        )
    return optimizer


def read_metadata(folder: Path) -> dict:
    """Read the metadata of a checkpoint; empty for one of plain TRL."""
    try:
        return json.loads((folder / METADATA_FILE).read_text())
    except FileNotFoundError:
        return {}


def was_in_flight(folder: Path) -> bool:
    """Return whether groups of several rounds were open when a checkpoint was written."""
    return read_metadata(folder).get("in_flight", False)


def write_metadata(folder: Path, rank: int, **facts: Any) -> None:
    """Write this library's version and facts of the launch; nodes that share the folder write the same."""
    _replace_metadata(folder, rank, {"trl_multinode": OWN_VERSION} | facts)


def record_files(folder: Path, rank: int) -> None:
    """Add the record of all files to the metadata of a checkpoint, once every rank has written its own.

    Rollouts are left out: without them a resume generates again.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith((METADATA_FILE, "rollouts_rank")):
            files[path.relative_to(folder).as_posix()] = (
                None if path.suffix in TEXTS else _fingerprint(path)
            )
    _replace_metadata(folder, rank, read_metadata(folder) | {"files": files})


def _replace_metadata(folder: Path, rank: int, content: dict) -> None:
    part = folder / f"{METADATA_FILE}.rank{rank}"
    part.write_text(json.dumps(content))
    sync(part)
    part.replace(folder / METADATA_FILE)
    sync(folder)


def epochs_behind(folder: Path) -> int:
    """Return the number of epochs completed before a checkpoint that is finished."""
    return int(read_state(folder)["epoch"])


def read_state(folder: Path) -> dict:
    """Read transformers' state of a checkpoint."""
    return json.loads((folder / STATE_FILE).read_text())
