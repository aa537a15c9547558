"""The scripts in examples/recipes/: each trains some steps with the fake engine, as a user would start it."""

import json
import runpy
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from forks import forked

from trl_multinode.testing.faults import HOOK
from trl_multinode.testing.forking import forked_fake_engine, template_pid
from trl_multinode.testing.models import save_tiny
from trl_multinode.testing.waiting import wait_until

import_module("trl.rewards.accuracy_rewards")  # sets a variable of the environment: let that be before the tests

RECIPES = Path(__file__).parents[1] / "examples" / "recipes"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
REWARD = """
import json

def letters(completions, completion_ids, trainer_state=None, **_):
    with open("rounds.jsonl", "a") as file:
        file.write(json.dumps(completion_ids) + "\\n")
    return [float(len(set(completion[0]["content"]))) for completion in completions]
"""


def recipe(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(RECIPES / f"{name}.py")))


def train(name: str, folder: Path, monkeypatch, *more: str) -> tuple[list[dict], list[list[list[int]]], str]:
    """Run a recipe in one process. Returns its logs, the completions of each round, and its output."""
    save_tiny(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "questions.jsonl").write_text("\n".join(json.dumps({"question": f"{i} + {i} ="}) for i in range(32)))
    (folder / "my_rewards.py").write_text(REWARD)
    words = f"""
        --model_name_or_path {folder}/model --dataset_name {folder}/questions.jsonl --prompt_column question
        --reward_funcs my_rewards:letters --output_dir {folder}/run --use_cpu true --bf16 false --report_to none
        --gradient_checkpointing false --disable_tqdm true --max_steps 4 --save_steps 4 --logging_steps 1
        --per_device_train_batch_size 8 --num_generations 4 --rollout_seed 1
    """.split()
    monkeypatch.setenv(HOOK, forked_fake_engine())
    monkeypatch.chdir(folder)

    def body(rank: int) -> bool:
        sys.argv = [name, *words, *more]
        runpy.run_path(str(RECIPES / f"{name}.py"), run_name="__main__")
        return True

    with forked(body, 1, folder) as (one,):
        assert one.wait(300.0) == 0, one.text
    wait_until(lambda: not psutil.Process(template_pid()).children(), 30.0)  # the engine ends with its owner
    logs = json.loads((folder / "run" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return logs, rounds, one.text


# ---- adaptive length


def adaptive(**more) -> SimpleNamespace:
    return SimpleNamespace(**{"first_length": 100, "cut_share": 0.1, "growth": 2.0} | more)


def cut(*shares: float) -> list[dict]:
    return [{"completions/clipped_ratio": share} for share in shares]


@pytest.mark.parametrize(
    ("logs", "length"),
    [
        ([], 100),
        (cut(0.1, 0.0), 100),
        (cut(0.2), 200),
        (cut(0.2, 0.9), 200),  # the second round may have had the old limit
        (cut(0.2, 0.9, 0.9), 400),
        (cut(0.5, 0.0, 0.5, 0.0, 0.5), 700),  # the longest
        ([*cut(0.2), {"eval_reward": 1.0}, *cut(0.9, 0.9)], 400),
    ],
)
def test_the_limit_is_a_function_of_the_logs(logs, length):
    assert recipe("adaptive_length").length_after(logs, adaptive(), longest=700) == length


def test_a_first_limit_above_the_longest_is_the_longest():
    assert recipe("adaptive_length").length_after([], adaptive(), longest=50) == 50


def test_completions_grow_while_they_are_cut(tmp_path, monkeypatch):
    logs, rounds, text = train(
        "adaptive_length",
        tmp_path,
        monkeypatch,
        "--first_length",
        "4",
        "--growth",
        "2",
        "--max_completion_length",
        "32",
    )
    assert [max(map(len, ids)) for ids in rounds] == [4, 8, 8, 16]
    assert [entry["completions/max_length"] for entry in logs[:4]] == [4, 8, 8, 16]
    assert "Completions may now have 8 tokens (before: 4)." in text and "16 tokens (before: 8)" in text


# ---- drafts


@pytest.mark.parametrize(
    ("scores", "number", "kept"),
    [([3, 1, 2, 0], 2, [0, 3]), ([1, 1, 1, 1], 2, [0, 3]), ([5, 4, 3, 2, 1, 0], 3, [0, 1, 5]), ([2, 1], 2, [0, 1])],
)
def test_the_best_and_the_worst_drafts_are_kept(scores, number, kept):
    assert recipe("two_stage").best_and_worst(scores, number) == kept


class Generation:
    """Engines that count up, and end a completion whose token is 0."""

    max_tokens = 6

    def __init__(self):
        self.calls = []

    def generate(self, prompts, images, num_generations):
        self.calls.append((prompts, self.max_tokens))
        rows = [[(prompt[-1] + 1 + step) % 10 for step in range(self.max_tokens)] for prompt in prompts]
        rows = [row[: row.index(0) + 1] if 0 in row else row for row in rows]
        return prompts, rows, [[[-float(token)] for token in row] for row in rows], None


class Numbers:
    """A tokenizer of numbers. In a group, the first and the third text are better than the others."""

    eos_token_id = 0

    def __call__(self, text):
        return {"input_ids": [[int(word) for word in each.split()] for each in text]}

    def batch_decode(self, rows, **_):
        return ["a b" if place % 2 == 0 else "a a" for place, _ in enumerate(rows)]


def test_only_kept_drafts_without_an_end_are_finished():
    generation = Generation()
    trainer = SimpleNamespace(
        vllm_generation=generation, processing_class=Numbers(), model=SimpleNamespace(training=True)
    )
    arguments = SimpleNamespace(drafts=2, draft_tokens=2)
    found = recipe("two_stage").two_stages(arguments, ["1", "1", "8", "8"], trainer)
    assert found["prompt_ids"] == [[1], [1], [8], [8]]
    assert found["completion_ids"] == [[2, 3, 4, 5, 6, 7]] * 2 + [[9, 0]] * 2
    assert found["logprobs"] == [[-2.0, -3.0, -4.0, -5.0, -6.0, -7.0]] * 2 + [[-9.0, -0.0]] * 2
    assert [(len(asked), limit) for asked, limit in generation.calls] == [(8, 2), (2, 4)]
    assert generation.max_tokens == 6
    trainer.model.training = False  # plain samples, in two calls
    assert len(recipe("two_stage").two_stages(arguments, ["1"], trainer)["completion_ids"]) == 1
    assert [len(asked) for asked, _ in generation.calls[2:]] == [1, 1]


def test_two_stages_train(tmp_path, monkeypatch):
    logs, rounds, _ = train(
        "two_stage", tmp_path, monkeypatch, "--drafts", "2", "--draft_tokens", "3", "--max_completion_length", "7"
    )
    assert [len(ids) for ids in rounds] == [8] * 4 and {max(map(len, ids)) for ids in rounds} == {7}
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-3 for entry in logs[:4])
    assert all(entry["perf/generate_s"] > 0 for entry in logs[:4])
