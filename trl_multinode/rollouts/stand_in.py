"""A trainer's stand-in, on which TRL's code makes a whole rollout in another thread: without collectives, and with
objects of its own for everything that TRL changes meanwhile.
"""

import copy
import threading
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from ..engine.client import Rollout
from ..errors import RolloutError
from .groups import Group
from .locked_tokenizer import locked_copies
from .recorded import Images, Recorded, ToolLoop, Turn
from .requests import Prompts, check_lengths
from .rows import trls_rows
from .seeds import RowSeeds
from .tool_calls import ToolCalls, unwrapped
from .upcoming import Batch

# prompts, images, seeds, most tokens -> completions
Ask = Callable[[Prompts, Images | None, list[int] | None, int], list[Rollout]]

COLLECTIVES = {
    "gather", "gather_for_metrics", "gather_object", "reduce", "pad_across_processes", "wait_for_everyone",
    "main_process_first", "local_main_process_first", "split_between_processes",
}  # fmt: skip


class Finished(BaseException):
    """Carries prompts and result of TRL's `_generate` out of its caller, which would go on with collectives."""


class LocalAccelerator:
    """Accelerator of a stand-in. `gather` returns what it gets, for TRL's metrics, which are dropped. They are
    computed on the CPU, because a read from a GPU would wait for the training that is queued there.

    Args:
        accelerator (`Accelerator`):
            Accelerator of the trainer.
        refuses (`bool`):
            Whether the collectives are refused, because a user's function would get wrong results.
    """

    is_main_process = is_local_main_process = False

    def __init__(self, accelerator: Any, refuses: bool = False):
        self._accelerator, self._refuses = accelerator, refuses
        if not refuses:
            self.device = torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        if name not in COLLECTIVES:
            return getattr(self._accelerator, name)
        if self._refuses or name != "gather":
            raise RolloutError(
                f"`accelerator.{name}` cannot be called in a rollout that runs ahead: other ranks may be elsewhere. "
                "Leave it out, or use `max_staleness=0` without `score_groups`."
            )
        return lambda values: values


class TrainingModel:
    """Model of a stand-in: in training mode whatever the trainer does meanwhile, and without weights."""

    training = True

    def __init__(self, config: Any):
        self.config = config

    def __getattr__(self, name: str) -> Any:
        raise RolloutError(
            f"`model.{name}` cannot be used in a rollout that runs ahead, because the trainer changes and shards the "
            "weights meanwhile. Generate with `trainer.vllm_generation`, or use `max_staleness=0` without "
            "`score_groups`."
        )


class AheadGeneration:
    """Object on which TRL's code, or a `rollout_func`, calls `sync_weights()` and `generate()` in a stand-in.

    Args:
        generation ([`NodeGeneration`]):
            Generation of this rank, with the limits of prompts and completions.
        ask (`Callable`):
            Function that returns completions for prompts, images, seeds and a limit in tokens.
        seeds ([`RowSeeds`]):
            Seeds of this group's rows.
        first_row (`int`):
            Place of the group's first row among the rows of this rank.
    """

    def __init__(self, generation: Any, ask: Ask, seeds: RowSeeds, first_row: int):
        self.turns: list[Turn] = []
        # a `rollout_func` may change it between its calls
        self.max_completion_length = generation.max_completion_length
        self._generation, self._ask, self._seeds = generation, ask, seeds
        self._first_row = first_row

    def sync_weights(self) -> None:
        """Do nothing: weights are sent when a round is used."""

    def generate(
        self,
        prompts: Prompts,
        images: Images | None = None,
        num_generations: int = 1,
        profiler: Any = None,
    ) -> tuple[list, list, list, list]:
        """Generate completions, as [`NodeGeneration.generate`] does; other threads run meanwhile."""
        check_lengths(self._generation, prompts, self._first_row)
        rows = self._ask(prompts, images, self._seeds.of_call(prompts), self.max_completion_length)
        self.turns.append(Turn(prompts, rows, images))
        completion_ids, logprobs, logprob_ids = trls_rows(rows)
        self._seeds.add_completions(completion_ids)
        return prompts, completion_ids, logprobs, logprob_ids

    def begin_sessions(self, num_rows: int) -> list[int] | None:
        """Return the seed of each session of the group."""
        return self._seeds.of_call([[] for _ in range(num_rows)])

    def look(self, waits: bool) -> None:
        """End the thread if nobody waits for the group any more. The main thread looks after lost engines."""
        self._ask([], None, None, 0)

    def end_sessions(self, calls: Turn) -> None:
        """Keep the calls of the group's sessions."""
        self.turns += [calls] if calls.rows else []


