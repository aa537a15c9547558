"""GRPO on candidates of two stages: many short drafts, of which only some are finished. Run it as examples/grpo.py:

    accelerate launch --config_file accelerate_configs/4node_4+4.yaml --machine_rank K --main_process_ip HOST0 \
        examples/recipes/two_stage.py --drafts 4 --draft_tokens 256 --max_completion_length 8192 \
        --model_name_or_path Qwen/Qwen3-4B --dataset_name trl-lib/DeepMath-103K --reward_funcs accuracy_reward

Each prompt gets `drafts` x `num_generations` drafts. `score` rates them; the best and the worst drafts of a group are
finished and trained, because equal rewards teach nothing. Engines make drafts for little: an engine that is not full
makes more rows in nearly the same time. Training costs the same as without drafts.

The completions that are trained are not plain samples any more: which ones are kept depends on `score`. Compare the
reward on an `eval_dataset`, where every prompt has plain samples, with that of a run without drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from trl_multinode.examples.grpo import GRPOScriptArguments, make_parser, train


@dataclass(kw_only=True)
class TwoStageArguments(GRPOScriptArguments):
    """Arguments of examples/grpo.py, and those of the drafts."""

    drafts: int = field(default=4, metadata={"help": "Drafts for each completion that is trained."})
    draft_tokens: int = field(default=256, metadata={"help": "Tokens of a draft."})


@dataclass
class Candidate:
    """One draft, or the completion that became of it."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def score(text: str) -> float:
    """Rate a draft. Replace it: a small reward model, a check of the format, the engine's own confidence."""
    words = text.split()
    return len(set(words)) / len(words) if words else 0.0  # how little it repeats itself


def best_and_worst(scores: Sequence[float], number: int) -> list[int]:
    """Return the indices of the `number` drafts with the highest and lowest scores, one half each, in order."""
    ranked = sorted(range(len(scores)), key=lambda index: (scores[index], index))
    low = number // 2
    return sorted(ranked[:low] + ranked[len(ranked) - (number - low) :])


def generate(generation: Any, prompts: list[list[int]], max_tokens: int) -> list[Candidate]:
    """Generate one completion for each prompt, with a limit of its own."""
    limit, generation.max_completion_length = generation.max_completion_length, max_tokens
    try:
        _, tokens, logprobs, _ = generation.generate(
            prompts=prompts, images=None, num_generations=1
        )
    finally:
        generation.max_completion_length = limit
    rows = zip(prompts, tokens, logprobs, strict=True)
    return [
        Candidate(prompt, list(ids), [token[0] for token in values]) for prompt, ids, values in rows
    ]


def finish(generation: Any, candidates: list[Candidate], limit: int, end: int) -> None:
    """Continue the candidates that have no end, up to `limit` tokens."""
    cut = [each for each in candidates if each.tokens[-1] != end and len(each.tokens) < limit]
    if cut:
        room = limit - len(cut[0].tokens)  # all cut drafts have the same length
        for each, more in zip(
            cut, generate(generation, [c.prompt + c.tokens for c in cut], room), strict=True
        ):
            each.tokens += more.tokens
            each.logprobs += more.logprobs


def tokenize(prompts: list, tokenizer: Any) -> list[list[int]]:
    if isinstance(prompts[0], str):
        return tokenizer(text=prompts)["input_ids"]
    return tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]


def two_stages(arguments: TwoStageArguments, prompts: list, trainer: Any) -> dict[str, list]:
    """Make this rank's completions, as a `rollout_func` of TRL."""
    generation, tokenizer = trainer.vllm_generation, trainer.processing_class
    limit, drafts = (
        generation.max_completion_length,
        arguments.drafts if trainer.model.training else 1,
    )
    chosen: list[Candidate] = []
    ids = tokenize(prompts, tokenizer)
    made = iter(
        generate(
            generation,
            [row for row in ids for _ in range(drafts)],
            min(arguments.draft_tokens, limit),
        )
    )
    for _, group in groupby(ids):
        number = len(list(group))
        candidates = [next(made) for _ in range(number * drafts)]
        texts = tokenizer.batch_decode(
            [each.tokens for each in candidates], skip_special_tokens=True
        )
        chosen += [
            candidates[index] for index in best_and_worst([score(text) for text in texts], number)
        ]
    finish(generation, chosen, limit, tokenizer.eos_token_id)
    return {
        "prompt_ids": [each.prompt for each in chosen],
        "completion_ids": [each.tokens for each in chosen],
        "logprobs": [each.logprobs for each in chosen],
    }


def build(arguments: TwoStageArguments, **keywords: Any) -> Any:
    from trl_multinode import GRPOTrainer

    return GRPOTrainer(**keywords, rollout_func=partial(two_stages, arguments))


if __name__ == "__main__":
    parser = make_parser(arguments=TwoStageArguments)
    train(*parser.parse_args_and_config(), build)
