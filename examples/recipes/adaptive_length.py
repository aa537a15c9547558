"""GRPO whose limit of the completion length grows while many completions are cut. Run it as examples/grpo.py:

    accelerate launch --config_file accelerate_configs/4node.yaml --machine_rank K --main_process_ip HOST0 \
        examples/recipes/adaptive_length.py --first_length 1024 --max_completion_length 16384 \
        --model_name_or_path Qwen/Qwen3-4B --dataset_name trl-lib/DeepMath-103K --reward_funcs accuracy_reward

Early completions are often cut, however long the limit is: they repeat themselves. A short limit makes these steps
cheap. `max_completion_length` stays the limit for everything that is computed once, such as the engines' context.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback

from trl_multinode.examples.grpo import GRPOScriptArguments, make_parser, train


@dataclass(kw_only=True)
class AdaptiveArguments(GRPOScriptArguments):
    """Arguments of examples/grpo.py, and those of the limit."""

    first_length: int = field(
        default=1024, metadata={"help": "Limit of the completion length at the first step."}
    )
    cut_share: float = field(
        default=0.1, metadata={"help": "Share of cut completions above which the limit grows."}
    )
    growth: float = field(default=1.5, metadata={"help": "Factor by which it grows."})


def length_after(logs: Iterable[dict[str, Any]], arguments: AdaptiveArguments, longest: int) -> int:
    """Compute the limit from the logs so far, so that a resumed run continues with the limit that it had."""
    length, waits = min(arguments.first_length, longest), False
    for entry in logs:
        cut = entry.get("completions/clipped_ratio")
        if cut is None:  # the log of an evaluation or of the end
            continue
        if cut > arguments.cut_share and not waits:
            length, waits = min(longest, round(length * arguments.growth)), True
        else:
            waits = False  # with `max_staleness=1` the round after a growth still had the old limit
    return length


class AdaptiveLength(TrainerCallback):
    """Set the engines' limit after every log. All ranks have the same logs, so they set the same limit."""

    def __init__(self, generation: Any, arguments: AdaptiveArguments):
        self._generation, self._arguments = generation, arguments
        self._longest = generation.max_completion_length

    def on_train_begin(self, args, state, control, **_):
        self._generation.max_completion_length = length_after(
            state.log_history, self._arguments, self._longest
        )

    def on_log(self, args, state, control, **_):
        before = self._generation.max_completion_length
        self.on_train_begin(args, state, control)
        if state.is_world_process_zero and self._generation.max_completion_length != before:
            now = self._generation.max_completion_length
            print(f"Completions may now have {now} tokens (before: {before}).", flush=True)


def build(arguments: AdaptiveArguments, **keywords: Any) -> Any:
    from trl_multinode import GRPOTrainer

    if keywords["args"].max_staleness > 1:
        raise ValueError(
            "`max_staleness` of 2 or more opens its requests with one limit for the whole run."
        )
    trainer = GRPOTrainer(**keywords)
    trainer.add_callback(AdaptiveLength(trainer.vllm_generation, arguments))
    return trainer


if __name__ == "__main__":
    parser = make_parser(arguments=AdaptiveArguments)
    train(*parser.parse_args_and_config(), build)