class Recorder:
    """
    Recorder of whole rollouts of one rank, by TRL's code on stand-ins of its trainer.

    ```python
    recorder = Recorder(trainer, tool_calls)
    recorded = recorder.record(group, ask)  # in the group's thread
    ...                                     # rewards are read
    recorder.give_back(recorded)            # its environments may be used for another group
    ```

    Args:
        trainer ([`~trl_multinode.MultiNodeGRPOTrainer`]):
            Trainer, of which every stand-in gets a copy of its attributes.
        tool_calls ([`ToolCalls`]):
            Limit and names of tools.
    """

    def __init__(self, trainer: Any, tool_calls: ToolCalls):
        self._trainer = trainer
        self._tool_calls = tool_calls
        self._kind = _stand_in_kind(type(trainer))
        args = trainer.args
        self._rank_rows = args.per_device_train_batch_size * args.steps_per_generation
        # while a round is replayed, the trainer has another one
        self._rollout_func = trainer.rollout_func
        self._tokenizers = locked_copies(trainer.processing_class, trainer._tokenizer)
        self._pools: list[dict[Any, list]] = []  # of environments, free
        self._lock = threading.Lock()

    def record(self, group: Group, ask: Ask) -> Recorded:
        """Make and return the rollouts of a group. The caller's thread waits for engines and tools.

        Raises:
            `RolloutError`: if a tool, an environment or the `rollout_func` failed.
        """
        rows = [dict(row) for row in group.inputs]
        stand_in = self._build(group, ask)
        try:
            with unwrapped():
                stand_in._generate_and_score_completions(rows)
        except Finished as finished:
            return self._recorded(stand_in, rows, *finished.args)
        raise AssertionError("TRL's code returned without `_generate`")

    def give_back(self, recorded: Recorded) -> None:
        """Let the environments of a group whose rewards were read be used for another one."""
        with self._lock:
            self._pools += recorded.pools
        recorded.pools = []

    def _build(self, group: Group, ask: Ask) -> Any:
        trainer, size = self._trainer, len(group.inputs)
        stand_in: Any = object.__new__(self._kind)
        vars(stand_in).update(own_attributes(trainer))
        first_row = group.place * size
        generation = trainer.vllm_generation
        seeds = generation.seeds.of_group(
            group.seed_mode, group.number, first_row, size, self._rank_rows
        )
        vars(stand_in).update(
            host=None,  # every method is TRL's
            accelerator=LocalAccelerator(trainer.accelerator),
            model=TrainingModel(trainer.model.config),
            model_wrapped=None,
            state=copy.copy(trainer.state),
            processing_class=self._tokenizers[0],
            _tokenizer=self._tokenizers[1],
            vllm_generation=AheadGeneration(generation, ask, seeds, first_row),
            _last_loaded_step=trainer.state.global_step,
            _buffered_inputs=None,
            _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
            _pending_extra_logs=defaultdict(list),
            _pending_metrics=defaultdict(list),
            _tool_failures=[],
            _first_row=first_row,
            tool_loop=None,
            rollout_output=None,
            environments=None,
        )
        if trainer.environment_factories is not None:
            self._give_environments(stand_in, first_row)
        named = self._tool_calls.named_rollout(self._rollout_func, first_row, size)
        if named is not None:
            stand_in.rollout_func = recording(named)
        return stand_in

    def _give_environments(self, stand_in: Any, first_row: int) -> None:
        """Give a stand-in environments that no other group uses; TRL builds more of them if it needs to."""
        with self._lock:
            pool = (
                self._pools.pop()
                if self._pools
                else {name: [] for name in stand_in.environment_factories}
            )
        stand_in._environment_pool = pool
        self._tool_calls.resets.rows = count(first_row)

    @staticmethod
    def _recorded(stand_in: Any, rows: Batch, prompts: list[Any], output: tuple) -> Recorded:
        _, completion_ids, _, completions, _, extra_fields, *_ = output
        return Recorded(
            rows, prompts, completions, completion_ids,
            turns=stand_in.vllm_generation.turns,
            fields=rows_of(extra_fields, len(rows)),
            environments=stand_in.environments,
            tools=stand_in.tool_loop,
            output=stand_in.rollout_output,
            pools=[] if stand_in.environment_factories is None else [stand_in._environment_pool],
        )  # fmt: skip


def recording(rollout_func: Callable) -> Callable:
    """Return a `rollout_func` that keeps its output for the round, and refuses collectives meanwhile."""

    def record_output(prompts: list[Any], stand_in: Any) -> dict[str, Any]:
        local = stand_in.accelerator
        stand_in.accelerator = LocalAccelerator(local._accelerator, refuses=True)
        output = rollout_func(prompts, stand_in)
        stand_in.accelerator, stand_in.rollout_output = local, output
        return output

    return record_output


def own_attributes(trainer: Any) -> dict[str, Any]:
    """Return a trainer's attributes without those that replace a method: a replay does so in the main thread."""
    kind = type(trainer)
    attributes = dict(vars(trainer))  # in one step: the main thread adds and removes some meanwhile
    return {
        name: value for name, value in attributes.items() if not callable(getattr(kind, name, None))
    }


def rows_of(fields: dict[str, Any], num_rows: int) -> list[dict[str, Any]]:
    """Return the extra fields of a `rollout_func` for each row: TRL gives a list to the rows in order, and any other
    value to all rows."""
    rows: list[dict[str, Any]] = [{} for _ in range(num_rows)]
    for name, values in fields.items():
        of_rows = values if isinstance(values, list) else [values] * num_rows
        for row, value in zip(rows, of_rows, strict=False):  # TRL's list may be shorter
            row[name] = value
    return rows


def _stand_in_kind(kind: type) -> type:
    """Return a subclass of a trainer that stops after TRL's `_generate`, and keeps the result of the tool loop."""

    class StandIn(kind):  # type: ignore[misc, valid-type]
        def _generate(self, prompts: list) -> tuple:
            raise Finished(prompts, super()._generate(prompts))

        def _tool_call_loop(self, *args: Any, **kwargs: Any) -> tuple:
            found = super()._tool_call_loop(*args, **kwargs)
            self.tool_loop = ToolLoop(*found)
            return found

    return StandIn
