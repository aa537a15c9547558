"""Files that say what a checkpoint is: whether all ranks finished it, its format, and the epoch it belongs to."""

import json
from importlib import metadata
from pathlib import Path

from ..errors import ConfigurationError
from ..libraries import upgrade_command

STATE_FILE = "trainer_state.json"  # transformers writes it last
METADATA_FILE = "multinode.json"
# Format of the files that this library adds. A checkpoint without `METADATA_FILE` has format 0, which differs in
# nothing else. A change that a version without it would misread needs a new number, in the checkpoints that have it.
FORMAT = 1
FORMAT_IN_FLIGHT = 2  # groups of several rounds are open
OWN = Path("_multinode")  # beside the checkpoints; Hub pushes exclude `_*`
MARKERS = OWN / "saving"


def why_unfinished(folder: Path) -> str | None:
    """Return the reason why a checkpoint is unfinished, as far as this node sees it; `None` if it is finished."""
    if any((folder.parent / MARKERS).glob(f"{folder.name}.rank*")):
        return "unfinished, because the run ended while it was written"
    try:
        json.loads((folder / STATE_FILE).read_text())
        if any(folder.glob("global_step*")) and not (folder / "latest").is_file():
            return "unfinished, DeepSpeed's file `latest` is missing on this node"
    except FileNotFoundError:
        return f"unfinished, {STATE_FILE} is missing on this node"
    except ValueError:
        return f"unfinished, its {STATE_FILE} is cut off"
    except OSError as error:
        return f"not readable on this node ({error})"
    return None


def check_finished(folder: Path) -> None:
    """Check that a checkpoint that the script names is finished.

    Raises:
        `ConfigurationError`: if a rank did not finish it, or if it is no checkpoint.
    """
    if (reason := why_unfinished(folder)) is not None:
        raise ConfigurationError(
            f"{folder} cannot be resumed: it is {reason}. Name another one, or use `resume_from_checkpoint=True`, "
            "which takes the newest that is finished."
        )


def check_format(folder: Path) -> None:
    """Check that this version can read what a version of this library added to a checkpoint.

    Raises:
        `ConfigurationError`: if a newer version wrote it, or if the metadata cannot be read.
    """
    try:
        found = read_metadata(folder)
        number = int(found.get("format", 0))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{folder}/{METADATA_FILE} cannot be read ({error}), so the checkpoint may be damaged. Name another one: "
            "`train(resume_from_checkpoint=PATH)`."
        ) from error
    if number > FORMAT_IN_FLIGHT:
        writer = found.get("trl_multinode")
        raise ConfigurationError(
            f"{folder} has the checkpoint format {number} of trl_multinode {writer}; the installed version "
            f"{_version()} knows formats up to {FORMAT_IN_FLIGHT}. Upgrade it ({upgrade_command()}), or "
            f"begin anew from its weights: `model={str(folder)!r}` and no `resume_from_checkpoint`."
        )


def read_metadata(folder: Path) -> dict:
    """Read the metadata of a checkpoint; empty for one of plain TRL, or of a version before format 1."""
    try:
        return json.loads((folder / METADATA_FILE).read_text())
    except FileNotFoundError:
        return {}


def was_in_flight(folder: Path) -> bool:
    """Return whether groups of several rounds were open when a checkpoint was written."""
    return read_metadata(folder).get("format") == FORMAT_IN_FLIGHT


def write_metadata(folder: Path, rank: int, ranks: int, in_flight: bool) -> None:
    """Write format, version and number of ranks of this launch; nodes that share the folder write the same."""
    part = folder / f"{METADATA_FILE}.rank{rank}"
    part.write_text(
        json.dumps({"format": FORMAT_IN_FLIGHT if in_flight else FORMAT, "trl_multinode": _version(), "ranks": ranks})
    )
    part.replace(folder / METADATA_FILE)


def _version() -> str:
    try:
        return metadata.version("trl-multinode")
    except metadata.PackageNotFoundError:  # run from its sources, without an installation
        return "(not installed)"


def epochs_behind(checkpoint: Path) -> int:
    """Return the number of epochs completed before a checkpoint.

    Raises:
        `ConfigurationError`: if the folder is not a checkpoint, or is an unfinished one.
    """
    try:
        return int(json.loads((checkpoint / STATE_FILE).read_text())["epoch"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{checkpoint} is no finished checkpoint: its {STATE_FILE} cannot be read ({error}). Name another one, or "
            "use `resume_from_checkpoint=True`, which takes the newest that is finished."
        ) from error
