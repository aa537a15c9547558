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
