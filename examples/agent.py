"""GRPO of an agent on many nodes: a completion is a hunt of several turns. Run this on every node, K = 0 to 3:

    accelerate launch --config_file accelerate_configs/4node.yaml --machine_rank K --main_process_ip HOST0 \
        examples/agent.py --model_name_or_path Qwen/Qwen3-4B --max_tool_calling_iterations 3 --call_timeout 60 \
        --max_completion_length 2048 --output_dir outputs/agent

The prompt names a box; a note in it names a second box, whose note says where the treasure is. The answer is the color
of that third box. Two calls of the tool `open_box` lead there; a guess is right in one case of seven.
`docs/use/agents.md` has the rules for tools and environments, and a run of `make demo MODE=agent`: this trainer on two
nodes of one machine, without a GPU.
"""

import itertools
import random
import re
from typing import Any

from datasets import Dataset

from trl_multinode import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "white", "black")
NUM_HELD_OUT = 48  # of 336 hunts
QUESTION = "Follow the notes in the boxes. Which box has the treasure? Answer with its color."


class TreasureHunt:
    """Environment of one completion. Its public methods are the model's tools; TRL calls `reset` and `get_reward`."""

    def reset(self, path: list[str], **_: Any) -> str:
        """Begin a hunt with the columns of the dataset's row, and return a text that is appended to the prompt."""
        self._path = path
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
        first, second, last = self._path
        notes = {
            first: f"A note: open the {second} box.",
            second: f"A note: the treasure is in the {last} box.",
            last: "The treasure!",
        }
        return notes.get(color, "Nothing.")

    def get_reward(self) -> float:
        """Return a quarter for each note that was read."""
        return 0.25 * len(self._opened.intersection(self._path[:2]))


def right_box(
    completions: list[list[dict]], path: list[list[str]], log_metric: Any, **_: Any
) -> list[float]:
    """Return a half for each completion that ends with an answer in which only the right box is named."""
    called = [
        any(message["role"] == "tool" for message in completion) for completion in completions
    ]
    log_metric("hunt/called_a_tool", sum(called) / len(called))
    last = [completion[-1] for completion in completions]
    # not a tool's
    answers = [message["content"] if message["role"] == "assistant" else "" for message in last]
    named = [set(re.findall(r"\w+", answer.lower())) & set(COLORS) for answer in answers]
    return [0.5 * (colors == {boxes[-1]}) for colors, boxes in zip(named, path, strict=True)]


def make_datasets(seed: int = 0) -> tuple[Dataset, Dataset]:
    """Return the hunts for training and the held-out ones: all paths over three of the boxes."""
    prompt = [{"role": "user", "content": QUESTION}]
    hunts = [{"prompt": prompt, "path": list(path)} for path in itertools.permutations(COLORS, 3)]
    random.Random(seed).shuffle(hunts)
    return Dataset.from_list(hunts[NUM_HELD_OUT:]), Dataset.from_list(hunts[:NUM_HELD_OUT])


def make_trainer(config: GRPOConfig, model: Any, **keywords: Any) -> GRPOTrainer:
    """Return the trainer of the hunts; `keywords` are further ones of [`GRPOTrainer`]."""
    train_set, held_out = make_datasets()
    return GRPOTrainer(
        model=model,
        reward_funcs=right_box,  # besides the environment's own `get_reward`
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
