"""Versions, trackers, models and data sets of a node: rarer findings, on folders that look like a cache."""

import json
from pathlib import Path

import pytest
from doctoring import case, model_in, results

from trl_multinode.tools.doctor import models, software
from trl_multinode.tools.doctor.models import examine_dataset, examine_hub, examine_model
from trl_multinode.tools.doctor.software import examine_launch, examine_tracker, examine_versions

# That these examinations run, and get the arguments of the script, decides in test_doctor_report.py
pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def _no_cache():
    models._model.cache_clear()


# ---- versions, tracker


def test_versions_are_shown_and_a_missing_library_is_an_error(monkeypatch):
    facts, findings = results(examine_versions, case())
    assert "torch " in facts["versions"] and "python " in facts["versions"] and findings == []
    monkeypatch.setattr(software, "local_versions", lambda: {"torch": "2", "trl": "1", "transformers": "5",
                        "accelerate": "1", "vllm": "none", "deepspeed": "1"})  # fmt: skip
    _, (finding,) = results(examine_versions, case())
    assert finding.what.startswith("vllm ") and finding.severity == "error"


def test_a_tracker_needs_its_package_and_its_key_on_rank_0(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    installed = {"wandb", "trackio"}
    monkeypatch.setattr(
        software.importlib.util, "find_spec", lambda name: name in installed or None
    )
    wandb = {"report_to": ["wandb"]}
    facts, (finding,) = results(examine_tracker, case(values=wandb))
    assert facts["tracker"] == "wandb" and "WANDB_API_KEY" in finding.what
    assert (
        finding.severity == "error"
        and results(examine_tracker, case(values=wandb, rank=1))[1][0].severity == "warning"
    )
    for variables in ({"WANDB_API_KEY": "k" * 40}, {"WANDB_MODE": "offline"}):
        facts, findings = results(examine_tracker, case(variables, values=wandb))
        assert findings == [] and "kkkk" not in str(facts)
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert results(examine_tracker, case(values=wandb))[1] == []
    assert "mlflow" in results(examine_tracker, case(values={"report_to": "mlflow"}))[1][0].what
    assert results(examine_tracker, case())[0]["tracker"] == "none"


def test_the_script_is_compared_by_its_content(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "script" not in results(examine_launch, case())[0]
    Path("train.py").write_text("a")
    first = results(examine_launch, case())[0]
    Path("train.py").write_text("b")
    second = results(examine_launch, case())[0]
    assert (
        first["script"] != second["script"]
        and first["launch"] == "2 nodes x 7 ranks, DEEPSPEED, port 29500"
        and "2 nodes x 7,6 ranks" in results(examine_launch, case(table=(7, 6)))[0]["launch"]
    )


# ---- model and dataset


def in_cache(cache: Path, kind: str, name: str) -> Path:
    """A folder of the Hub's cache, as `hf download` makes it."""
    repo = cache / f"{kind}--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("c" * 40)
    return repo / "snapshots" / ("c" * 40)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_model_in_the_cache_is_shown_with_its_revision(cache):
    model_in(in_cache(cache, "models", "org/model"), megabytes=3)
    facts, findings = results(examine_model, case(model="org/model"))
    assert facts["model"] == "org/model, 3 MiB (revision cccccccc)" and findings == []


def test_a_model_that_lacks_a_file_is_incomplete(cache):
    folder = model_in(in_cache(cache, "models", "org/model"))
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (folder / models.INDEX).write_text(json.dumps(index))
    _, (finding,) = results(examine_model, case(model="org/model"))
    assert "1 file(s) missing, as model-00002.safetensors" in finding.what
    assert finding.severity == "warning" and "`hf download org/model`" in finding.cure
    assert (
        results(examine_model, case({"HF_HUB_OFFLINE": "1"}, model="org/model"))[1][0].severity
        == "error"
    )


@pytest.mark.parametrize(
    ("examination", "words"), [(examine_model, "model"), (examine_dataset, "dataset")]
)
def test_what_is_not_in_the_cache_is_an_error_only_offline(cache, examination, words):
    given = {"model": "org/x"} if words == "model" else {"values": {"dataset_name": "org/x"}}
    facts, (finding,) = results(examination, case(**given))
    assert facts[words] == "org/x: not here" and finding.severity == "warning"
    assert "hf download" in finding.cure and "org/x" in finding.cure
    _, (finding,) = results(examination, case({"HF_HUB_OFFLINE": "1"}, **given))
    assert finding.severity == "error" and "HF_HUB_OFFLINE" in finding.what


def test_a_dataset_is_found_in_a_folder_and_in_both_caches(cache, tmp_path, monkeypatch):
    from datasets import config

    local = tmp_path / "rows.jsonl"
    local.write_text("{}\n")
    assert results(examine_dataset, case(values={"dataset_name": str(local)})) == (
        {"dataset": f"{local} (local)"},
        [],
    )
    in_cache(cache, "datasets", "org/data").mkdir(parents=True)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    (tmp_path / "prepared" / "org___other").mkdir(parents=True)
    for name in ("org/data", "org/other"):
        facts, findings = results(examine_dataset, case(values={"dataset_name": name}))
        assert facts["dataset"] == f"{name}, in the cache" and findings == []
    assert results(examine_dataset, case(values={"dataset_name": "org/none"}))[1]


def test_a_push_without_a_token_is_an_error_and_no_token_is_shown(monkeypatch):
    monkeypatch.setattr(models, "get_token", lambda: None)
    _, (finding,) = results(examine_hub, case(values={"push_to_hub": True}))
    assert finding.severity == "error" and "HF_TOKEN" in finding.cure
    monkeypatch.setattr(models, "get_token", lambda: "hf_" + "a" * 30)
    facts, findings = results(examine_hub, case(values={"push_to_hub": True}))
    assert facts == {"Hub": "a token is set"} and findings == []
