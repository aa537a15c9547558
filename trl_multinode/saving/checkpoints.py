"""Exact resume: the state that TRL's checkpoints lack, and the search for the newest finished checkpoint.

A resumed run continues as if it had not stopped: same data order, same completions (with `rollout_seed`), same losses.
transformers restores weights, optimizer and random states; this module adds the position inside the generation block,
the block itself, and the epoch's permutation.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigurationError
from ..run.reporter import warn
from .checkpoint_files import (
    MARKERS,
    OWN,
    PREFIX,
    checkpoints_in,
    read_metadata,
    record_files,
    why_damaged,
    why_unfinished,
    why_unusable,
    write_metadata,
)
from .rotation import (
    by_age,
    delete,
    delete_files_of_other_launches,
    delete_leftovers,
    step_of,
    sync,
    sync_tree,
)

NOTHING, ONLY_UNFINISHED = -1, -2  # what a rank sees in place of the step of a finished checkpoint
# part of DeepSpeed's file names, after "bf16_" or nothing
ZERO_RANK = re.compile(r"zero_pp_rank_(\d+)_")


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

    Each rank creates a marker file before it writes a checkpoint, and removes it once the files of every rank are on
    disk. A folder is unfinished if a marker remains, or if the last file that transformers or DeepSpeed writes is
    missing.

    Args:
        output_dir (`Path`):
            Folder of the checkpoints; may differ between nodes.
        accelerator (`Accelerator`):
            Accelerator of the calling rank.
    """

    def __init__(self, output_dir: Path, accelerator: Any):
        self._output_dir = output_dir
        self._accelerator = accelerator
        self._own = output_dir / OWN
        self._markers = output_dir / MARKERS

    @contextmanager
    def saving(self, step: int, **facts: Any) -> Iterator[Path]:
        """Create the checkpoint folder of `step` with facts in its metadata, and mark it as finished on exit.

        The exit is a collective of all training ranks. If a rank fails inside, the folder stays marked as unfinished.
        """
        accelerator, rank = self._accelerator, self._accelerator.process_index
        self._markers.mkdir(parents=True, exist_ok=True)
        (self._markers / f"{PREFIX}{step}.rank{rank}").touch()
        sync(self._markers)
        sync(self._own)
        folder = self._output_dir / f"{PREFIX}{step}"
        folder.mkdir(parents=True, exist_ok=True)
        if accelerator.is_local_main_process:
            ranks, with_zero = (
                accelerator.num_processes,
                accelerator.distributed_type == "DEEPSPEED",
            )
            delete_files_of_other_launches(folder, ranks, with_zero)
            write_metadata(folder, rank, ranks=ranks, **facts)
        yield folder
        if accelerator.is_local_main_process:
            self._write_latest(folder)
        sync_tree(folder)
        accelerator.wait_for_everyone()
        # also those of an earlier run with more ranks
        markers = list(self._markers.glob(f"{PREFIX}{step}.rank*"))
        # the lowest of the ranks that share this folder
        if rank == min(int(marker.suffix.removeprefix(".rank")) for marker in markers):
            record_files(folder, rank)
        accelerator.wait_for_everyone()
        for marker in markers:
            marker.unlink(missing_ok=True)
        sync(self._markers)

    def rotate(self, step: int, limit: int, best: str | None, deletes: bool) -> None:
        """Delete checkpoints beyond `save_total_limit`, after every rank has finished that of `step`. A collective.

        Without the wait, a node could delete its older checkpoint while another node, whose marker remains, still
        needs it. The checkpoint of `step` and the best one stay; unfinished ones are deleted first, then old ones.

        Args:
            step (`int`):
                Optimizer step of the newest checkpoint.
            limit (`int`):
                Number of checkpoints to keep.
            best (`str`, *optional*):
                Folder of the best checkpoint.
            deletes (`bool`):
                `True` on the ranks that delete: one per folder.
        """
        self._accelerator.wait_for_everyone()
        if not deletes:
            return
        folders = by_age(checkpoints_in(self._output_dir))
        kept = {(self._output_dir / f"{PREFIX}{step}").resolve()}
        if best:
            kept.add(Path(best).resolve())
        old = [folder for folder in folders if folder.resolve() not in kept]
        old.sort(key=lambda folder: why_unusable(folder) is None)
        delete(old[: max(0, len(folders) - limit)], self._own)

    def keep_only(self, best: str) -> None:
        """Delete all checkpoints but the best one, as transformers does at the end with `save_total_limit=1`."""
        if Path(best).is_dir():
            others = [
                folder for folder in checkpoints_in(self._output_dir) if not folder.samefile(best)
            ]
            delete(others, self._own)

    def delete_leftovers(self) -> None:
        """Delete what an earlier run was deleting when it ended."""
        if self._accelerator.is_local_main_process:
            delete_leftovers(self._own)

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
        """Return the newest finished checkpoint that every rank sees, or `None` if no rank sees any checkpoint.

        A collective of all training ranks. One whose files changed since they were written is skipped.

        Raises:
            `ConfigurationError`: on every rank, if some ranks see finished checkpoints but none is common to all, or
                if there are only unfinished and damaged ones.
        """
        folders = checkpoints_in(self._output_dir)
        unusable = {
            folder: reason for folder in folders if (reason := why_unfinished(folder)) is not None
        }
        while True:
            steps = [step_of(folder) for folder in folders if folder not in unusable]
            seen = self._seen_by_all(steps, bool(unusable))
            common = [step for step in steps if seen.count(step) == self._accelerator.num_processes]
            if not common:
                self._check_without_common(steps, seen, unusable)
                return None
            newest = self._output_dir / f"{PREFIX}{max(common)}"
            # One rank of each node reads files, those of older checkpoints only if the newer one is damaged.
            damage = why_damaged(newest) if self._accelerator.is_local_main_process else None
            if self.all_have(damage is None):
                self._warn_of(unusable, " It can be deleted.")
                return newest
            unusable[newest] = damage or "damaged on another node, or for another rank of this one"

    def _check_without_common(
        self, steps: list[int], seen: list[int], unusable: dict[Path, str]
    ) -> None:
        """Raise `ConfigurationError` if any rank sees a checkpoint, although no usable one is common to all."""
        if max(seen) >= 0:
            self._warn_of(unusable)
            raise ConfigurationError(
                f"No checkpoint in {self._output_dir} is finished for all ranks: this one "
                f"sees those of the steps {steps}, others see other ones.",
                setting="output_dir",
                got=steps,
                rank=self._accelerator.process_index,
                cure="Use an `output_dir` that all nodes share, or under ZeRO `save_on_each_node=True`, or "
                "name one: `train(resume_from_checkpoint=PATH)`.",
            )
        if ONLY_UNFINISHED in seen:
            found = "; ".join(f"{folder.name} is {reason}" for folder, reason in unusable.items())
            folders = " ".join(map(str, unusable)) or "FOLDERS"
            raise ConfigurationError(
                f"{self._output_dir} has no finished checkpoint to resume from, only unfinished or damaged ones "
                f"({found or 'they are on another node'}).",
                setting="resume_from_checkpoint",
                got=unusable,
                rank=self._accelerator.process_index,
                cure=f"To begin anew at step 1, delete them on every node (`rm -r {folders}`), or use another "
                "`output_dir`, or call `train()` without `resume_from_checkpoint`.",
            )

    def _warn_of(self, unusable: dict[Path, str], advice: str = "") -> None:
        if self._accelerator.is_local_main_process:
            for folder, reason in unusable.items():
                warn(f"{folder} is skipped: {reason}.{advice}")

    def _seen_by_all(self, steps: list[int], unusable: bool) -> list[int]:
        """Gather the steps of the usable checkpoints that each rank sees, with a mark of the ranks that see none."""
        first = ONLY_UNFINISHED if unusable and not steps else NOTHING
        padded = self._accelerator.pad_across_processes(
            torch.tensor([first, *steps], device=self._accelerator.device), pad_index=NOTHING
        )
        return self._accelerator.gather(padded).tolist()


