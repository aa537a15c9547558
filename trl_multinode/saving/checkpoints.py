"""Exact resume: what TRL's checkpoints lack, and which checkpoints are whole.

A resumed run continues as if it had not stopped: same data order, same completions (with `rollout_seed`), same losses.
transformers restores weights, optimizer and random states; this module adds the position inside the generation block,
the block itself, and the epoch's permutation.
"""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..errors import ConfigurationError

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"  # transformers writes it last
PREFIX = "checkpoint-"
ZERO_RANK = re.compile(r"zero_pp_rank_(\d+)_")  # in DeepSpeed's file names, after "bf16_" or nothing


def fast_forward(sampler, epochs: int):
    """TRL's sampler, `epochs` permutations later.

    TRL draws one permutation per epoch from one generator, and a resumed run starts that generator anew: its second
    epoch would see the first one's order again.

    Args:
        sampler (`RepeatSampler`):
            Fresh from TRL.
        epochs (`int`):
            Whole epochs that the resumed run has behind it.
    """
    if getattr(sampler, "shuffle", False):
        for _ in range(epochs):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
    return sampler


def epochs_behind(checkpoint: Path) -> int:
    """Whole epochs that a checkpoint has behind it.

    Raises:
        `ConfigurationError`: if this is no checkpoint, or an unfinished one.
    """
    try:
        return int(json.loads((checkpoint / STATE_FILE).read_text())["epoch"])
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{checkpoint} is no finished checkpoint: its {STATE_FILE} cannot be read ({error}). Name another one, or "
            "use `resume_from_checkpoint=True`, which takes the newest that is finished."
        ) from error


