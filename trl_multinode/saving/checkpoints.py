"""Exact resume: the state that TRL's checkpoints lack, and the search for the newest finished checkpoint.

A resumed run continues as if it had not stopped: same data order, same completions (with `rollout_seed`), same losses.
transformers restores weights, optimizer and random states; this module adds the position inside the generation block,
the block itself, and the epoch's permutation.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..errors import ConfigurationError
from ..run.reporter import warn

STATE_FILE = "trainer_state.json"  # transformers writes it last
PREFIX = "checkpoint-"
ZERO_RANK = re.compile(r"zero_pp_rank_(\d+)_")  # part of DeepSpeed's file names, after "bf16_" or nothing


def fast_forward(sampler: Any, epochs: int) -> Any:
    """Advance the generator of TRL's sampler by `epochs` permutations, and return the sampler.

    TRL draws one permutation per epoch from one generator, and a resumed run seeds that generator again. Without this
    call a run that resumes in its second epoch would repeat the order of the first.

    Args:
        sampler (`RepeatSampler`):
            Sampler that TRL has just built.
        epochs (`int`):
            Epochs that the run completed before the checkpoint.
    """
    if getattr(sampler, "shuffle", False):
        for _ in range(epochs):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
    return sampler


def epochs_behind(checkpoint: Path) -> int:
    """Return the number of epochs completed before a checkpoint.

    Raises:
        `ConfigurationError`: if the folder is not a checkpoint, or is an unfinished one.
    """
    try:
        return int(json.loads((checkpoint / STATE_FILE).read_text())["epoch"])
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{checkpoint} is no finished checkpoint: its {STATE_FILE} cannot be read ({error}). Name another one, or "
            "use `resume_from_checkpoint=True`, which takes the newest that is finished."
        ) from error


def micro_steps_done(global_step: int, steps_in_epoch: int | None, accumulation: int) -> int:
    """Compute TRL's `_step` (number of `training_step` calls) after `global_step` optimizer steps.

    Args:
        global_step (`int`):
            Optimizer steps so far.
        steps_in_epoch (`int`, *optional*):
            Batches in one pass over the dataloader; `None` for a stream without a length.
        accumulation (`int`):
            `gradient_accumulation_steps`; the last optimizer step of an epoch may have fewer micro-steps.
    """
    if steps_in_epoch is None:
        return global_step * accumulation
    updates_in_epoch = max(1, -(-steps_in_epoch // accumulation))
    epochs, updates = divmod(global_step, updates_in_epoch)
    return epochs * steps_in_epoch + updates * accumulation


# ---- finished checkpoints -------------------------------------------------------------------------------------------


class CheckpointLog:
    """Record of which checkpoint folders all ranks finished writing.

    Each rank creates a marker file before it writes a checkpoint, and removes it once every rank has finished. A
    folder is unfinished if a marker remains, or if the last file that transformers or DeepSpeed writes is missing.

    Args:
        output_dir (`Path`):
            Folder of the checkpoints; may differ between nodes.
        accelerator (`Accelerator`):
            Accelerator of the calling rank.
    """

    def __init__(self, output_dir: Path, accelerator: Any):
        self._output_dir = output_dir
        self._accelerator = accelerator
        self._markers = output_dir / "_multinode" / "saving"  # Hub pushes exclude `_*`

    @contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """Create the checkpoint folder of `step`, and mark it as finished on exit.

        The exit is a collective of all training ranks. If a rank fails inside, the folder stays marked as unfinished.
        """
        marker = self._markers / f"{PREFIX}{step}.rank{self._accelerator.process_index}"
        self._markers.mkdir(parents=True, exist_ok=True)
        marker.touch()
        folder = self._output_dir / f"{PREFIX}{step}"
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        if self._accelerator.is_local_main_process:
            self._write_latest(folder)
        self._accelerator.wait_for_everyone()
        for marker in self._markers.glob(f"{PREFIX}{step}.rank*"):  # also markers of an earlier run with more ranks
            marker.unlink(missing_ok=True)

    @staticmethod
    def _write_latest(folder: Path) -> None:
        """Write DeepSpeed's file `latest` if it is missing.

        DeepSpeed writes it on node 0 only, and without it a node with a folder of its own could not resume.
        """
        states = [path.name for path in folder.glob("global_step*")]
        if states and not (folder / "latest").exists():
            (folder / "latest").write_text(states[0])

    def all_have(self, mine: bool) -> bool:
        """Return whether `mine` is true on every rank. A collective of all training ranks."""
        vote = torch.tensor([int(mine)], device=self._accelerator.device)
        return bool(self._accelerator.gather(vote).all())

    def last_whole(self) -> Path | None:
        """Return the newest finished checkpoint that every rank sees, or `None` if no rank sees a finished one.

        A collective of all training ranks.

        Raises:
            `ConfigurationError`: on every rank, if some ranks see finished checkpoints but none is common to all.
        """
        steps = self._whole_steps()
        padded = self._accelerator.pad_across_processes(
            torch.tensor([-1, *steps], device=self._accelerator.device), pad_index=-1
        )
        seen = self._accelerator.gather(padded).tolist()
        common = [step for step in steps if seen.count(step) == self._accelerator.num_processes]
        if max(seen) >= 0 and not common:
            raise ConfigurationError(
                f"No checkpoint in {self._output_dir} is finished for all ranks: rank "
                f"{self._accelerator.process_index} sees those of the steps {steps}, others see other ones. Use an "
                "`output_dir` that all nodes share, or `save_on_each_node=True`, or name one: "
                "`train(resume_from_checkpoint=PATH)`."
            )
        return self._output_dir / f"{PREFIX}{max(common)}" if common else None

    def _whole_steps(self) -> list[int]:
        whole = []
        for folder in sorted(self._output_dir.glob(f"{PREFIX}*")):
            if not folder.name.removeprefix(PREFIX).isdigit():
                continue
            if (reason := self._why_unfinished(folder)) is None:
                whole.append(int(folder.name.removeprefix(PREFIX)))
            elif self._accelerator.is_local_main_process:
                warn(f"{folder} is skipped: {reason}. It can be deleted.")
        return sorted(whole)

    def _why_unfinished(self, folder: Path) -> str | None:
        if any(self._markers.glob(f"{folder.name}.rank*")):
            return "unfinished, because the run ended while it was written"
        try:
            json.loads((folder / STATE_FILE).read_text())
        except FileNotFoundError:
            return f"unfinished, {STATE_FILE} is missing on this node"
        except ValueError:
            return f"unfinished, its {STATE_FILE} is cut off"
        if any(folder.glob("global_step*")) and not (folder / "latest").is_file():
            return "unfinished, DeepSpeed's file `latest` is missing on this node"
        return None


def check_zero_ranks(folder: Path, accelerator: Any) -> None:
    """Check that a DeepSpeed checkpoint was written by as many ranks as this launch has. A collective.

    ZeRO states can only be loaded with the number of ranks that saved them; DeepSpeed's own error comes late and
    names no cure.

    Args:
        folder (`Path`):
            Folder of the checkpoint; may differ between nodes, and then each node needs the files of its own ranks.
        accelerator (`Accelerator`):
            Accelerator of the calling rank.

    Raises:
        `ConfigurationError`: on every rank, if another number of ranks wrote the checkpoint, or if the file of a rank
            is missing on its node.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    files = folder.glob("global_step*/*_optim_states.pt")
    seen = {int(found[1]) for path in files if (found := ZERO_RANK.search(path.name))}
    at_least = max(*(number + 1 for number in seen), _world_of(folder, rank)) if seen else 0
    mine = torch.tensor([[at_least, int(rank in seen)]], device=accelerator.device)
    found = accelerator.gather(mine)
    saved_by = int(found[:, 0].max())
    if saved_by not in (0, world):  # 0: not a DeepSpeed checkpoint, or one without optimizer states
        raise ConfigurationError(
            f"{folder} was written by {saved_by} ranks, this launch has {world}: DeepSpeed's ZeRO states belong to "
            f"their number of ranks. Launch {saved_by} ranks again, or begin anew from its weights: "
            f"`model={str(folder)!r}` and no `resume_from_checkpoint`."
        )
    lacking = [number for number, (_, has) in enumerate(found.tolist()) if not has]
    if saved_by and lacking:
        raise ConfigurationError(
            f"{folder} has no optimizer state for the ranks {lacking} on their nodes. Nodes that do not share "
            "`output_dir` must keep their `--machine_rank` of the first launch; or copy the `global_step*` folders of "
            "all nodes to every node."
        )