def ranks_of_zero(folder: Path, accelerator: Any) -> int:
    """Return the number of ranks that wrote the ZeRO states of a checkpoint; 0 if it has none. A collective.

    ZeRO states belong to the number of ranks that saved them.

    Args:
        folder (`Path`):
            Folder of the checkpoint; may differ between nodes, and then each node needs the files of its own ranks.
        accelerator (`Accelerator`):
            Accelerator of the calling rank.

    Raises:
        `ConfigurationError`: on every rank, if the file of a rank is missing on its node, and as many ranks wrote it.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    files = folder.glob("global_step*/*_optim_states.pt")
    seen = {int(found[1]) for path in files if (found := ZERO_RANK.search(path.name))}
    at_least = 0
    if seen:  # a node whose folder is not shared has only the files of its own ranks
        at_least = read_metadata(folder).get("ranks") or max(seen) + 1
    mine = torch.tensor([[at_least, int(rank in seen)]], device=accelerator.device)
    found = accelerator.gather(mine)
    saved_by = int(found[:, 0].max())
    lacking = [number for number, (_, has) in enumerate(found.tolist()) if not has]
    if lacking and saved_by == world:
        raise ConfigurationError(
            f"{folder} has no optimizer state for the ranks {lacking} on their nodes.",
            setting="machine_rank",
            got=lacking,
            cure="Nodes that do not share `output_dir` must keep their `--machine_rank` of the first launch; "
            "or copy the `global_step*` folders of all nodes to every node.",
        )
    return saved_by
