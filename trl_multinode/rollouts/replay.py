"""A recorded round in TRL's code: what ran ahead is not run again, and everything else of the round is TRL's."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

from ..errors import RolloutError
from ..libraries import replaced
from .recorded import Recorded, ToolLoop


class Observed:
    """Stands in the pool of environments for one whose `reset` has run."""

    def reset(self, **row: Any) -> None:
        """Do nothing: the recorded prompts hold what `reset` returned."""


@contextmanager
def replayed(
    trainer: Any, recorded: Recorded, use_first_turns: Callable[[], None]
) -> Iterator[None]:
    """
    Let TRL's code of one round use recorded rollouts. Every rank opens it, each with its own ones.

    TRL's `_generate` still calls `generate` for the first turns (which returns the recorded rows) and computes the
    metrics; its tool loop, the `reset` of environments and the `rollout_func` are replaced. The tokens of the prompts
    are the recorded ones, because a chat template may write the date.

    Args:
        trainer ([`~trl_multinode.MultiNodeGRPOTrainer`]):
            Trainer whose `_generate_and_score_completions` runs inside.
        recorded ([`Recorded`]):
            All groups of the round.
        use_first_turns (`Callable`):
            Function that marks the rows as used, where TRL does not call `generate`.
    """
    with ExitStack() as stack:
        if recorded.environments is not None:
            stack.enter_context(replaced(trainer, "_environment_pool", _pools(trainer, recorded)))
        stack.enter_context(replaced(trainer, "_generate", _with_prompts(trainer, recorded)))
        if recorded.tools is not None:
            stack.enter_context(
                replaced(trainer, "_tool_call_loop", _loop_of(trainer, recorded.tools))
            )
        if recorded.output is None:
            stack.enter_context(
                replaced(trainer, "_tokenize_prompts", _with_tokens(trainer, recorded))
            )
        else:
            stack.enter_context(
                replaced(trainer, "rollout_func", _output_of(recorded.output, use_first_turns))
            )
        yield


def _pools(trainer: Any, recorded: Recorded) -> dict[Any, list[Observed]]:
    """Return as many stand-ins for each environment as TRL will draw, which resets every one that it draws."""
    several = trainer._multi_environment
    drawn = Counter(row.get("environment") if several else None for row in recorded.inputs)
    return {
        name: [Observed() for _ in range(drawn[name])] for name in trainer.environment_factories
    }


def _with_prompts(trainer: Any, recorded: Recorded) -> Callable:
    generate = trainer._generate

    def generate_recorded(prompts: list[Any]) -> tuple:
        # TRL passes this list to the rewards; these have the environments' observations
        prompts[:] = recorded.prompts
        if recorded.environments is not None:
            trainer.environments = recorded.environments
        return generate(prompts)

    return generate_recorded


def _with_tokens(trainer: Any, recorded: Recorded) -> Callable:
    tokenize = trainer._tokenize_prompts

    def recorded_tokens(prompts: list[Any]) -> tuple:
        _, images, fields = tokenize(prompts)
        return recorded.turns[0].prompts, images, fields

    return recorded_tokens


def _loop_of(trainer: Any, loop: ToolLoop) -> Callable:
    def recorded_loop(
        prompts: list,
        prompt_ids: list,
        completion_ids: list,
        completions: list,
        logprobs: Any,
        *images: Any,
    ) -> tuple:
        for row, (first, whole) in enumerate(zip(completion_ids, loop.completion_ids, strict=True)):
            if whole[: len(first)] != first[: len(whole)]:
                raise RolloutError(
                    f"{trainer.host.topology}: row {row} of the round begins with other tokens than its rollout that "
                    "ran ahead. A subclass or a callback changes completions; use `max_staleness=0` with it."
                )
        return tuple(getattr(loop, field.name) for field in fields(loop))

    return recorded_loop


def _output_of(output: dict[str, Any], use_first_turns: Callable[[], None]) -> Callable:
    def recorded_output(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        use_first_turns()
        return output

    return recorded_output
