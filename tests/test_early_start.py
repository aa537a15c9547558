"""Engines start beside the load of the model, from its outline; a wrong outline costs only the early start."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from forks import forked
from peft import LoraConfig
from torch.distributed import HashStore
from transformers import AutoProcessor
from trl.trainer import grpo_trainer
from trl.trainer.utils import create_model_from_path
from waiting import until

import trl_multinode.host.closing as closing
from multinode_kit.engines import FAKE
from multinode_kit.models import renamed_llava, save_tiny, tiny_qwen2, tiny_tokenizer
from trl_multinode import GRPOConfig, GRPOTrainer, libraries, node_trainer
from trl_multinode.engine.fleet import EngineFleet
from trl_multinode.engine.settings import EngineSettings, save_without_weights
from trl_multinode.errors import ConfigurationError, EngineStartError
from trl_multinode.model_outline import outline
from trl_multinode.node_settings import NodeSettings
from trl_multinode.run.endings.exit_codes import ENGINE
from trl_multinode.run.phase_file import PhaseFile
from trl_multinode.run.topology import EngineDevices, Topology
from trl_multinode.wire.supervisor import is_running

ALONE = Topology(0, 1, 0, 1, 0, 1, False)
ON_CPU = EngineDevices(((),), shared_with_training=False)


# ---- a trainer, its load and its engines


def build(folder: Path, model, peft_config=None, **settings) -> GRPOTrainer:
    args = GRPOConfig(
        str(folder / "run"), use_cpu=True, bf16=False, report_to=[], num_generations=4, per_device_train_batch_size=4,
        max_completion_length=8, vllm_max_model_length=24, max_steps=1, save_strategy="no",
        gradient_checkpointing=False, disable_tqdm=True, **settings,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": ["1 =", "2 ="]})
    reward = lambda completions, **_: [float(len(text)) for text in completions]  # noqa: E731
    return GRPOTrainer(model, reward, args, data, peft_config=peft_config)


def fleet() -> EngineFleet:
    (host,) = closing._with_engines
    return host._updates._fleet


def wait_for_engine(*_, **__) -> None:
    """Wait inside TRL's `__init__` for the engine; it would wait for ever if the engine started later."""
    until(fleet()._processes[0].is_ready, "the engine to be ready")


def test_the_engine_is_ready_before_a_model_is_loaded_by_name(tmp_path, monkeypatch):
    """It serves an adapter, whose rank is known before the load too."""
    monkeypatch.setenv("TRL_MULTINODE_ENGINE_MODULE", FAKE)
    name = str(save_tiny(tmp_path / "model"))
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])

    def load(*args, **kwargs):
        wait_for_engine()
        return create_model_from_path(*args, **kwargs)

    def body(rank: int) -> dict:
        monkeypatch.setattr(grpo_trainer, "create_model_from_path", load)
        trainer = build(tmp_path, name, adapter)
        found = {"start": fleet()._processes[0].start}
        trainer.train()
        found["plan"] = type(trainer.host.updates._sync._source).__name__
        trainer.close()
        return found

    with forked(body, 1, tmp_path) as (one,):
        found = one.result
    assert found == {"start": 0, "plan": "AdapterSource"}, one.text
    assert one.text.count("starting 1 engine(s)") == one.text.count("1 engine(s) ready") == 1


