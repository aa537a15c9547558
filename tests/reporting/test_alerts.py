"""The first charts of the trackers, and alerts: once each, on rank 0, in the log and in the trackers."""

import json
import sqlite3
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tensorboardX import SummaryWriter
from transformers.integrations import TensorBoardCallback

from trl_multinode.reporting.alerts import alerts
from trl_multinode.reporting.callbacks import Trackers

LOGS = {"perf/step_s": 1.0, "loss": 0.1, "grad_norm": 0.9, "frac_reward_zero_std": 0.5}
EQUAL = {"frac_reward_zero_std": 1.0, "rewards/format/mean": 0.0, "rewards/format/std": 0.0}
# trackio reads its folder when it is imported
SCRIPT = """
from types import SimpleNamespace
import trackio
from trl_multinode.reporting.callbacks import Trackers
trackio.init(project="p")
logs = {"perf/step_s": 1.0, "reward": 0.5, "loss": float("nan"), "engine/restarts": 1.0}
state = SimpleNamespace(is_world_process_zero=True, global_step=3)
Trackers([]).on_log(SimpleNamespace(report_to=["trackio", "tensorboard"]), state, None, logs=logs)
trackio.finish()
"""


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({}, []),
        (EQUAL, ["`format` 0 on average"]),
        ({"loss": float("nan")}, ["`loss` is nan"]),
        ({"grad_norm": float("inf")}, ["`grad_norm` is inf"]),
        ({"engine/restarts": 0.0}, []),
        ({"engine/restarts": 2.0}, ["_multinode/logs"]),
    ],
)
def test_what_needs_a_person(more, names):
    found = [" ".join(one) for one in alerts(LOGS | more)]
    assert len(found) == len(names) and all(
        name in text for name, text in zip(names, found, strict=True)
    )


@pytest.mark.parametrize("is_zero", [True, False])
def test_each_is_told_once_and_a_tracker_without_a_run_ends_nothing(is_zero, caplog):
    callback = Trackers([])
    for step in (1, 2):
        state = SimpleNamespace(is_world_process_zero=is_zero, global_step=step)
        args = SimpleNamespace(report_to=["trackio", "wandb"])
        callback.on_log(args, state, None, logs=LOGS | EQUAL)
    assert caplog.text.count("`format`") == is_zero


def of_nodes(*train_s: float) -> dict[str, float]:
    return LOGS | {
        f"node{node}/{name}": value
        for node, seconds in enumerate(train_s)
        for name, value in {"train_s": seconds, "wait_s": 1.0 - seconds, "tokens": 9.0}.items()
    }


@pytest.mark.parametrize(
    ("logs", "told"),
    [
        ([(0.3, 0.3, 0.9)] * 2, 0),
        ([(0.3, 0.3, 0.9)] * 4, 1),
        ([(0.3, 0.3, 0.9), (0.3, 0.3, 0.3)] * 3, 0),
        ([(0.3, 0.3, 0.3)] * 4, 0),
    ],
    ids=["two logs", "four logs", "every second log", "equal"],
)
def test_a_node_that_is_slow_for_three_logs_is_told_once(logs, told, caplog):
    callback, args = Trackers([]), SimpleNamespace(report_to=[])
    for step, seconds in enumerate(logs):
        state = SimpleNamespace(is_world_process_zero=True, global_step=step)
        callback.on_log(args, state, None, logs=of_nodes(*seconds))
    assert caplog.text.count("node 2 is slow") == told
    assert "node 0 is slow" not in caplog.text


@pytest.mark.nightly  # an import of trackio and its database
def test_trackio_has_them(tmp_path):
    environment = {"TRACKIO_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (database,) = tmp_path.glob("p*.db")
    with sqlite3.connect(database) as connection:
        titles = {title for (title,) in connection.execute("SELECT title FROM alerts")}
        logged = connection.execute("SELECT step, metrics FROM metrics").fetchall()
    assert titles == {"the loss is not finite", "1 restarts of engines"}
    ((step, metrics),) = logged
    assert step == 3 and json.loads(metrics) == {
        "at_a_glance/1_reward": 0.5,
        "at_a_glance/6_seconds_per_step": 1.0,
    }


def test_tensorboard_has_the_first_charts(tmp_path):
    theirs = TensorBoardCallback(SummaryWriter(str(tmp_path)))
    state = SimpleNamespace(is_world_process_zero=True, global_step=3)
    args = SimpleNamespace(report_to=["tensorboard"])
    Trackers([theirs]).on_log(args, state, None, logs=LOGS)
    theirs.tb_writer.close()
    (events,) = tmp_path.iterdir()
    written = events.read_bytes()
    assert b"at_a_glance/2_groups_of_equal_rewards" in written and b"1_reward" not in written
