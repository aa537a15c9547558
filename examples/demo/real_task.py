"""Task of `make demo MODE=real`: sums that `reasoning-gym` makes and scores, without a hub.

    prompt "State the final answer to the following arithmetic problem: 4 + 3 =" -> answer "7"

The scorer gives 1 for the right number alone, and len(number) / len(text) for a text that contains it.
"""

import reasoning_gym
from datasets import Dataset

TASK = "chain_sum"
# 200 different sums and differences
SETTINGS = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
}
SIZE = 2000  # draws, which contain nearly all 200


def make_datasets(num_held_out: int, seed: int = 0) -> tuple[Dataset, Dataset]:
    """Make training and held-out prompts with their answers, all prompts different.

    Args:
        num_held_out (`int`):
            Number of prompts that are not trained on.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws.
    """
    entries = reasoning_gym.create_dataset(TASK, seed=seed, size=SIZE, **SETTINGS)
    answers = {entry["question"]: entry["answer"] for entry in entries}
    rows = [{"prompt": question, "answer": answer} for question, answer in answers.items()]
    return Dataset.from_list(rows[num_held_out:]), Dataset.from_list(rows[:num_held_out])


def score(completion: str, answer: str) -> float:
    """Return `reasoning-gym`'s own score of a completion, 0 to 1."""
    return reasoning_gym.get_score_answer_fn(TASK)(completion.strip(), {"answer": answer})


def sum_reward(completions: list[str], answer: list[str], **_) -> list[float]:
    """Score completions, as a reward function of TRL."""
    return [score(completion, right) for completion, right in zip(completions, answer, strict=True)]


def best_constant_score(dataset: Dataset) -> float:
    """Return the highest mean reward of a single answer that is given to every prompt."""
    answers = dataset["answer"]
    return max(
        sum(score(constant, right) for right in answers) / len(answers) for constant in set(answers)
    )
