"""What GMPO and distillation from a server have of their own, and trainers of TRL that are refused."""

import os
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from datasets import Dataset
from refusals import refused
from teacher_server import teacher_server

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import trl_multinode
from multinode_kit.models import tiny_qwen2
from trl_multinode import GMPOTrainer  # here, because vLLM sets variables
from trl_multinode.errors import ConfigurationError
from trl_multinode.experimental.server_distillation import check_teacher
from trl_multinode.node_trainer import NodeTrainer, bound_arguments

IN_FLIGHT = {"max_staleness": 2}


@pytest.mark.parametrize(("name", "folder"), trl_multinode._OWN_VLLM.items())
def test_a_trainer_with_a_vllm_of_its_own_is_refused_with_its_place_in_trl(name, folder):
    for kind in ("Trainer", "Config"):
        with pytest.raises(AttributeError, match=rf"{name}{kind} .*trl.experimental.{folder} "):
            getattr(trl_multinode, f"{name}{kind}")
    with pytest.raises(ImportError, match=r"docs/use/trainers\.md"):
        __import__("trl_multinode", fromlist=[f"{name}Trainer"])
    assert find_spec(f"trl.experimental.{folder}") is not None


def test_arguments_after_those_that_gmpo_names_are_found_by_name():
    """TRL's `GMPOTrainer.__init__` takes them as `**kwargs`; the checks before the model look for `train_dataset`."""

    class Their:
        def __init__(self, model, reward_funcs, args=None, **kwargs): ...

    class Plain:
        def __init__(self, model, args=None): ...

    assert bound_arguments(Their, None, "m", "r", train_dataset=[1], callbacks=[]) == {
        "model": "m", "reward_funcs": "r", "train_dataset": [1], "callbacks": [],
    }  # fmt: skip
    assert bound_arguments(Their, None, "m", reward_funcs="r") == {
        "model": "m",
        "reward_funcs": "r",
    }
    assert bound_arguments(Plain, None, "m", args=3) == {"model": "m", "args": 3}
    with pytest.raises(TypeError, match="positional"):
        bound_arguments(Their, None, "m", "r", "a", "dataset")


@pytest.mark.nightly
def test_gmpo_has_trls_defaults_of_its_own(monkeypatch, tmp_path):
    assert (
        trl_multinode.GMPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[]).epsilon
        == 0.4
    )
    monkeypatch.setattr(GMPOTrainer, "_config", staticmethod(lambda folder: folder))
    assert (
        GMPOTrainer._default_args(object.__new__(GMPOTrainer), "Qwen/Qwen3-8B") == "Qwen3-8B-GMPO"
    )


def test_a_teacher_that_no_server_has_ends_the_run_before_the_student_is_loaded(tmp_path):
    tiny_qwen2().save_pretrained(tmp_path)
    with teacher_server(tmp_path) as url:
        check_teacher(url, "rank 0")
    with pytest.raises(ConfigurationError, match=rf"node 1, rank 8.*{url}.*refused"):
        check_teacher(url, "node 1, rank 8", wait_s=0.0)
    with refused("teacher_model_server_url", "vllm serve"):
        check_teacher(url.removeprefix("http://"), "node 0, rank 0", wait_s=60.0)
    with refused("teacher_model_server_url", got="http://teacher:port"):
        check_teacher("http://teacher:port", "node 0, rank 0", wait_s=0.0)
    for status in (503, 204):  # TRL repeats the request without a limit until the answer is 200
        reason = pytest.raises(ConfigurationError, match=f"{status}")
        with teacher_server(tmp_path, status=status) as url, reason:
            check_teacher(url, "rank 0", wait_s=0.1)


@pytest.mark.nightly
def test_a_slash_at_the_end_of_the_teachers_url_is_removed(monkeypatch, tmp_path):
    """TRL would request "//health", which no server has, without a limit."""
    tiny_qwen2().save_pretrained(tmp_path)
    monkeypatch.setattr(NodeTrainer, "_check_call", lambda *arguments: None)
    trainer = object.__new__(trl_multinode.ServerDistillationTrainer)
    host = SimpleNamespace(topology=SimpleNamespace(is_local_main=True))
    with teacher_server(tmp_path) as url:
        settings = SimpleNamespace(teacher_model_server_url=f"{url}/")
        trainer._check_call(host, settings, {})
    assert settings.teacher_model_server_url == url


@pytest.mark.parametrize("field", [{"max_staleness": 1}, IN_FLIGHT])
def test_gmpo_refuses_rounds_ahead_in_its_own_config_and_in_that_of_another_trainer(
    field, tmp_path
):
    fields = {"use_cpu": True, "bf16": False, "report_to": [], **field}
    with refused("max_staleness", "GRPO", got=field["max_staleness"]):
        trl_multinode.GMPOConfig(str(tmp_path), **fields)
    args = trl_multinode.GRPOConfig(str(tmp_path), **fields)
    dataset = Dataset.from_dict({"prompt": ["a"] * 8})
    with refused("max_staleness", "GRPO", got=field["max_staleness"]):
        GMPOTrainer(
            tiny_qwen2(),
            lambda completions, **_: [0.0] * len(completions),
            args=args,
            train_dataset=dataset,
        )
