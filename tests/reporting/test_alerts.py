"""Alerts: once each, on rank 0."""

from types import SimpleNamespace

import pytest

from trl_multinode.reporting.alerts import alerts
from trl_multinode.reporting.callbacks import Alerts

LOGS = {"perf/step_s": 1.0, "loss": 0.1, "grad_norm": 0.9, "frac_reward_zero_std": 0.5}
EQUAL = {"frac_reward_zero_std": 1.0, "rewards/format/mean": 0.0, "rewards/format/std": 0.0}


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
def test_each_is_told_once(is_zero, caplog):
    callback = Alerts()
    for step in (1, 2):
        state = SimpleNamespace(is_world_process_zero=is_zero, global_step=step)
        args = SimpleNamespace()
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
    callback, args = Alerts(), SimpleNamespace()
    for step, seconds in enumerate(logs):
        state = SimpleNamespace(is_world_process_zero=True, global_step=step)
        callback.on_log(args, state, None, logs=of_nodes(*seconds))
    assert caplog.text.count("node 2 is slow") == told
    assert "node 0 is slow" not in caplog.text
