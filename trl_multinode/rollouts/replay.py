"""A recorded round in TRL's code: what ran ahead is not run again, and everything else of the round is TRL's."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ..errors import RolloutError
from ..libraries import replaced
from .recorded import Recorded, joined_loop, joined_output


class Observed:
    """Stands in the pool of environments for one whose `reset` has run."""

    def reset(self, **row: Any) -> None:
        """Do nothing: the recorded prompts hold what `reset` returned."""


class Replay:
    """
    Replay of recorded rollouts in TRL's code of one round. Every rank opens it, each with its own ones.

    TRL's `_generate` still calls `generate` for the first turns (which returns the recorded rows) and computes the
    metrics; its tool loop, the `reset` of environments and the `rollout_func` are replaced. The tokens of the prompts
    are the recorded ones, because a chat template may write the date.

    Args:
        trainer ([`~trl_multinode.MultiNodeGRPOTrainer`]):
            Trainer whose `_generate_and_score_completions` runs inside.
        groups (`Sequence[Recorded]`):
            All groups of the round, in their order.
    """

    def __init__(self, trainer: Any, groups: Sequence[Recorded]):
        self._trainer, self._groups = trainer, groups
        self._generate, self._tokenize = trainer._generate, trainer._tokenize_prompts
        self._loops = [one.tools for one in groups if one.tools is not None]
        self._outputs = [one.output for one in groups if one.output is not None]

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let TRL's code use the rollouts while the context is open."""
        trainer = self._trainer
        with ExitStack() as stack:
            enter = stack.enter_context
            if self._groups[0].environments is not None:
                enter(replaced(trainer, "_environment_pool", self._pools()))
            enter(replaced(trainer, "_generate", self._generate_recorded))
            if self._loops:
                enter(replaced(trainer, "_tool_call_loop", self._recorded_loop))
            if self._outputs:
                enter(replaced(trainer, "rollout_func", self._recorded_output))
            else:
                enter(replaced(trainer, "_tokenize_prompts", self._recorded_tokens))
            yield

    def _pools(self) -> dict[Any, list[Observed]]:
        """Return as many stand-ins for each environment as TRL will draw, which resets every one that it draws."""
        trainer = self._trainer
        rows = [row for one in self._groups for row in one.inputs]
        several = trainer._multi_environment
        drawn = Counter(row.get("environment") if several else None for row in rows)
        return {
            name: [Observed() for _ in range(drawn[name])] for name in trainer.environment_factories
        }

    def _generate_recorded(self, prompts: list[Any]) -> tuple:
        groups = self._groups
        # TRL passes this list to the rewards; these have the environments' observations
        prompts[:] = [prompt for one in groups for prompt in one.prompts]
        if groups[0].environments is not None:
            found = [environment for one in groups for environment in one.environments or ()]
            self._trainer.environments = found
        return self._generate(prompts)

    def _recorded_tokens(self, prompts: list[Any]) -> tuple:
        _, images, fields = self._tokenize(prompts)
        tokens = [prompt for one in self._groups for prompt in one.first_turn.prompts]
        return tokens, images, fields

    def _recorded_loop(
        self, prompts: list, prompt_ids: list, completion_ids: list, *_: Any
    ) -> tuple:
        loop = joined_loop(self._loops)
        for row, (first, whole) in enumerate(zip(completion_ids, loop.completion_ids, strict=True)):
            if whole[: len(first)] != first[: len(whole)]:
                raise RolloutError(
                    f"{self._trainer.host.topology}: row {row} of the round begins with other tokens than its rollout "
                    "that ran ahead. A subclass or a callback changes completions; use `max_staleness=0` with it."
                )
        return loop

    def _recorded_output(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        # TRL does not call `generate`, which marks the rows as used
        trainer.vllm_generation.use_first_turns()
        return joined_output(self._outputs)
