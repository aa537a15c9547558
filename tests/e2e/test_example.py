"""`examples/grpo.py` on two nodes: stopped, and launched again unchanged."""

import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file
from waiting import HANG_S, until

from multinode_kit.faults import FAKE, HOOK
from multinode_kit.models import save_tiny
from multinode_kit.nodes import Nodes
from trl_multinode.tools.plan.measured import read_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
LEARNING_RATE = 1e-2
# `command/` has the command line, `test_continued.py` a run that goes on, `saving/` the hub
pytestmark = [pytest.mark.zero3, pytest.mark.two_node, pytest.mark.nightly]

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


def arguments(folder: Path) -> list[str]:
    """Writes model, dataset and reward function; returns what a user would type."""
    save_tiny(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    rows = [json.dumps({"question": f"{i} + {i + 1} ="}) for i in range(32)]
    (folder / "questions.jsonl").write_text("\n".join(rows))
    (folder / "my_rewards.py").write_text(REWARD)
    return f"""
        --model_name_or_path {folder}/model --dataset_name {folder}/questions.jsonl --prompt_column question
        --reward_funcs think_format_reward my_rewards:letters --output_dir {folder}/run
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
    }
    with Nodes(2, 2, folder=folder / "nodes", env=environment) as nodes:
        nodes.launch(EXAMPLE, *typed)
        stopped = stop_in_step_3(nodes)
        stopped["checkpoints"] = sorted(path.name for path in folder.glob("run/checkpoint-*"))
        nodes.launch(EXAMPLE, *typed)
        codes = nodes.wait(timeout_s=HANG_S)
        logs = [nodes.rank_log(rank) for rank in range(4)]
    return {"folder": folder, "stopped": stopped, "codes": codes, "logs": logs}


def stop_in_step_3(nodes: Nodes) -> dict:
    """SIGKILL of the launcher of node 1 when the checkpoint of step 2 is complete, and step 3 has begun."""
    for rank in range(4):
        nodes.wait_for(rank, "IN STEP 3", timeout_s=HANG_S)
    os.kill(nodes.launcher_pid(1), signal.SIGKILL)
    codes = nodes.wait(timeout_s=HANG_S)
    until(lambda: not nodes.pids(0) + nodes.pids(1), nodes.tails)
    return {"codes": codes}


def test_a_stopped_run_leaves_complete_checkpoints_and_no_process(run):
    assert all(run["stopped"]["codes"])
    assert run["stopped"]["checkpoints"] == ["checkpoint-1", "checkpoint-2"]


def test_it_reaches_the_last_step_with_the_history_of_both_launches(run):
    assert f"resuming from {run['folder']}/run/checkpoint-2" in run["logs"][0]
    assert run["codes"] == [0, 0], run["logs"][0][-3000:]
    state = json.loads((run["folder"] / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    history = [
        (entry["step"], entry["learning_rate"])
        for entry in state["log_history"]
        if "learning_rate" in entry
    ]
    assert history == [
        (step, pytest.approx(LEARNING_RATE * (5 - step) / 4)) for step in (1, 2, 3, 4)
    ]


def test_a_plan_reads_the_seconds_of_the_second_launch(run):
    measured = read_run(str(run["folder"] / "run"))
    state = json.loads((run["folder"] / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    log = next(
        entry
        for entry in state["log_history"]
        if entry["step"] == 4 and "perf/train_s/max" in entry
    )
    assert (measured.nodes, measured.training, measured.reserved, measured.steps) == (2, 2, 1, 1)
    assert measured.times.train_s == pytest.approx(log["perf/train_s/max"], rel=0.1)
    assert measured.tail_known and measured.mean_length == pytest.approx(
        log["completions/mean_length"]
    )


def test_it_goes_on_from_the_weights_of_the_checkpoint(run):
    """Adam moves a weight by about the learning rate: 1 + 3/4 of it in steps 1 and 2, 1/2 + 1/4 in steps 3 and 4."""
    assert weights_moved(run["folder"], "model", "run/checkpoint-2") > 1.3 * LEARNING_RATE
    assert 0 < weights_moved(run["folder"], "run/checkpoint-2", "run") < LEARNING_RATE


def weights_moved(folder: Path, start: str, end: str) -> float:
    """Of the weight that moved furthest between two saved models."""
    before, after = (load_file(folder / name / "model.safetensors") for name in (start, end))
    return max((before[name] - after[name]).abs().max().item() for name in before)
