"""The record of a run: its settings without secrets, and its logs without the metrics of single nodes."""

import json
from types import SimpleNamespace

import pytest
from places import topology_on

from trl_multinode import GRPOConfig
from trl_multinode.reporting.record import HIDDEN, RunRecord, chosen, shown

HOST = SimpleNamespace(
    rank=SimpleNamespace(phase_file=SimpleNamespace(attempt=3)),
    topology=topology_on([7, 7]),
    devices=SimpleNamespace(per_engine=(("7",),)),
)
TOKEN = "hf_" + "x" * 30


@pytest.fixture
def args(tmp_path):
    return GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, max_staleness=1, hub_token=TOKEN, report_to=[],
        engine_kwargs={"hf_token": TOKEN, "max_num_seqs": 64}, model_init_kwargs={"revision": "main"},
    )  # fmt: skip


def test_settings_are_those_that_differ_and_then_the_others_of_node_mode(args):
    found = chosen(args)
    assert found["settings"]["max_staleness"] == 1 and found["defaults"]["num_engines"] is None
    assert found["settings"]["model_init_kwargs"] == {"revision": "main"}
    assert not found["settings"].keys() & found["defaults"].keys()
    # `__post_init__` makes these of others
    assert set(found["settings"]) == {
        *(
            "output_dir",
            "use_cpu",
            "bf16",
            "max_staleness",
            "hub_token",
            "engine_kwargs",
            "model_init_kwargs",
        ),
    }
    assert "weight_decay" not in {**found["settings"], **found["defaults"]}


def test_no_token_is_written_wherever_it_stands(args, tmp_path):
    RunRecord(HOST, args, SimpleNamespace())
    text = (tmp_path / "_multinode" / "settings.jsonl").read_text()
    assert TOKEN not in text and text.count(HIDDEN) == 2
    line = json.loads(text)
    assert (line["attempt"], line["nodes"], line["engine_gpus"]) == (3, 2, [["7"]])
    assert line["settings"]["engine_kwargs"] == {"hf_token": HIDDEN, "max_num_seqs": 64}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("wandb_api_key", "abc", HIDDEN),
        ("password", "abc", HIDDEN),
        ("endpoint", "https://user:word@host/path", HIDDEN),
        ("words", ["a", TOKEN], ["a", HIDDEN]),
        ("max_tokens", 5, 5),
        ("pad_token", None, None),
        ("max_grad_norm", float("inf"), "inf"),  # JSON has no such number
        ("chat_template", "x" * 500, "x" * 200 + "..."),
    ],
)
def test_values_that_may_be_secret_are_hidden(name, value, expected):
    assert shown(name, value) == expected


@pytest.mark.nightly
def test_a_log_is_a_line_without_the_metrics_of_single_nodes(args, tmp_path):
    record = RunRecord(HOST, args, SimpleNamespace())
    log = {"step": 4, "reward": 0.5, "perf/train_s": 1.0, "node12/train_s": 1.0}
    record.add_log(log)
    line = json.loads((tmp_path / "_multinode" / "log.jsonl").read_text())
    assert line.pop("time") > 1e9 and line == {
        "attempt": 3,
        "step": 4,
        "reward": 0.5,
        "perf/train_s": 1.0,
    }


@pytest.mark.nightly
def test_a_value_that_json_does_not_have_costs_a_warning_and_no_run(args, caplog):
    record = RunRecord(HOST, args, SimpleNamespace())
    for _ in range(2):
        record.add_log({"step": 1, "table": object()})
    assert len([line for line in caplog.messages if "lacks lines" in line]) == 1
