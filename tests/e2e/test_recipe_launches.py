"""examples/agent.py and examples/recipes/, launched as a user would, on two nodes with the fake engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from waiting import HANG_S

from multinode_kit.faults import FAKE, HOOK
from multinode_kit.models import save_tiny
from multinode_kit.nodes import Nodes

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = EXAMPLES / "recipes"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
REWARD = """
import json
import os

def letters(completions, completion_ids, **_):
    with open(f"{os.environ['ROUNDS']}{os.environ['RANK']}.jsonl", "a") as file:
        file.write(json.dumps(completion_ids) + "\\n")
    return [float(len(set(completion[0]["content"]))) for completion in completions]
"""
pytestmark = [pytest.mark.zero3, pytest.mark.two_node, pytest.mark.nightly]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    save_tiny(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "questions.jsonl").write_text(
        "\n".join(json.dumps({"question": f"{i} + {i} ="}) for i in range(64))
    )
    (folder / "my_rewards.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # the ranks look for `my_rewards` there
        with Nodes(2, 1, folder=folder, env={HOOK: FAKE}, forked=True) as nodes:
            yield nodes


def train(
    nodes: Nodes, name: str, *more: str, run: str = "run"
) -> tuple[list[dict], list[list[list[list[int]]]]]:
    """Launch a script of recipes. Returns its logs, and for each rank the completions of every round."""
    return launch(nodes, RECIPES / f"{name}.py", f"{name}-{run}", *more)


def launch(
    nodes: Nodes, script: Path, run: str, *more: str
) -> tuple[list[dict], list[list[list[list[int]]]]]:
    folder = nodes.folder
    words = f"""
        --model_name_or_path {folder}/model --dataset_name {folder}/questions.jsonl --prompt_column question
        --reward_funcs my_rewards:letters --output_dir {folder}/{run} --use_cpu true --bf16 false --report_to none
        --gradient_checkpointing false --disable_tqdm true --max_steps 4 --save_steps 4 --logging_steps 1
        --per_device_train_batch_size 8 --num_generations 4 --rollout_seed 1
    """.split()
    nodes.launch(script, *words, *more, env={"ROUNDS": f"{folder}/{run}-rounds"})
    assert nodes.wait(timeout_s=HANG_S) == [0, 0], nodes.rank_log(0)[-3000:]
    logs = json.loads((folder / run / "checkpoint-4" / "trainer_state.json").read_text())[
        "log_history"
    ]
    files = [folder / f"{run}-rounds{rank}.jsonl" for rank in range(2)]
    return logs, [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def test_completions_grow_on_all_ranks_while_they_are_cut(nodes):
    limits = ["--first_length", "4", "--growth", "2", "--max_completion_length", "32"]
    logs, ranks = train(nodes, "adaptive_length", *limits)
    assert [[max(map(len, ids)) for ids in rounds] for rounds in ranks] == [[4, 8, 8, 16]] * 2
    assert [entry["completions/max_length"] for entry in logs[:4]] == [4, 8, 8, 16]
    text = nodes.rank_log(0)
    assert "8 tokens (before: 4)" in text and "16 tokens (before: 8)" in text
    assert "8 tokens (before: 4)" not in nodes.rank_log(1)


@pytest.mark.parametrize("staleness", [0, 1])
def test_two_stages_train_rows_whose_log_probs_are_the_engines(nodes, staleness):
    """One round ahead, an engine scores the rows that are trained, and not the drafts that were made first."""
    limits = ["--drafts", "2", "--draft_tokens", "3", "--max_completion_length", "7"]
    limits += ["--max_staleness", str(staleness), "--learning_rate", "1e-3"]
    logs, ranks = train(nodes, "two_stage", *limits, run=f"ahead-{staleness}")
    assert [entry["staleness/rounds_max"] for entry in logs[:4]] == [0] + 3 * [staleness]
    for rounds in ranks:
        assert [len(ids) for ids in rounds] == [8] * 4 and {
            max(map(len, ids)) for ids in rounds
        } == {7}
    assert ranks[0] != ranks[1]
    differences = [entry["sampling/sampling_logp_difference/max"] for entry in logs[:4]]
    assert (max(differences) < 1e-3) == (staleness == 0) and differences[0] < 1e-3, differences
    assert all(entry["grad_norm"] > 0 and entry["perf/generate_s"] > 0 for entry in logs[:4])


@pytest.mark.parametrize("name", ["1.5b", "8b", "32b"])
def test_a_file_rehearses_and_trains_with_a_tiny_model(nodes, name):
    """With its own settings of node mode; model, data and lengths are those of a test."""
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    for of_accelerate in ("accelerate_config", "num_processes"):
        recipe.pop(of_accelerate, None)
    path = nodes.folder / f"{name}.yaml"
    short = {
        "max_completion_length": 16,
        "vllm_max_model_length": 64,
        "micro_batch_tokens": 512,
        "gradient_accumulation_steps": 1,
        "vllm_tensor_parallel_size": 1,
    }
    path.write_text(yaml.safe_dump(recipe | short))
    logs, ranks = launch(nodes, EXAMPLES / "grpo.py", f"file-{name}", "--config", str(path))
    assert len(logs) >= 4 and all(entry["grad_norm"] > 0 for entry in logs[:4])
    assert max(entry["staleness/rounds_max"] for entry in logs[:4]) >= 1
    assert "rehears" in nodes.rank_log(0)
    assert all(len(ids) <= 16 for rounds in ranks for round_ids in rounds for ids in round_ids)


def test_the_agent_trains_on_hunts_that_ran_ahead_and_are_not_flat(nodes):
    folder = nodes.folder / "agent"
    made = [sys.executable, EXAMPLES / "demo" / "agent_model.py", folder / "model", "--steps", "50"]
    subprocess.run(made, check=True, capture_output=True, timeout=HANG_S)
    words = f"""
        --config {RECIPES}/agent.yaml --gradient_accumulation_steps 1
        --model_name_or_path {folder}/model --output_dir {folder}/run --use_cpu true --bf16 false --dtype float32
        --report_to none --gradient_checkpointing false --disable_tqdm true --max_steps 3 --save_steps 3
        --logging_steps 1 --per_device_train_batch_size 8 --num_generations 8 --rollout_seed 1 --max_staleness 1
        --max_tool_calling_iterations 3 --call_timeout 60 --max_completion_length 96 --learning_rate 1e-4
        --score_groups 0 --dynamic_sampling 8
    """.split()
    nodes.launch(EXAMPLES / "agent.py", *words)
    assert nodes.wait(timeout_s=HANG_S) == [0, 0], nodes.rank_log(0)[-3000:]
    logs = json.loads((folder / "run" / "checkpoint-3" / "trainer_state.json").read_text())[
        "log_history"
    ][:3]
    assert [entry["staleness/rounds_max"] for entry in logs] == [0, 1, 1]  # whole hunts
    for entry in logs:
        assert (
            0 < entry["hunt/called_a_tool"] <= 1
            and entry["tools/call_frequency"] >= entry["hunt/called_a_tool"]
        )
        assert entry["rewards/TreasureHunt/mean"] + entry[
            "rewards/right_box/mean"
        ] == pytest.approx(entry["reward"])
        assert entry["sampling/sampling_logp_difference/max"] < 0.5
        # one per rank
        assert (
            entry["frac_reward_zero_std"] == 0 and entry["dynamic_sampling/effective_groups"] == 2
        )
    # two calls in a row
    assert any(entry["tools/call_frequency"] > entry["hunt/called_a_tool"] for entry in logs)
    assert logs[0]["sampling/sampling_logp_difference/max"] < 1e-3  # results of tools are masked
    assert (folder / "run" / "model.safetensors").is_file()
