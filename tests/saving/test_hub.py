"""`HubTrainer` on transformers' own Trainer, in one process: what is checked, told and raised where."""

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from accelerate import DeepSpeedPlugin
from huggingface_hub import HfApi
from refusals import refused
from safetensors.torch import load_file, save_file
from transformers import TrainingArguments
from transformers.utils import hub as transformers_hub

from multinode_kit.models import tiny_qwen2
from trl_multinode.errors import HubPushError, SavedWeightsError
from trl_multinode.run.phases import Phases
from trl_multinode.run.topology import EngineDevices, Topology
from trl_multinode.saving import pushing
from trl_multinode.saving.hub import HubTrainer, check_push

TOKEN = "hf_SecretOfTheTest"
COMMIT = "/commit/"


@pytest.fixture
def hub(loopback_hub, monkeypatch):
    monkeypatch.setattr(pushing, "WAITS_S", (0.01,))
    monkeypatch.setattr(transformers_hub, "_hf_api", HfApi(endpoint=loopback_hub.endpoint))
    return loopback_hub


def build(
    folder: Path, must_succeed: bool = False, node_mode: bool = True, **settings
) -> HubTrainer:
    """A trainer that has saved checkpoint 1."""
    args = TrainingArguments(
        str(folder / "run"),
        use_cpu=True,
        push_to_hub=True,
        hub_token=TOKEN,
        report_to=[],
        **settings,
    )
    args.hub_push_must_succeed = must_succeed
    trainer_class = type("Pushing", (HubTrainer,), {"host": host() if node_mode else None})
    trainer = trainer_class(tiny_qwen2(), args)
    trainer.save_model(str(folder / "run" / "checkpoint-1"), _internal_call=True)
    return trainer


def host() -> SimpleNamespace:
    topology = Topology(0, 1, 0, 1, 0, 1, launched=False)
    devices = EngineDevices(((),), shared_with_training=False)
    agreement = SimpleNamespace(preemption=SimpleNamespace(leaves=False))
    return SimpleNamespace(topology=topology, devices=devices, phases=Phases(), agreement=agreement)


def push_checkpoint(trainer: HubTrainer) -> None:
    folder = f"{trainer.args.output_dir}/checkpoint-1"
    trainer._push_from_checkpoint(folder)  # as transformers does, inside the save
    if trainer.host is not None:
        trainer._push_finished(folder)


def spoil(folder: str) -> None:
    tensors = load_file(f"{folder}/model.safetensors")
    tensors["model.norm.weight"] = torch.empty(0)
    save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})


def test_a_wrong_checkpoint_is_not_pushed(hub, tmp_path):
    trainer = build(tmp_path)
    spoil(f"{trainer.args.output_dir}/checkpoint-1")
    with pytest.raises(SavedWeightsError, match="1 of 26 .*model.norm.weight"):
        push_checkpoint(trainer)
    assert hub.repos == {"tester/run": {}} and trainer.args.hub_token == TOKEN


def test_whole_checkpoints_are_checked_and_pushed_too(hub, tmp_path):
    trainer = build(tmp_path, hub_strategy="checkpoint")
    push_checkpoint(trainer)
    trainer._finish_current_push()
    assert {"model.safetensors", "last-checkpoint/model.safetensors"} <= hub.repos[
        "tester/run"
    ].keys()
    assert not any(TOKEN.encode() in content for content in hub.repos["tester/run"].values())


def test_a_checkpoint_before_a_preemption_is_not_pushed(hub, tmp_path, capsys):
    trainer = build(tmp_path)
    trainer.host.agreement.preemption.leaves = True
    push_checkpoint(trainer)
    assert "checkpoint-1" in capsys.readouterr().out
    assert hub.commits == []


def test_pushes_in_the_background_that_fail_are_told_and_the_next_one_goes_on(
    hub, tmp_path, capsys
):
    trainer = build(tmp_path)
    hub.fail(401, times=1, on=COMMIT)
    push_checkpoint(trainer)
    trainer._finish_current_push()
    assert "hf upload tester/run" in capsys.readouterr().out and hub.commits == []
    push_checkpoint(trainer)
    trainer._finish_current_push()
    assert len(hub.commits) == 1


@pytest.mark.parametrize("then", [HubTrainer._finish_current_push, push_checkpoint])
def test_a_push_in_the_background_that_must_succeed_ends_the_run_at_the_next_look(
    hub, tmp_path, then
):
    trainer = build(tmp_path, must_succeed=True)
    hub.fail(401, times=1, on=COMMIT)
    push_checkpoint(trainer)
    trainer.push_in_progress.wait_until_done()
    with pytest.raises(HubPushError, match="hf upload tester/run"):
        then(trainer)
    trainer.push_to_hub()  # who caught it may push again
    assert hub.commits == ["End of training"]


def test_a_repository_that_must_be_there_is_an_error_at_the_start_and_after_saving_at_the_end(
    hub, tmp_path
):
    trainer = build(tmp_path, must_succeed=True)
    trainer.hub_model_id = None
    hub.fail(403, on="/repos/create")
    with pytest.raises(HubPushError, match="403"):
        trainer.push_to_hub()
    assert (tmp_path / "run" / "model.safetensors").exists()
    with pytest.raises(HubPushError, match="repository run ") as caught:
        build(tmp_path, must_succeed=True)
    assert f"hf upload run {tmp_path}/run . --exclude '_*'" in str(
        caught.value
    ) and TOKEN not in str(caught.value)


def test_without_node_mode_it_does_what_transformers_does(hub, tmp_path):
    trainer = build(tmp_path, node_mode=False)
    spoil(f"{trainer.args.output_dir}/checkpoint-1")
    push_checkpoint(trainer)
    trainer._finish_current_push()
    files = hub.repos["tester/run"]
    assert "model.safetensors" in files and TOKEN.encode() in files["training_args.bin"]
    hub.fail(401, on=COMMIT)
    with pytest.raises(Exception, match="401"):
        trainer.push_to_hub()


@pytest.mark.parametrize(
    ("push", "stage", "gathers", "call", "is_refused"),
    [
        (True, 3, False, {}, True),
        (True, 3, True, {}, False),
        (True, 2, False, {}, False),
        (False, 3, False, {}, False),
        (True, 3, False, {"peft_config": object()}, False),
    ],
)
def test_pushes_that_would_have_no_weights_are_refused_before_the_model(
    push, stage, gathers, call, is_refused
):
    plugin = DeepSpeedPlugin(
        zero_stage=stage, zero3_save_16bit_model=gathers, zero3_init_flag=False
    )
    args = SimpleNamespace(push_to_hub=push, deepspeed_plugin=plugin)
    with (
        refused("zero3_save_16bit_model", "zero3_save_16bit_model: true")
        if is_refused
        else nullcontext()
    ):
        check_push(args, {"model": "name", **call})


def test_under_fsdp_a_push_needs_the_whole_state():
    args, fsdp = SimpleNamespace(push_to_hub=True), {"ACCELERATE_USE_FSDP": "true"}
    with refused("fsdp_state_dict_type", expected="FULL_STATE_DICT"), patch.dict(os.environ, fsdp):
        check_push(args, {"model": "name"})
    with patch.dict(os.environ, fsdp | {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}):
        check_push(args, {"model": "name"})
