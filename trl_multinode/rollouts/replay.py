"""A recorded round in TRL's code: what ran ahead is not run again, and everything else of the round is TRL's."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ..errors import RolloutError
from ..libraries import replaced
from .recorded import Recorded, ToolLoop, joined_loop, joined_output


class Observed:
    """Stands in the pool of environments for one whose `reset` has run."""

    def reset(self, **row: Any) -> None:
        """Do nothing: the recorded prompts hold what `reset` returned."""


@contextmanager
def replayed(
    trainer: Any, groups: Sequence[Recorded], use_first_turns: Callable[[], None]
) -> Iterator[None]:
    """
    Let TRL's code of one round use recorded rollouts. Every rank opens it, each with its own ones.

    TRL's `_generate` still calls `generate` for the first turns (which returns the recorded rows) and computes the
    metrics; its tool loop, the `reset` of environments and the `rollout_func` are replaced. The tokens of the prompts
    are the recorded ones, because a chat template may write the date.

    Args:
        trainer ([`~trl_multinode.MultiNodeGRPOTrainer`]):
            Trainer whose `_generate_and_score_completions` runs inside.
        groups (`Sequence[Recorded]`):
            All groups of the round, in their order.
        use_first_turns (`Callable`):
            Function that marks the rows as used, where TRL does not call `generate`.
    """
    loops = [one.tools for one in groups if one.tools is not None]
    outputs = [one.output for one in groups if one.output is not None]
    with ExitStack() as stack:
        if groups[0].environments is not None:
            stack.enter_context(replaced(trainer, "_environment_pool", _pools(trainer, groups)))
        stack.enter_context(replaced(trainer, "_generate", _with_prompts(trainer, groups)))
        if loops:
            loop = _loop_of(trainer, joined_loop(loops))
            stack.enter_context(replaced(trainer, "_tool_call_loop", loop))
        if outputs:
            output = _output_of(joined_output(outputs), use_first_turns)
            stack.enter_context(replaced(trainer, "rollout_func", output))
        else:
            stack.enter_context(
                replaced(trainer, "_tokenize_prompts", _with_tokens(trainer, groups))
            )
        yield


def _pools(trainer: Any, groups: Sequence[Recorded]) -> dict[Any, list[Observed]]:
    """Return as many stand-ins for each environment as TRL will draw, which resets every one that it draws."""
    several = trainer._multi_environment
    rows = [row for one in groups for row in one.inputs]
    drawn = Counter(row.get("environment") if several else None for row in rows)
    return {
        name: [Observed() for _ in range(drawn[name])] for name in trainer.environment_factories
    }


def _with_prompts(trainer: Any, groups: Sequence[Recorded]) -> Callable:
    generate = trainer._generate

    def generate_recorded(prompts: list[Any]) -> tuple:
        # TRL passes this list to the rewards; these have the environments' observations
        prompts[:] = [prompt for one in groups for prompt in one.prompts]
        if groups[0].environments is not None:
            trainer.environments = [found for one in groups for found in one.environments or ()]
        return generate(prompts)

    return generate_recorded


def _with_tokens(trainer: Any, groups: Sequence[Recorded]) -> Callable:
    tokenize = trainer._tokenize_prompts

    def recorded_tokens(prompts: list[Any]) -> tuple:
        _, images, fields = tokenize(prompts)
        tokens = [prompt for one in groups for prompt in one.first_turn.prompts]
        return tokens, images, fields

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
        return loop

    return recorded_loop


def _output_of(output: dict[str, Any], use_first_turns: Callable[[], None]) -> Callable:
    def recorded_output(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        use_first_turns()
        return output

    return recorded_output
