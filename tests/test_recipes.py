"""What the scripts in examples/recipes/ compute, and its files. tests/e2e/test_recipe_launches.py runs them."""

import importlib.util
import runpy
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from check_kit import CONFIGS, ROOT

from trl_multinode.tools.check import check
from trl_multinode.tools.grpo import MODULE, split

pytestmark = pytest.mark.nightly  # examples

# sets a variable of the environment: let that be before the tests
import_module("trl.rewards.accuracy_rewards")

RECIPES = Path(__file__).parents[1] / "examples" / "recipes"


def recipe(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(RECIPES / f"{name}.py")))


# ---- files for `--config`

NODES = ["--machine_rank", "0", "--main_process_ip", "node0"]
AGENT = "agent"  # it has a script of its own


def test_each_file_names_the_command_that_launches_it():
    files = {path.stem: path for path in RECIPES.glob("*.yaml")}
    assert set(files) == {"1.5b", "8b", "32b", AGENT, "vision"}
    for name, path in files.items():
        assert f"--config examples/recipes/{name}.yaml" in path.read_text()
        assert ("accelerate_config" in yaml.safe_load(path.read_text())) == (name != AGENT)


@pytest.mark.parametrize(
    ("name", "processes", "generations"),
    [("1.5b", 6, 48), ("8b", 12, 48), ("32b", 24, 48), ("vision", 7, 28), (AGENT, 7, 28)],
)
def test_the_check_of_a_file_finds_no_problem(name, processes, generations, monkeypatch):
    find = importlib.util.find_spec
    # the reward's package is not installed where the tests run
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda module, *a: find("json" if module == "math_verify" else module, *a),
    )
    path = str(RECIPES / f"{name}.yaml")
    with ExitStack() as stack:
        if name == AGENT:
            config, flags = str(CONFIGS / "1node.yaml"), NODES
            script = [str(ROOT / "examples" / "agent.py"), "--config", path]
        else:
            words, found = split(["--config", path, *NODES], launch_command_parser(), stack)
            at = found.index("--config_file")
            config, flags = found[at + 1], [*found[:at], *found[at + 2 :]]
            script = ["--module", MODULE, *words]
        launch, problems = check(config, [*flags, *script], port=False)
    assert problems == [] and launch.num_ranks == processes
    batch = launch.script.batch
    rows = processes * batch.per_device_train_batch_size * batch.gradient_accumulation_steps
    assert rows == generations * batch.num_generations


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
    assert recipe("adaptive_length").length_after([], adaptive(), longest=50) == 50


# ---- drafts


@pytest.mark.parametrize(
    ("scores", "number", "kept"),
    [
        ([3, 1, 2, 0], 2, [0, 3]),
        ([1, 1, 1, 1], 2, [0, 3]),
        ([5, 4, 3, 2, 1, 0], 3, [0, 1, 5]),
        ([2, 1], 2, [0, 1]),
    ],
)
def test_the_best_and_the_worst_drafts_are_kept(scores, number, kept):
    assert recipe("two_stage").best_and_worst(scores, number) == kept


class Generation:
    """Engines that count up, and end a completion whose token is 0."""

    max_completion_length = 6

    def __init__(self):
        self.calls = []

    def generate(self, prompts, images, num_generations):
        self.calls.append((prompts, self.max_completion_length))
        rows = [
            [(prompt[-1] + 1 + step) % 10 for step in range(self.max_completion_length)]
            for prompt in prompts
        ]
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
    assert generation.max_completion_length == 6
    trainer.model.training = False  # plain samples, in two calls
    assert len(recipe("two_stage").two_stages(arguments, ["1"], trainer)["completion_ids"]) == 1
    assert [len(asked) for asked, _ in generation.calls[2:]] == [1, 1]
