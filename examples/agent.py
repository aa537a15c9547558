"""GRPO of an agent on many nodes: a completion is a treasure hunt of several turns. Run this on every node, K = 0 to 3:

    accelerate launch --config_file accelerate_configs/4node.yaml --machine_rank K --main_process_ip HOST0 \
        examples/agent.py --model_name_or_path Qwen/Qwen3-4B --max_tool_calling_iterations 3 --tool_timeout 60 \
        --max_completion_length 2048 --output_dir outputs/agent

The prompt names a box. Its note names a second box, which holds the treasure, and the answer is the treasure's name.
Nothing but two calls of the tool `open_box` leads there: a guess is right in one case of eight. `docs/agents.md` has the
rules for tools and environments, and the result of a run. `make demo MODE=agent` runs this script on two nodes of one
machine, without a GPU.
"""

import itertools
import random
import re
from typing import Any

from datasets import Dataset

from trl_multinode import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "white", "black")
TREASURES = ("ruby", "pearl", "crown", "coin", "ring", "cup", "sword", "map")
NUM_HELD_OUT = 48  # of 448 hunts
QUESTION = "Open boxes and follow the notes. Which treasure is at the end? Answer with one word."


class TreasureHunt:
    """Environment of one completion. Its public methods are the model's tools; TRL calls `reset` and `get_reward`."""

    def reset(self, path: list[str], treasure: str, **_: Any) -> str:
        """Begin a hunt with the columns of the dataset's row, and return a text that is appended to the prompt."""
        self._path, self._treasure = path, treasure
        self._opened: set[str] = set()
        return f" Start with the {path[0]} box."

    def open_box(self, color: str) -> str:
        """
        Open a box and read what is inside.

        Args:
            color: The color of the box.

        Returns:
            The content of the box.
        """
        if color not in COLORS:
            raise ValueError("There is no such box.")  # the model reads this as the tool's answer
        self._opened.add(color)
        if color not in self._path:
            return "The box is empty."
        following = self._path[self._path.index(color) + 1 :]
        return f"A note: open the {following[0]} box." if following else f"The treasure: a {self._treasure}."

    def get_reward(self) -> float:
        """Return a quarter for each box of the path that was opened."""
        return 0.25 * len(self._opened.intersection(self._path))


def right_treasure(completions: list[list[dict]], treasure: list[str], log_metric: Any, **_: Any) -> list[float]:
    """Return a half for each completion whose last message names the right treasure and no other one."""
    calls = [any(message["role"] == "tool" for message in completion) for completion in completions]
    log_metric("hunt/called_a_tool", sum(calls) / len(calls))
    named = [set(re.findall(r"\w+", completion[-1]["content"].lower())) & set(TREASURES) for completion in completions]
    return [0.5 * (words == {right}) for words, right in zip(named, treasure, strict=True)]


def make_datasets(seed: int = 0) -> tuple[Dataset, Dataset]:
    """Return the hunts for training and the held-out ones: all paths of two boxes, each with all treasures."""
    hunts = [
        {"prompt": [{"role": "user", "content": QUESTION}], "path": list(path), "treasure": treasure}
        for path in itertools.permutations(COLORS, 2)
        for treasure in TREASURES
    ]
    random.Random(seed).shuffle(hunts)
    return Dataset.from_list(hunts[NUM_HELD_OUT:]), Dataset.from_list(hunts[:NUM_HELD_OUT])


def make_trainer(config: GRPOConfig, model: Any, **keywords: Any) -> GRPOTrainer:
    """Return the trainer of the hunts; `keywords` are further ones of [`GRPOTrainer`]."""
    train_set, held_out = make_datasets()
    return GRPOTrainer(
        model=model,
        reward_funcs=right_treasure,  # besides the environment's own `get_reward`
        args=config,
        train_dataset=train_set,
        eval_dataset=held_out,
        environment_factory=TreasureHunt,
        **keywords,
    )


def main() -> None:
    config, model_args = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()
    trainer = make_trainer(config, model_args.model_name_or_path)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