def _world_of(folder: Path, rank: int) -> int:
    """Return the number of ranks of the launch that wrote this rank's rollouts file, or 0 without that file.

    A node whose folder is not shared has only the files of its own ranks, so counting them would not give this number.
    """
    if not (path := rollouts_file(folder, rank)).exists():
        return 0
    with safe_open(path, framework="pt") as file:
        return json.loads((file.metadata() or {})["notes"]).get("layout", [0])[0]


# ---- saved state of a rank ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedRollouts:
    """Generation state of one rank, as a checkpoint stores it."""

    tensors: dict[str, torch.Tensor]  # names with a slash: "block0/prompt_ids", "ahead/tokens"
    notes: dict  # all other values, as plain JSON


def rollouts_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's rollouts in a checkpoint."""
    return folder / f"rollouts_rank{rank}.safetensors"


def save_rollouts(folder: Path, rank: int, saved: SavedRollouts) -> None:
    """Save a rank's rollouts; the rename from `.part` ensures that a killed run leaves no partial `.safetensors`."""
    path = rollouts_file(folder, rank)
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in saved.tensors.items()}  # slices share memory
    save_file(tensors, path.with_suffix(".part"), metadata={"notes": json.dumps(saved.notes)})
    path.with_suffix(".part").replace(path)


def load_rollouts(folder: Path, rank: int, device: torch.device) -> SavedRollouts | None:
    """Load a rank's rollouts; `None` if the checkpoint has no such file (from plain TRL, or from fewer ranks)."""
    path = rollouts_file(folder, rank)
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:  # no `device` here: safetensors rejects "cpu:0"
        notes = json.loads((file.metadata() or {})["notes"])
        return SavedRollouts({name: file.get_tensor(name).to(device) for name in file.keys()}, notes)


def pack_block(slices: list[dict]) -> SavedRollouts:
    """Convert TRL's `_buffered_inputs`, a list of dicts of tensors, lists and `None`, into [`SavedRollouts`]."""
    tensors = {
        f"block{index}/{name}": value
        for index, part in enumerate(slices)
        for name, value in part.items()
        if isinstance(value, torch.Tensor)
    }
    lists = [{name: value for name, value in part.items() if isinstance(value, list)} for part in slices]
    return SavedRollouts(tensors, {"block": lists})


def unpack_block(saved: SavedRollouts) -> list[dict]:
    """Invert [`pack_block`]; `None` entries stay absent, because TRL reads them with `get`."""
    slices = [dict(lists) for lists in saved.notes["block"]]
    for name, tensor in saved.tensors.items():
        group, _, key = name.partition("/")
        if group.startswith("block"):
            slices[int(group.removeprefix("block"))][key] = tensor
    return slices
