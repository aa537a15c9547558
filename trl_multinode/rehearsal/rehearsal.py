"""`Rehearsal`: the largest round through the engines, then the longest rows through forward and backward.

The loss is TRL's own, and all ranks take part: the collectives of ZeRO-3 depend on the model, not on the rows. The
optimizer does not step, so nothing that training reads changes; `untouched.py` restores the rest.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback

from ..errors import EngineDiedError, RehearsalError
from ..libraries import replaced
from ..run.reporter import report
from .rows import Rows, batch_of, longest_prompt, longest_row, made_up, row_limit, training_rows
from .state_memory import reserve_state
from .untouched import untouched

COMPLETION = (
    16  # tokens that an engine generates for each row; the rest of a row is filled in as its prompt
)
# CUDA, cuBLAS, torch on a CPU
OUT_OF_MEMORY = (
    "out of memory",
    "ALLOC_FAILED",
    "can't allocate memory",
)


class Rehearsal(TrainerCallback):
    """Callback that rehearses once per `train`, after the model and the optimizer are prepared.

    Args:
        trainer ([`MultiNodeGRPOTrainer`]):
            Trainer of this rank. All ranks build the callback, because a rehearsal is a collective.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Rehearse generation and training. A collective of all training ranks.

        Raises:
            `RehearsalError`: if this rank or an engine of its node runs out of memory.
        """
        trainer, start = self._trainer, time.monotonic()
        limit = row_limit(trainer)
        longest = longest_prompt(trainer)
        # a session's row holds all of its calls
        most = None if trainer._has_sessions else trainer.max_completion_length
        prompt, completion = longest_row(longest, most, limit)
        rows = training_rows(trainer, prompt, completion)
        source = (
            "is unknown, so rows fill the limit" if longest is None else f"has {longest} tokens"
        )
        self._report(
            f"rehearsing the longest rows ({prompt} + {completion} tokens; the limit is {limit}, the longest prompt "
            f"{source}), before step 1"
        )
        if trainer.host is not None:
            self._generate(prompt + completion)
        for each in rows:
            self._train(each)
        seconds = time.monotonic() - start
        self._report(f"rehearsed in {seconds:.0f} s: {' and '.join(map(str, rows))}{self._peak()}")

    # ---- generation -------------------------------------------------------------------------------------------------

    def _generate(self, length: int) -> None:
        """Fill the engines' cache with a round of rows of `length` tokens.

        Only the last tokens are generated: an engine reads a prompt in a few passes, and generates one token in each.
        """
        trainer, args = self._trainer, self._trainer.args
        completion = min(COMPLETION, length - 1)
        count = args.per_device_train_batch_size * args.steps_per_generation
        prompts = made_up(trainer, count, length - completion).tolist()
        trainer.vllm_generation.sync_weights()  # engines refuse to generate with dummy weights
        note = (
            f"This was the rehearsal of generation, with {count} rows of {length} tokens from each rank "
            "(`per_device_train_batch_size` x `steps_per_generation`; longest prompt + `max_completion_length`). If "
            "the engine ran out of memory, lower `vllm_gpu_memory_utilization`, or `max_num_seqs` or "
            "`max_num_batched_tokens` in `engine_kwargs`, or set a smaller `vllm_max_model_length`."
        )
        try:
            with trainer.host.phases("rehearse"), trainer.host.watch.noting(note):
                trainer.vllm_generation.rehearse(prompts, completion)
        except EngineDiedError as error:
            raise RehearsalError(
                f"{trainer.host.topology}: an engine did not survive its rehearsal: {error}. {note}"
            ) from error
        trainer.host.updates.align()

    # ---- training ---------------------------------------------------------------------------------------------------

    def _train(self, rows: Rows) -> None:
        """Run one forward and one backward pass, with the memory of the optimizer's state allocated."""
        trainer = self._trainer
        with self._phase(), self._explained(rows), untouched(trainer):
            held, reason = reserve_state(trainer)
            if reason:
                self._report(f"rehearsing without memory for the optimizer's state: {reason}")
            trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
            # else DeepSpeed's engine would step
            trainer.accelerator.gradient_state._set_sync_gradients(False)
            trainer._metrics = {mode: defaultdict(list) for mode in trainer._metrics}
            with self._local_gradients(), self._finished(rows):
                Trainer.training_step(trainer, trainer.model_wrapped, batch_of(trainer, rows))
            del held

    def _phase(self) -> Any:
        return (
            nullcontext() if self._trainer.host is None else self._trainer.host.phases("rehearse")
        )

    @contextmanager
    def _finished(self, rows: Rows) -> Iterator[None]:
        """Pass a batch to TRL's loss as it is, where TRL would generate one."""
        if (balance := self._trainer._balance) is not None:
            with balance.rehearsing(rows.count):
                yield
        else:
            with replaced(self._trainer, "_prepare_inputs", lambda batch: batch):
                yield

    def _local_gradients(self) -> Any:
        """Leave DDP's all-reduce out: its first one fixes the buckets, and thus the rounding of all later sums."""
        model = self._trainer.model_wrapped
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    @contextmanager
    def _explained(self, rows: Rows) -> Iterator[None]:
        """Raise `RehearsalError`, with the settings to change, if the memory does not suffice."""
        try:
            yield
        except RuntimeError as error:  # `torch.OutOfMemoryError` is one
            if not any(text in str(error) for text in OUT_OF_MEMORY):
                raise
            balanced = self._trainer._balance is not None
            size = "micro_batch_tokens" if balanced else "per_device_train_batch_size"
            rank = f"rank {self._trainer.accelerator.process_index}"
            where = rank if self._trainer.host is None else self._trainer.host.topology
            raise RehearsalError(
                f"{where}: out of memory in the rehearsal of training, with {rows} (longest prompt + "
                f"`max_completion_length`; `{size}` {getattr(self._trainer.args, size)}). Lower `{size}` or "
                "`max_completion_length`, leave out long prompts, or set `gradient_checkpointing=True`, or train with "
                f"ZeRO-3 on more ranks. {error}"
            ) from error

    # ---- report -----------------------------------------------------------------------------------------------------

    def _report(self, text: str) -> None:
        if self._trainer.accelerator.is_main_process:
            report(text)

    def _peak(self) -> str:
        if self._trainer.accelerator.device.type != "cuda":
            return ""
        peak, total = (
            torch.cuda.max_memory_allocated(),
            torch.cuda.get_device_properties(0).total_memory,
        )
        return f"; rank 0 allocated at most {peak / 2**30:.1f} of {total / 2**30:.1f} GiB"
