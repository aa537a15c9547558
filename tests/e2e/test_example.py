"""`examples/grpo.py` on two nodes: stopped, launched again unchanged, and what it then pushes to a hub."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import deepspeed  # noqa: F401  sets a variable when `save_pretrained` imports it: let that be before the tests
import pytest
import torch
from safetensors.torch import load, load_file
from waiting import HANG_S, until

from trl_multinode.plan.measured import read_run
from trl_multinode.testing.faults import FAKE, HOOK
from trl_multinode.testing.hub import LoopbackHub
from trl_multinode.testing.models import save_tiny
from trl_multinode.testing.nodes import Nodes

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
LEARNING_RATE = 1e-2
pytestmark = [pytest.mark.zero3, pytest.mark.two_node]
nightly = pytest.mark.nightly  # of the tests of the long run

# The third call is step 3 of a run that starts anew, and never comes in one that goes on from step 2
REWARD = """
import time

calls = 0

def letters(completions, **_):
    global calls
    calls += 1
    if calls == 3:
        print("IN STEP 3", flush=True)
        time.sleep(3600)
    return [float(len(set(completion[0]["content"]))) for completion in completions]
"""
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
LOAD = """
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (kind.from_pretrained("tester/run") for kind in (AutoModelForCausalLM, AutoTokenizer))
print("SUM", sum(parameter.double().sum().item() for parameter in model.parameters()), len(tokenizer("ab").input_ids))
"""


def arguments(folder: Path) -> list[str]:
    """Writes model, dataset and reward function; returns what a user would type."""
    save_tiny(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    rows = [json.dumps({"question": f"{i} + {i + 1} ="}) for i in range(32)]
    (folder / "questions.jsonl").write_text("\n".join(rows))
    (folder / "my_rewards.py").write_text(REWARD)
    return f"""
        --model_name_or_path {folder}/model --dataset_name {folder}/questions.jsonl --prompt_column question
        --reward_funcs think_format_reward my_rewards:letters --output_dir {folder}/run --push_to_hub
        --use_cpu true --bf16 false --gradient_checkpointing false --disable_tqdm true --report_to none
        --max_steps 4 --save_steps 1 --logging_steps 1 --learning_rate {LEARNING_RATE}
        --per_device_train_batch_size 4 --num_generations 4 --max_completion_length 8
    """.split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The whole life of a run, in two launches."""
    folder = tmp_path_factory.mktemp("example")
    typed = arguments(folder)
    environment = {
        HOOK: FAKE,
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HOME": str(folder / "cache"),
    }
    with LoopbackHub() as hub:
        environment |= hub.environment
        with Nodes(2, 2, folder=folder / "nodes", env=environment) as nodes:
            nodes.launch(EXAMPLE, *typed)
            stopped = stop_in_step_3(nodes)
            stopped["checkpoints"] = sorted(path.name for path in folder.glob("run/checkpoint-*"))
            begin_checkpoints(folder / "run")
            nodes.launch(EXAMPLE, *typed)
            codes = nodes.wait(timeout_s=HANG_S)
            logs = [nodes.rank_log(rank) for rank in range(4)]
        loaded = python("-c", LOAD, env=environment)
        yield {"folder": folder, "stopped": stopped, "codes": codes, "logs": logs, "loaded": loaded, "hub": hub}


def python(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command], env=os.environ | (env or {}), capture_output=True, text=True, timeout=HANG_S
    )


def stop_in_step_3(nodes: Nodes) -> dict:
    """SIGKILL of the launcher of node 1 when the checkpoint of step 2 is complete, and step 3 has begun."""
    for rank in range(4):
        nodes.wait_for(rank, "IN STEP 3", timeout_s=HANG_S)
    os.kill(nodes.launcher_pid(1), signal.SIGKILL)
    codes = nodes.wait(timeout_s=HANG_S)
    until(lambda: not nodes.pids(0) + nodes.pids(1), nodes.tails)
    return {"codes": codes}


def begin_checkpoints(folder: Path) -> None:
    """What is left of checkpoints 3 and 4 of a run that was stopped while it wrote them."""
    for name, missing in (("checkpoint-3", "latest"), ("checkpoint-4", "trainer_state.json")):
        shutil.copytree(folder / "checkpoint-2", folder / name)
        (folder / name / missing).unlink()


@nightly
def test_a_stopped_run_leaves_complete_checkpoints_and_no_process(run):
    assert all(run["stopped"]["codes"])
    assert run["stopped"]["checkpoints"] == ["checkpoint-1", "checkpoint-2"]