def test_the_engine_is_ready_before_trls_init_begins_with_a_model_object(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_MULTINODE_ENGINE_MODULE", FAKE)
    model = tiny_qwen2()
    model.config._name_or_path = str(save_tiny(tmp_path / "model"))  # of the tokenizer

    def body(rank: int) -> int:
        monkeypatch.setattr(grpo_trainer, "set_seed", wait_for_engine)
        trainer = build(tmp_path, model)
        trainer.train()
        trainer.close()
        return trainer.state.global_step

    with forked(body, 1, tmp_path) as (one,):
        assert one.result == 1, one.text
    assert one.text.count("starting 1 engine(s)") == 1


def test_a_load_that_changes_the_model_starts_the_engines_again(tmp_path, monkeypatch):
    """The probe after the first sync compares log-probs, so the engine has the right weights."""
    monkeypatch.setenv("TRL_MULTINODE_ENGINE_MODULE", FAKE)
    name = str(save_tiny(tmp_path / "model"))
    pids: list[int] = []

    def load(*args, **kwargs):
        pids.append(fleet()._processes[0].pid)
        model = create_model_from_path(*args, **kwargs)
        model.resize_token_embeddings(320)
        return model

    def body(rank: int) -> dict:
        monkeypatch.setattr(grpo_trainer, "create_model_from_path", load)
        trainer = build(tmp_path, name)
        (process,) = fleet()._processes
        found = {"ended": not is_running(pids[0]), "start": process.start}
        folder = Path(process._spec.engine_args["model"])
        found["vocabulary"] = json.loads((folder / "config.json").read_text())["vocab_size"]
        trainer.train()
        trainer.close()
        return found | {"folder_left": folder.parent.exists()}

    with forked(body, 1, tmp_path) as (one,):
        found = one.result
    assert found == {"ended": True, "start": 1, "vocabulary": 320, "folder_left": False}, one.text
    differs = "the loaded model differs from its outline in vocab_size (config.json)"
    assert one.text.count(differs) == 1, one.text


def test_a_failing_load_ends_the_engines_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_MULTINODE_ENGINE_MODULE", FAKE)
    name = str(save_tiny(tmp_path / "model"))

    def body(rank: int) -> dict:
        found = {}

        def load(*args, **kwargs):
            found.update(folder=str(fleet().folder), pid=fleet()._processes[0].pid)
            found["ran"] = is_running(found["pid"])
            raise OSError("no weights")

        monkeypatch.setattr(grpo_trainer, "create_model_from_path", load)
        with pytest.raises(OSError, match="no weights"):
            build(tmp_path, name)
        return found | {"runs": is_running(found["pid"]), "hosts": len(closing._with_engines)}

    with forked(body, 1, tmp_path) as (one,):
        found = one.result
    assert (found["ran"], found["runs"], found["hosts"]) == (True, False, 0), one.text
    assert not Path(found["folder"]).exists()


def test_without_an_outline_the_model_is_loaded_first_and_trl_reports_what_is_wrong(
    tmp_path, monkeypatch
):
    def no_outline(*_):
        raise AttributeError("no such class")

    def body(rank: int) -> list[bool]:
        found = []

        def load(*args, **kwargs):
            found.append(fleet()._run_folder is None and not fleet()._processes)
            raise OSError("no weights")

        monkeypatch.setattr(node_trainer, "outline", no_outline)
        monkeypatch.setattr(grpo_trainer, "create_model_from_path", load)
        with pytest.raises(OSError, match="no weights"):
            build(tmp_path, str(save_tiny(tmp_path / "model")))
        return found

    with forked(body, 1, tmp_path) as (one,):
        assert one.result == [True], one.text
    line = "the engines start after the model is loaded (AttributeError('no such class'))"
    assert one.text.count(line) == 1


# ---- a TRL that was not tested


@pytest.mark.parametrize(
    ("has_moved", "error", "warnings"), [(False, OSError, 1), (True, ConfigurationError, 0)]
)
def test_an_untested_trl_is_named_or_refused_before_the_model_loads(
    has_moved, error, warnings, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRL_MULTINODE_ENGINE_MODULE", FAKE)
    name = str(save_tiny(tmp_path / "model"))

    def body(rank: int) -> int:
        loads = []

        def load(*args, **kwargs):
            loads.append(args)
            raise OSError("no weights")

        monkeypatch.setattr(grpo_trainer, "create_model_from_path", load)
        monkeypatch.setattr(libraries, "installed", lambda library: "1.99.0")
        if has_moved:
            monkeypatch.setattr(libraries, "fingerprints", lambda source: {})
        with pytest.raises(error):
            build(tmp_path, name)
        return len(loads)

    with forked(body, 1, tmp_path) as (one,):
        assert one.result == warnings, one.text
    assert one.text.count("warning: trl 1.99.0") == warnings, one.text
    assert one.text.count("starting 1 engine(s)") == warnings, one.text


# ---- an engine that fails meanwhile


@pytest.mark.parametrize("launched", [True, False])
def test_an_engine_that_ends_beside_the_load_is_reported_at_once(tmp_path, monkeypatch, launched):
    """In a launch this ends the run. A single process may be a notebook, whose cell gets the error after the load."""
    monkeypatch.setenv("TRL_MULTINODE_ENGINE_MODULE", "multinode_kit.no_such_engine")
    ends: list[tuple[str, int]] = []
    lines: list[str] = []
    watch = SimpleNamespace(
        cleanups=[],
        chores=[],
        report=lambda cause, code: ends.append((cause, code)),
    )
    topology = Topology(0, 1, 0, 1, 0, 1, launched)
    phases = PhaseFile(tmp_path / "phases", rank=0, node=0)
    one = EngineFleet(
        topology, watch, HashStore(), NodeSettings(), tmp_path / "logs", lines.append, phases
    )
    settings = EngineSettings(NodeSettings(), topology, ON_CPU, torch.float32, {})
    given = settings, partial(save_without_weights, tiny_qwen2(), tiny_tokenizer())
    one.launch(*given)

    def reported() -> bool:
        one._follow(None)
        return "no_such_engine" in lines[-1]

    until(reported, "the end of the engine")
    one._follow(None)  # once is enough
    assert lines[-1].startswith("engine 0 of node 0 did not start")
    assert [code for _, code in ends] == ([ENGINE] if launched else [])
    with pytest.raises(EngineStartError, match="engine 0 of node 0 did not start"):
        one.start(*given)
    folder = one.folder
    one.close(None)
    assert not folder.exists()


# ---- what an outline promises


def differences(early: tuple[EngineSettings, Path], now: tuple[EngineSettings, Path]) -> list[str]:
    one = EngineFleet(ALONE, None, None, NodeSettings(), Path(), print, None)
    one._launched = early
    return one.differences(*now)


def described(folder: Path, model, processor) -> tuple[EngineSettings, Path]:
    save_without_weights(model, processor, folder)
    return EngineSettings(NodeSettings(), ALONE, ON_CPU, model.dtype, {}), folder


@pytest.mark.parametrize(
    ("init", "generation_file"),
    [
        ({}, True),
        ({"dtype": "bfloat16"}, False),
        ({"dtype": "auto", "attn_implementation": "eager", "max_position_embeddings": 512}, True),
    ],
)
def test_an_outline_of_a_name_promises_what_trl_loads(tmp_path, init, generation_file):
    name = save_tiny(tmp_path / "model")
    if not generation_file:
        (name / "generation_config.json").unlink()
    args = SimpleNamespace(model_init_kwargs=init, trust_remote_code=False)
    early = described(tmp_path / "early", *outline(args, {"model": str(name)}))
    loaded = create_model_from_path(str(name), **init)
    processor = AutoProcessor.from_pretrained(str(name), truncation_side="left")
    assert differences(early, described(tmp_path / "loaded", loaded, processor)) == []


def test_an_outline_of_a_model_with_images_sets_the_dtype_of_all_its_parts(tmp_path):
    renamed_llava(tmp_path / "model")
    args = SimpleNamespace(model_init_kwargs={"dtype": torch.bfloat16}, trust_remote_code=False)
    call = {"model": str(tmp_path / "model"), "processing_class": tiny_tokenizer()}
    model, processor = outline(args, call)
    assert processor is call["processing_class"] and model.device.type == "meta"
    loaded = create_model_from_path(call["model"], dtype=torch.bfloat16)
    early = described(tmp_path / "early", model, processor)
    assert differences(early, described(tmp_path / "loaded", loaded, processor)) == []


def test_an_adapter_is_not_added_to_the_users_own_model(tmp_path):
    model, adapter = tiny_qwen2(), LoraConfig(r=4, target_modules=["q_proj"])
    call = {"model": model, "processing_class": tiny_tokenizer(), "peft_config": adapter}
    outlined, _ = outline(SimpleNamespace(model_init_kwargs=None), call)
    assert hasattr(outlined, "peft_config") and not hasattr(model, "peft_config")
    assert outlined.get_base_model().dtype == model.dtype
    assert {parameter.device.type for parameter in outlined.parameters()} == {"meta"}
    assert adapter.base_model_name_or_path is None


def test_what_engines_would_notice_is_named_and_what_trl_sets_beside_the_model_is_not(tmp_path):
    model, tokenizer = tiny_qwen2(), tiny_tokenizer()
    settings, folder = described(tmp_path / "early", model, tokenizer)
    # as TRL and transformers do
    model.config.use_cache, model.config.pad_token_id, tokenizer.pad_token = False, 1, "<eos>"
    tokenizer.chat_template = "{{ messages }}"
    other = described(tmp_path / "same", model, tokenizer)
    assert differences((settings, folder), other) == []
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5.0}
    model.generation_config.eos_token_id = [1, 2]
    tokenizer.add_tokens(["new"])
    _, folder_of_others = described(tmp_path / "other", model, tokenizer)
    served = EngineSettings(NodeSettings(), ALONE, ON_CPU, torch.bfloat16, {}, lora_rank=9)
    found = differences((settings, folder), (served, folder_of_others))
    expected = {
        "dtype",
        "enable_lora",
        "max_lora_rank",
        "max_loras",
        "rope_parameters (config.json)",
        "eos_token_id (generation_config.json)",
        "added_tokens (tokenizer.json)",
    }
    assert expected <= set(found), found
    assert not [name for name in found if "pad" in name or "chat" in name or "cache" in name], found


def test_where_an_engine_shares_the_gpu_of_a_rank_it_starts_after_the_model(tmp_path):
    from trl_multinode.host import NodeHost

    host = NodeHost.__new__(NodeHost)
    host.rank = SimpleNamespace(has_engines=True)
    host.topology, host.devices = ALONE, EngineDevices((("0",),), shared_with_training=True)
    host.start_early(lambda: pytest.fail("no outline"), {})
    host.topology = SimpleNamespace(is_local_main=False)
    host.devices = ON_CPU
    host.start_early(lambda: pytest.fail("no outline"), {})
    # a node without engines
    host.rank, host.topology = SimpleNamespace(has_engines=False), ALONE
    host.start_early(lambda: pytest.fail("no outline"), {})