def micro_steps_done(global_step: int, steps_in_epoch: int | None, accumulation: int) -> int:
    """TRL's `_step` (calls of `training_step`) after `global_step` optimizer steps.

    Args:
        global_step (`int`):
            Optimizer steps so far.
        steps_in_epoch (`int`, *optional*):
            Batches of one pass over the dataloader; `None` for a stream without a length.
        accumulation (`int`):
            `gradient_accumulation_steps`; the last optimizer step of an epoch may have fewer.
    """
    if steps_in_epoch is None:
        return global_step * accumulation
    updates_in_epoch = max(1, -(-steps_in_epoch // accumulation))
    epochs, updates = divmod(global_step, updates_in_epoch)
    return epochs * steps_in_epoch + updates * accumulation


# ---- which checkpoints are whole ------------------------------------------------------------------------------------


class CheckpointLog:
    """Knows which checkpoint folders were written to their end, by all ranks.

    While a checkpoint is written a marker beside it says so; it goes when every rank is through. A folder whose marker
    is still there, or that lacks transformers' own last file, is unfinished.

    Args:
        output_dir (`Path`):
            Where the checkpoints are; may differ between nodes.
        accelerator (`Accelerator`):
            Of the calling rank.
    """

    def __init__(self, output_dir: Path, accelerator):
        self._output_dir = output_dir
        self._accelerator = accelerator
        self._markers = output_dir / "_multinode" / "saving"  # outside of what is pushed to the Hub

    @contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """The folder of the checkpoint at `step`. A collective of all training ranks at its end.

        It stays marked as unfinished if any rank fails inside.
        """
        marker = self._markers / f"{PREFIX}{step}.rank{self._accelerator.process_index}"
        self._markers.mkdir(parents=True, exist_ok=True)
        marker.touch()
        folder = self._output_dir / f"{PREFIX}{step}"
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        if self._accelerator.is_local_main_process:
            self._say_latest(folder)
        self._accelerator.wait_for_everyone()
        for marker in self._markers.glob(f"{PREFIX}{step}.rank*"):  # also those of an earlier run with more ranks
            marker.unlink(missing_ok=True)

    @staticmethod
    def _say_latest(folder: Path) -> None:
        """DeepSpeed writes its file `latest` on node 0 only; a node with a folder of its own could not resume."""
        states = [path.name for path in folder.glob("global_step*")]
        if states and not (folder / "latest").exists():
            (folder / "latest").write_text(states[0])

    def all_have(self, mine: bool) -> bool:
        """Whether every rank has something. A collective of all training ranks."""
        vote = torch.tensor([int(mine)], device=self._accelerator.device)
        return bool(self._accelerator.gather(vote).all())

    def last_whole(self) -> Path | None:
        """The newest checkpoint that is finished and that every rank sees. A collective of all training ranks.

        Raises:
            `ConfigurationError`: on every rank, if some see finished checkpoints and no one is seen by all.
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
                logger.warning("%s is skipped: %s. It can be deleted.", folder, reason)
        return sorted(whole)

    def _why_unfinished(self, folder: Path) -> str | None:
        if any(self._markers.glob(f"{folder.name}.rank*")):
            return "unfinished, the run ended while it was written"
        try:
            json.loads((folder / STATE_FILE).read_text())
        except FileNotFoundError:
            return f"unfinished, {STATE_FILE} is missing on this node"
        except ValueError:
            return f"unfinished, its {STATE_FILE} is cut off"
        if any(folder.glob("global_step*")) and not (folder / "latest").is_file():
            return "unfinished, DeepSpeed's file `latest` is missing on this node"
        return None


def check_zero_ranks(folder: Path, accelerator) -> None:
    """DeepSpeed's ZeRO states belong to their number of ranks, and it says so late and without a cure. A collective.

    Args:
        folder (`Path`):
            The checkpoint; may differ between nodes, then each must have the files of its own ranks.
        accelerator (`Accelerator`):
            Of the calling rank.

    Raises:
        `ConfigurationError`: on every rank, for a checkpoint of another number of ranks, or if a rank's file is not
            there.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    files = folder.glob("global_step*/*_optim_states.pt")
    seen = {int(found[1]) for path in files if (found := ZERO_RANK.search(path.name))}
    at_least = max(*(number + 1 for number in seen), _world_of(folder, rank)) if seen else 0
    mine = torch.tensor([[at_least, int(rank in seen)]], device=accelerator.device)
    found = accelerator.gather(mine)
    saved_by = int(found[:, 0].max())
    if saved_by not in (0, world):  # 0: not DeepSpeed's, or without optimizer
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
            "all nodes together on each."
        )


def _world_of(folder: Path, rank: int) -> int:
    """Ranks of the launch that wrote this rank's rollouts; 0 if it did not. A node alone sees only its own ranks."""
    if not (path := rollouts_file(folder, rank)).exists():
        return 0
    with safe_open(path, framework="pt") as file:
        return json.loads((file.metadata() or {})["notes"]).get("layout", [0])[0]


# ---- what a rank saves ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedRollouts:
    """Generation state of one rank, as it lies in a checkpoint."""

    tensors: dict[str, torch.Tensor]  # names with a slash: "block0/prompt_ids", "ahead/tokens"
    notes: dict  # what is not a tensor; plain JSON


def rollouts_file(folder: Path, rank: int) -> Path:
    return folder / f"rollouts_rank{rank}.safetensors"


def save_rollouts(folder: Path, rank: int, saved: SavedRollouts) -> None:
    """Written whole or not at all, so that a killed run leaves no half file under the final name."""
    path = rollouts_file(folder, rank)
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in saved.tensors.items()}  # slices share memory
    save_file(tensors, path.with_suffix(".part"), metadata={"notes": json.dumps(saved.notes)})
    path.with_suffix(".part").replace(path)


def load_rollouts(folder: Path, rank: int, device: torch.device) -> SavedRollouts | None:
    """`None` if this checkpoint has no such file (one of plain TRL, or of fewer ranks)."""
    path = rollouts_file(folder, rank)
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:  # not onto `device` at once: safetensors does not know "cpu:0"
        notes = json.loads((file.metadata() or {})["notes"])
        return SavedRollouts({name: file.get_tensor(name).to(device) for name in file.keys()}, notes)


def pack_block(slices: list[dict]) -> SavedRollouts:
    """TRL's `_buffered_inputs`: a list of dicts of tensors, lists and `None`."""
    tensors = {
        f"block{index}/{name}": value
        for index, part in enumerate(slices)
        for name, value in part.items()
        if isinstance(value, torch.Tensor)
    }
    lists = [{name: value for name, value in part.items() if isinstance(value, list)} for part in slices]
    return SavedRollouts(tensors, {"block": lists})


def unpack_block(saved: SavedRollouts) -> list[dict]:
    """The inverse of [`pack_block`]; `None` entries are left out, as TRL reads them with `get`."""
    slices = [dict(lists) for lists in saved.notes["block"]]
    for name, tensor in saved.tensors.items():
        room, _, key = name.partition("/")
        if room.startswith("block"):
            slices[int(room.removeprefix("block"))][key] = tensor
    return slices