@nightly
@pytest.mark.parametrize("local_main", [0, 2])
def test_launched_again_each_node_says_what_it_skips_and_where_it_goes_on(run, local_main):
    lines = [line.replace(str(run["folder"]), "") for line in run["logs"][local_main].splitlines()]
    assert "[trl_multinode] resuming from /run/checkpoint-2" in lines
    skipped = [line.partition(" is skipped: ") for line in lines if " is skipped: " in line]
    assert [(folder, reason.partition(". ")[0]) for folder, _, reason in skipped] == [
        ("/run/checkpoint-3", "unfinished, DeepSpeed's file `latest` is missing on this node"),
        ("/run/checkpoint-4", "unfinished, trainer_state.json is missing on this node"),
    ]


@nightly
def test_it_reaches_the_last_step_with_the_history_of_both_launches(run):
    assert run["codes"] == [0, 0], run["logs"][0][-3000:]
    state = json.loads((run["folder"] / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    history = [(entry["step"], entry["learning_rate"]) for entry in state["log_history"] if "learning_rate" in entry]
    assert history == [(step, pytest.approx(LEARNING_RATE * (5 - step) / 4)) for step in (1, 2, 3, 4)]


@nightly
def test_a_plan_reads_the_seconds_of_the_second_launch(run):
    measured = read_run(str(run["folder"] / "run"))
    state = json.loads((run["folder"] / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    log = next(entry for entry in state["log_history"] if entry["step"] == 4 and "perf/train_s/max" in entry)
    assert (measured.nodes, measured.training, measured.reserved, measured.steps) == (2, 2, 1, 1)
    assert measured.times.train_s == pytest.approx(log["perf/train_s/max"], rel=0.1)
    assert measured.tail_known and measured.mean_length == pytest.approx(log["completions/mean_length"])


@nightly
def test_it_goes_on_from_the_weights_of_the_checkpoint(run):
    """Adam moves a weight by about the learning rate: 1 + 3/4 of it in steps 1 and 2, 1/2 + 1/4 in steps 3 and 4."""
    assert weights_moved(run["folder"], "model", "run/checkpoint-2") > 1.3 * LEARNING_RATE
    assert 0 < weights_moved(run["folder"], "run/checkpoint-2", "run") < LEARNING_RATE


def weights_moved(folder: Path, start: str, end: str) -> float:
    """Of the weight that moved furthest between two saved models."""
    before, after = (load_file(folder / name / "model.safetensors") for name in (start, end))
    return max((before[name] - after[name]).abs().max().item() for name in before)


@nightly
def test_the_hub_has_every_weight_as_it_was_saved(run):
    pushed = load(run["hub"].repos["tester/run"]["model.safetensors"])
    saved, initial = (load_file(run["folder"] / name / "model.safetensors") for name in ("run", "model"))
    assert pushed.keys() == saved.keys() == initial.keys()
    assert all(pushed[name].shape == initial[name].shape and pushed[name].numel() for name in initial)
    assert all(torch.equal(pushed[name], saved[name]) for name in saved)
    assert run["hub"].commits[-1] == "End of training"


@nightly
def test_from_pretrained_gets_the_model_from_the_hub(run):
    assert run["loaded"].returncode == 0, run["loaded"].stderr[-2000:]
    word, total, num_tokens = run["loaded"].stdout.split()[-3:]
    saved = load_file(run["folder"] / "run" / "model.safetensors")
    assert (word, int(num_tokens)) == ("SUM", 2)
    assert float(total) == pytest.approx(sum(tensor.double().sum().item() for tensor in saved.values()))


@nightly
def test_nothing_of_this_machine_is_pushed(run):
    files = run["hub"].repos["tester/run"]
    assert str(run["folder"]) not in files["README.md"].decode()
    assert not [path for path in files if path.startswith(("checkpoint-", "_multinode/", "logs/", "phases/"))]


def test_the_example_trains_a_step_on_two_nodes(tmp_path, monkeypatch):
    typed = [word for word in arguments(tmp_path) if word != "--push_to_hub"]
    monkeypatch.chdir(tmp_path)  # the ranks look for `my_rewards` there
    with Nodes(2, 1, folder=tmp_path / "nodes", env={HOOK: FAKE}, forked=True) as nodes:
        nodes.launch(EXAMPLE, *typed, "--max_steps", "1")
        assert nodes.wait(timeout_s=HANG_S) == [0, 0], nodes.rank_log(0)[-3000:]
    state = json.loads((tmp_path / "run" / "checkpoint-1" / "trainer_state.json").read_text())
    (log,) = [entry for entry in state["log_history"] if "loss" in entry]
    assert log["step"] == 1 and log["grad_norm"] > 0
    assert weights_moved(tmp_path, "model", "run") > 0.5 * LEARNING_RATE


@nightly
def test_an_unknown_argument_is_an_error_that_names_the_nearest_known_one():
    known = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "accuracy_reward"]
    result = python(str(EXAMPLE), *known, "--learning_rat", "1e-5")
    assert result.returncode == 2
    assert "--learning_rat is unknown, did you mean --learning_rate?" in result.stderr
