"""Groups of rounds in flight in a checkpoint: their rows are saved as indices of the dataset."""

import copy
from functools import cache
from typing import Any

import torch

from ..errors import ConfigurationError
from ..rollouts.groups import Group
from ..rollouts.sampling_again import drawn_index
from ..rollouts.saved_groups import SavedGroups, decoded, encoded
from .saved_rollouts import SavedRollouts

NAME = "open"  # of the tensor and of the notes


class OpenGroupsFile:
    """Part of a rank's rollouts file that holds its open groups.

    Args:
        trainer ([`NodeTrainer`]):
            Trainer with rounds ahead.
            If they are in flight, a group is the completions of one prompt, whose row is found by its index in the
            dataset. Otherwise it is the rank's part of a round, whose rows the dataloader gives again.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._in_flight = trainer.host.settings.in_flight
        self._rounds = trainer.vllm_generation.rounds
        self._where = str(trainer.host.topology)

    def add_to(self, saved: SavedRollouts) -> None:
        """Add a snapshot of the open groups; rows in flight are not waited for.

        Raises:
            `ConfigurationError`: if a group's row is not where TRL's sampler puts it in the dataset.
        """
        data = encoded(SavedGroups.of(self._rounds, self._index_of))
        saved.tensors[NAME] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        saved.notes[NAME] = {"in_flight": self._in_flight}

    def restore_from(self, saved: SavedRollouts) -> None:
        """Restore the open groups; rows that were under way begin again after the next sync.

        Raises:
            `ConfigurationError`: if the dataset has other prompts at the saved indices, or groups have another size.
        """
        if saved.notes[NAME]["in_flight"] != self._in_flight:
            return  # a round that was ahead is generated again
        found = decoded(saved.tensors[NAME].numpy().tobytes())
        size = self._trainer.num_generations
        if self._in_flight and (others := {len(group.prompts) for group in found.groups} - {size}):
            raise ConfigurationError(
                f"{self._where}: the checkpoint has open groups of {min(others)} rows, `num_generations` is {size}.",
                setting="num_generations",
                got=size,
                expected=min(others),
                cure="Resume with the same number.",
            )
        found.restore_to(self._rounds, self._row_of)

    def _index_of(self, group: Group) -> int | None:
        """Compute the index of a group's row as TRL's `RepeatSampler` does: one permutation per epoch."""
        if not self._in_flight:
            return None
        args, dataset = self._trainer.args, self._trainer.train_dataset
        per_round = args.generation_batch_size // self._trainer.num_generations
        epoch, number = divmod(group.number, len(dataset) // per_round)
        first = (
            self._trainer.accelerator.process_index
            * per_round
            // self._trainer.accelerator.num_processes
        )
        if group.attempt:  # `dynamic_sampling` has drawn it
            return drawn_index(
                args.seed, group.number, first + group.place, group.attempt, len(dataset)
            )
        position = number * per_round + first + group.place
        shuffled = self._trainer.shuffle_dataset
        index = permutation(len(dataset), args.seed, epoch)[position] if shuffled else position
        if dataset[index].get("prompt") != group.inputs[0].get("prompt"):
            raise ConfigurationError(
                f"{self._where}: row {index} of the training dataset is not that of the open group "
                f"{group.id}, so a checkpoint cannot record it.",
                setting="train_dataset",
                got=index,
                cure="Rounds in flight need TRL's own order of the dataset: leave out a sampler of your own, "
                "or use `max_staleness=1`.",
            )
        return index

    def _row_of(self, index: int | None, prompt: list[int]) -> dict[str, Any]:
        if index is None:
            return {}
        dataset = self._trainer.train_dataset
        row = dataset[index] if index < len(dataset) else {}
        # its rollout begins again, with whatever prompt its environment makes
        if not prompt and row:
            return row
        if (
            not row
            or self._trainer._tokenize_prompts([copy.deepcopy(row["prompt"])])[0][0] != prompt
        ):
            raise ConfigurationError(
                f"{self._where}: row {index} of the training dataset has another prompt than when the "
                "checkpoint was written, so its open groups cannot be trained.",
                setting="train_dataset",
                got=index,
                cure="Resume with the same dataset, tokenizer and chat template.",
            )
        return row


@cache
def permutation(num_rows: int, seed: int, epoch: int) -> list[int]:
    """Return the order of the dataset in an epoch (0 for the first), as TRL's `RepeatSampler` draws it."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epoch + 1):
        order = torch.randperm(num_rows, generator=generator)
    return order.tolist()


def check_same_way(folder: Any, was_in_flight: bool, in_flight: bool, all_usable: bool) -> None:
    """Check that a run can go on from a checkpoint with open groups.

    Raises:
        `ConfigurationError`: on every rank, if it cannot: ids would be trained twice, and others never.
    """
    if was_in_flight and not in_flight:
        raise ConfigurationError(
            f"{folder} was written with `max_staleness` of 2 or more: groups of several rounds were open, so "
            "a run that waits for them at every sync would train some prompts twice and others never.",
            setting="max_staleness",
            expected=2,
            cure="Resume with `max_staleness=2` or more.",
        )
    if was_in_flight and not all_usable:
        raise ConfigurationError(
            f"{folder} was written with `max_staleness` of 2 or more, and not all ranks can use their file "
            "`rollouts_rank<r>.safetensors` with the open groups: it is missing (`save_only_model=True` "
            "leaves it out), or the numbers of ranks or rows, `score_groups` or the tools have changed.",
            setting="resume_from_checkpoint",
            got=folder,
            cure="Resume with the same launch and settings.",
        )
