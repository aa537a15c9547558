"""`Resume` continues a stopped run of one trainer as if it had not stopped."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState
from transformers import trainer as transformers_trainer

from ..errors import ConfigurationError
from ..images import has_index
from ..libraries import replaced
from ..run.endings.ending import RESUMING
from ..run.reporter import report, warn
from .checkpoint_files import (
    check_finished,
    epochs_behind,
    from_its_weights,
    has_optimizer,
    newest_whole,
    no_resume,
    read_metadata,
    read_state,
    was_in_flight,
)
from .checkpoints import CheckpointLog, micro_steps_done, ranks_of_zero
from .conversion import Conversion
from .dealing import Layout, load_dealt
from .open_groups import OpenGroupsFile, check_same_way
from .saved_rollouts import SavedRollouts, load_rollouts, pack_block, save_rollouts, unpack_block


class Resume:
    """
    Save and restore the state that transformers and TRL leave out: TRL's position in its generation block, the block
    itself if a checkpoint falls inside it, the rounds ahead, and the epoch's permutation.

    Args:
        trainer ([`NodeTrainer`]):
            Trainer whose `_step`, `_buffered_inputs` and rounds ahead this class reads and sets.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._accelerator = trainer.accelerator
        self._in_flight = trainer.host.settings.in_flight
        self._log = CheckpointLog(Path(trainer.args.output_dir), trainer.accelerator)
        self._folder: Path | None = None
        # optimizer steps of this launch after which it is where the checkpoint is; `None`: as many steps
        self._steps: int | None = None
        self._must_restore = False
        self.epochs = 0  # epochs that the run completed before the checkpoint

    @property
    def resuming(self) -> bool:
        """Return whether `train` was called with a checkpoint."""
        return self._folder is not None

    def choose(self, wanted: str | bool | None) -> str | None:
        """Resolve the argument of `train(resume_from_checkpoint=wanted)` to a checkpoint folder. A collective.

        Raises:
            `ConfigurationError`: if `wanted` is `True` and no checkpoint is finished; if the checkpoint is unfinished
                or damaged, is in a later pass over a stream than the first, or cannot be converted for this number of
                ranks.
        """
        self._log.delete_leftovers()
        self._must_restore, self._steps, self.epochs = True, None, 0
        self._folder = self._resolved(wanted)
        if self._folder is None:
            self._warn_of_replaced()
            return None
        self._check(self._folder)
        self.epochs = epochs_behind(self._folder)
        self._move(self._folder)
        self._check_stream(self._folder)
        # the longest of all checks; training loads it
        self._conversion_of(self._folder)
        if self._accelerator.is_local_main_process:
            report(f"resuming from {self._folder}")
        return str(self._folder)

    def _resolved(self, wanted: str | bool | None) -> Path | None:
        if wanted is not True:
            folder = Path(wanted) if wanted else None
            if folder is not None:
                check_finished(folder, self._accelerator.is_local_main_process)
            return folder
        folder = self._log.last_whole()
        if folder is None:
            raise ConfigurationError(
                f"resume_from_checkpoint=True, and {self._trainer.args.output_dir} has no finished checkpoint.",
                setting="resume_from_checkpoint",
                got=True,
                cure=f"{RESUMING} starts anew in that case.",
            )
        return folder

    def _check(self, folder: Path) -> None:
        under_zero = self._accelerator.distributed_type == "DEEPSPEED"
        if not under_zero and any(folder.glob("global_step*")):
            raise no_resume(
                folder,
                f"{folder} has its optimizer and schedule in DeepSpeed's files, and this launch is without DeepSpeed.",
                f"Launch it with a DeepSpeed config, or {from_its_weights(folder)}",
            )
        if not has_optimizer(folder) and self._accelerator.is_main_process:
            warn(
                f"{folder} has no optimizer state (save_only_model): optimizer and schedule begin anew."
            )
        if getattr(self._trainer.args, "sync_ref_model", False):
            warn(
                "sync_ref_model: TRL saves no reference model, so the resumed run begins with the initial one, "
                "and its KL and losses differ from those of a run without a stop."
            )

    def _move(self, folder: Path) -> None:
        """Find the position in the data after a change of the ranks, or of the rows of a step or of a round.

        Raises:
            `ConfigurationError`: if new checkpoints would get lower numbers than those that are there.
        """
        metadata, args = read_metadata(folder), self._trainer.args
        self._report_ranks(folder, metadata.get("ranks"))
        now = self._batches
        was = metadata.get("batches", now)
        if was == now:
            return
        done = read_state(folder)["global_step"]
        epochs, rows = metadata["place"]
        inside = steps_of(rows, was, now)
        # a stream has no number of batches, and one epoch
        batches = num_batches(self._trainer.get_train_dataloader()) or 0
        updates = -(-batches // args.gradient_accumulation_steps)
        self._steps = epochs * updates + inside
        if updates:
            self.epochs = self._steps // updates
        change = (
            f"{folder} was written with {was[1]} rows per optimizer step, {was[0]} per round and {was[3]} per prompt, "
            f"this launch has {now[1]}, {now[0]} and {now[3]}"
        )
        if self._steps < done and folder.parent.resolve() == Path(args.output_dir).resolve():
            raise ConfigurationError(
                f"{change}: it would go on at step {self._steps}, and a later resume would take the older "
                "checkpoints.",
                setting="gradient_accumulation_steps",
                got=now,
                expected=was,
                cure="Choose `per_device_train_batch_size`, `gradient_accumulation_steps` and `steps_per_generation` "
                "for the same numbers, or use another `output_dir`.",
            )
        if self._accelerator.is_main_process:
            again = rows // (was[2] * was[3]) - inside * now[1] // (now[2] * now[3])
            warn(
                f"{change}: step {done} becomes step {self._steps}, where {max(0, again)} prompts are trained again. "
                "`max_steps` and `warmup_steps` count the steps of this launch."
            )

    def _report_ranks(self, folder: Path, was: int | None) -> None:
        now = self._accelerator.num_processes
        if was in (None, now) or not self._accelerator.is_main_process:
            return
        # the file of a single rank has another name
        without = list(range(0 if 1 in (was, now) else was, now))
        report(
            f"{folder} was written by {was} ranks, this launch has {now}; random states that begin anew: "
            + (f"those of the ranks {without}" if without else "none")
        )

    @property
    def _batches(self) -> list[int]:
        """Rows of a round and of a step over all ranks, iterations over a round, and completions of a prompt."""
        generations = getattr(self._trainer, "num_generations", 1)
        return [*Layout(*self._layout()).batches[:3], generations]

    def _place(self) -> tuple[int, int]:
        """Return the epochs that are complete, and the rows trained in the one that goes on."""
        trainer = self._trainer
        batches = num_batches(trainer.callback_handler.train_dataloader)
        accumulation = trainer.args.gradient_accumulation_steps
        done = micro_steps_done(trainer.state.global_step, batches, accumulation)
        epochs, inside = divmod(done, batches) if batches else (0, done)
        return epochs, inside * self._batches[1] // accumulation

    def _conversion_of(self, folder: Path) -> Conversion | None:
        """Return a checkpoint as this number of ranks can load it, or `None` if it is that itself. A collective."""
        accelerator, agreement = self._accelerator, self._trainer.host.agreement
        saved_by = ranks_of_zero(folder, accelerator)
        output_dir = Path(self._trainer.args.output_dir)
        conversion = Conversion(folder, saved_by, output_dir, accelerator.process_index)
        local_main = accelerator.is_local_main_process
        if saved_by in (0, accelerator.num_processes):
            if local_main:
                conversion.delete()
            return None
        with self._trainer.host.phases("convert"):
            for work, is_mine in (
                (conversion.delete_others, local_main),
                (conversion.make, accelerator.is_main_process),
                # those of nodes that do not share the folder of rank 0
                (conversion.make, local_main),
            ):
                if is_mine:
                    work()
                agreement.meeting.wait()
        return conversion

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load checkpoints inside as those of this launch: their conversion, and at the step of the same rows."""
        load, load_state = (
            transformers_trainer.deepspeed_load_checkpoint,
            TrainerState.load_from_json,
        )

        def load_converted(engine: Any, folder: str, **keywords: Any) -> None:
            conversion = self._conversion_of(Path(folder))
            if conversion is None:
                load(engine, folder, **keywords)
                return
            conversion.load(engine, load, **keywords)
            self._trainer.host.agreement.meeting.wait()
            if self._accelerator.is_local_main_process:
                conversion.delete()

        def load_moved(path: str) -> TrainerState:
            state = load_state(path)
            if self._steps is not None:
                state.global_step = self._steps
                # a later checkpoint may have the old number of the best one, whose folder is kept by name
                state.best_global_step = None
            return state

        with (
            replaced(transformers_trainer, "deepspeed_load_checkpoint", load_converted),
            replaced(TrainerState, "load_from_json", load_moved),
        ):
            yield

    def _check_stream(self, folder: Path) -> None:
        """Refuse a checkpoint of a later pass over a stream.

        transformers skips as many batches as were trained, but of one pass only: it would begin the pass anew, and
        train its first prompts twice. A stream's state in its trainer file counts passes as epochs.
        """
        if not self.epochs or self._trainer.args.ignore_data_skip:
            return
        dataset = self._trainer.train_dataset
        if has_index(dataset):
            return
        raise ConfigurationError(
            f"{folder} is in pass {self.epochs + 1} over a stream ({type(dataset).__name__}), whose "
            "position in a later pass than the first cannot be restored.",
            setting="train_dataset",
            got=type(dataset).__name__,
            cure="Use a `Dataset` with an index, a stream that is as long as the training, or "
            "`ignore_data_skip=True`, which begins the pass anew and trains some prompts again.",
        )

    def _warn_of_replaced(self) -> None:
        """Warn, on rank 0, if training begins anew beside checkpoints of an earlier launch, which it would replace."""
        if self._trainer.host.watch.ending.resumes or not self._accelerator.is_main_process:
            return
        folder = Path(self._trainer.args.output_dir)
        newest = newest_whole(folder)
        if newest is not None:
            warn(
                f"training begins at step 1, and {folder} has checkpoints of an earlier launch, the newest of them "
                f"{newest.name}: new ones replace those of the same steps, and `save_total_limit` deletes others. "
                f"{RESUMING} continues from it; use another `output_dir` to keep it."
            )

    # ---- at the first step ------------------------------------------------------------------------------------------

    def restore_position(self) -> None:
        """Restore the trainer's position, or reset it without a checkpoint.

        Every step calls this method; only the first call of each `train` has an effect.
        """
        if not self._must_restore:
            return
        self._must_restore = False
        trainer = self._trainer
        trainer._step = micro_steps_done(
            trainer.state.global_step,
            num_batches(trainer.callback_handler.train_dataloader),
            trainer.args.gradient_accumulation_steps,
        )
        trainer._buffered_inputs = None
        if trainer.vllm_generation.rounds is not None:
            # it waits for completions of a run that ended early
            with trainer.host.phases("generate"):
                trainer.vllm_generation.rounds.drop()
        if self._steps is not None:
            # what was loaded counts the steps of the checkpoint
            move_schedule(trainer.lr_scheduler, self._steps)
            if hasattr(trainer.model_wrapped, "global_steps"):  # DeepSpeed names its files by it
                trainer.model_wrapped.global_steps = self._steps
        if self._folder is not None:
            self._restore(self._folder)

    def _restore(self, folder: Path) -> None:
        """Restore the saved rollouts on all ranks or on none. A collective.

        A rank that generates afresh needs all the other ranks, for the weight sync and the rewards.
        """
        rank = self._accelerator.process_index
        saved = load_rollouts(folder, rank)
        usable = saved is not None and saved.notes.get("layout") == self._layout()
        all_usable = self._log.all_have(usable)
        if not all_usable:
            saved = load_dealt(folder, self._layout(), rank)
            all_usable = self._log.all_have(saved is not None)
        check_same_way(folder, was_in_flight(folder), self._in_flight, all_usable)
        if saved is not None and all_usable:
            self._restore_rollouts(saved)
        elif self._inside_block() or self._trainer.max_staleness == 1:
            why = "has rollouts" if usable else "has no rollouts, or those of another layout"
            warn(
                f"Rank {rank}: {folder} {why}, and not all ranks can use theirs, so all generate them again, with "
                "newer weights than in the first run."
            )

    def _restore_rollouts(self, saved: SavedRollouts) -> None:
        if self._inside_block():
            self._trainer._buffered_inputs = unpack_block(saved, self._accelerator.device)
        if "open" in saved.notes and (self._in_flight or self._keeps_a_round):
            OpenGroupsFile(self._trainer).restore_from(saved)

    # ---- at every checkpoint ----------------------------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[Path]:
        """Save the rollouts beside the checkpoint that transformers writes inside. All training ranks enter it.

        It waits for a round that runs ahead, unless `save_only_model` omits the rollouts.
        """
        step = self._trainer.state.global_step
        facts = {"in_flight": self._in_flight, "batches": self._batches, "place": self._place()}
        with self._log.saving(step, **facts) as folder:
            if not self._trainer.args.save_only_model:
                save_rollouts(folder, self._accelerator.process_index, self._collect())
            yield folder

    @contextmanager
    def rotating(self) -> Iterator[None]:
        """Delete old checkpoints on exit, when the new one is finished, instead of inside, where transformers would.

        All training ranks enter it, around [`saving`].
        """
        with replaced(transformers_trainer, "rotate_checkpoints", lambda **_: None):
            yield
        args, state = self._trainer.args, self._trainer.state
        if (args.save_total_limit or 0) > 0:
            self._log.rotate(
                state.global_step,
                args.save_total_limit,
                state.best_model_checkpoint,
                args.should_save,
            )

    @contextmanager
    def rotating_at_end(self) -> Iterator[None]:
        """Delete all but the best checkpoint on exit, instead of inside, where transformers would."""
        with replaced(transformers_trainer, "sort_checkpoints", lambda **_: []):
            yield
        args, state = self._trainer.args, self._trainer.state
        if (
            args.should_save
            and args.save_total_limit == 1
            and state.best_model_checkpoint is not None
        ):
            self._log.keep_only(state.best_model_checkpoint)

    def _collect(self) -> SavedRollouts:
        trainer, host = self._trainer, self._trainer.host
        saved = pack_block(trainer._buffered_inputs if self._inside_block() else [])
        saved.notes["layout"] = self._layout()
        if self._in_flight:
            OpenGroupsFile(trainer).add_to(saved)
        elif self._keeps_a_round and not host.agreement.preemption.leaves:
            # completions may take longer than a pre-emption leaves; `resume` then makes others
            # which may take any time, unlike a checkpoint that writes nothing
            with host.phases("generate"):
                trainer.vllm_generation.wait_for_open()
            OpenGroupsFile(trainer).add_to(saved)
        return saved

    @property
    def _keeps_a_round(self) -> bool:
        """Return whether a round of single completions runs ahead; whole rollouts are made again after a resume."""
        return self._trainer.vllm_generation.rounds is not None and not self._has_whole_rollouts

    @property
    def _has_whole_rollouts(self) -> bool:
        return getattr(self._trainer, "_recorder", None) is not None

    def _inside_block(self) -> bool:
        return self._trainer._step % self._trainer.steps_per_round != 0

    def _layout(self) -> list[int]:
        """Return the sizes that fix the rank and block position of a saved row; other sizes mean other rows."""
        args = self._trainer.args
        # absent in some configs
        slices = getattr(args, "steps_per_generation", args.gradient_accumulation_steps)
        per_rank = [
            args.per_device_train_batch_size,
            slices,
            getattr(self._trainer, "num_iterations", 1),
        ]
        sizes = [self._accelerator.num_processes, *per_rank, args.gradient_accumulation_steps]
        # open groups of whole rollouts have neither prompts nor rows that single completions could go on from
        return [*sizes, 1] if self._in_flight and self._has_whole_rollouts else sizes


def steps_of(rows: int, was: list[int], now: list[int]) -> int:
    """Return the optimizer steps of an epoch after which this launch has trained what another one had.

    Both begin whole rounds there, because a round that is generated again has its rows in another order.

    Args:
        rows (`int`):
            Rows that the other launch had trained in the epoch.
        was (`list[int]`), now (`list[int]`):
            Rows of a round, rows of a step, iterations, and completions of a prompt, of the other launch and of this
            one.
    """
    prompts = rows // (was[0] * was[2]) * was[0] // was[3]
    return prompts * now[3] // now[0] * now[0] * now[2] // now[1]


def move_schedule(schedule: Any, steps: int) -> None:
    """Set the learning rates of another number of optimizer steps."""
    schedule = getattr(schedule, "scheduler", schedule)
    if isinstance(schedule, LambdaLR):
        schedule.last_epoch = steps - 1
        schedule.step()
    elif hasattr(schedule, "last_batch_iteration"):  # DeepSpeed's begin at -1
        schedule.step(steps - 1)
    else:
        warn(f"{type(schedule).__name__} goes on as after the steps that the checkpoint counted.")


def num_batches(loader: Any) -> int | None:
    """Return the number of batches in one pass; `None` for a stream, whose loader's `__len__` raises."""
    try:
        return len(loader)
    except TypeError:
        return None
