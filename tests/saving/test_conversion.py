"""Conversion of a checkpoint for another number of ranks; `e2e/test_continued_elsewhere.py` trains with it."""

import pickle
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from refusals import refused
from safetensors.torch import save_file

from trl_multinode.errors import ConfigurationError
from trl_multinode.saving import conversion as module
from trl_multinode.saving.conversion import Conversion, restore_groups, separate_steps
from trl_multinode.saving.conversion_process import kept_tensors
from trl_multinode.saving.rotation import delete_leftovers


def checkpoint(folder: Path, *ranks: int) -> Path:
    source = folder / "checkpoint-4"
    states = source / "global_step4"
    states.mkdir(parents=True)
    for rank in ranks:
        (states / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"x" * 100)
    (source / "latest").write_text("global_step4")
    (source / "trainer_state.json").write_text("{}")
    return source


@pytest.fixture
def converted(monkeypatch):
    """The targets of DeepSpeed's converter, which only makes its folder here."""
    targets = []

    def run(command, **_):
        targets.append(Path(command[-1]))
        targets[-1].mkdir()
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(module.subprocess, "run", run)
    return targets


def test_a_conversion_has_its_name_only_when_it_is_whole_and_is_made_once(tmp_path, converted):
    conversion = Conversion(checkpoint(tmp_path, 0, 1), 2, tmp_path, 0)
    conversion.make()
    (target,) = converted
    assert target.name == "global_step4" and target.parent != conversion.folder
    assert [path.name for path in (tmp_path / "_multinode").iterdir()] == [conversion.folder.name]
    conversion.make()
    Conversion(tmp_path / "checkpoint-4", 2, tmp_path, 3).make()
    assert len(converted) == 1
    # a run that was killed before it had loaded it, and went on from another checkpoint
    left = tmp_path / "_multinode" / "universal-of-another"
    left.mkdir()
    conversion.delete_others()
    assert not left.exists() and conversion.folder.is_dir()
    left.mkdir()
    conversion.delete()
    conversion.delete()
    assert list((tmp_path / "_multinode").iterdir()) == []


@pytest.mark.fault("40")
def test_half_a_conversion_and_that_of_another_checkpoint_are_never_taken(
    tmp_path, converted, monkeypatch
):
    source = checkpoint(tmp_path, 0, 1)
    conversion = Conversion(source, 2, tmp_path, 0)

    def killed(command, **_):
        Path(command[-1]).mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.subprocess, "run", killed)
        with pytest.raises(KeyboardInterrupt):
            conversion.make()
    assert not conversion.folder.exists() and list((tmp_path / "_multinode").iterdir())
    delete_leftovers(tmp_path / "_multinode")
    assert not list((tmp_path / "_multinode").iterdir())
    conversion.make()
    (source / "trainer_state.json").write_text('{"log_history": [{"loss": 0.1}]}')
    other = Conversion(source, 2, tmp_path, 0)
    other.make()
    assert other.folder != conversion.folder and len(converted) == 2


def test_files_of_ranks_that_are_on_other_nodes_are_named(tmp_path, converted):
    missing = ["zero_pp_rank_1_mp_rank_00_optim_states.pt"]
    with refused("resume_from_checkpoint", "every node", got=missing):
        Conversion(checkpoint(tmp_path, 0, 2), 3, tmp_path, 0).make()
    assert converted == []


def test_a_disk_without_room_is_named_before_the_conversion(tmp_path, converted, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=499))
    with refused("output_dir", "as many ranks", got=499, expected=500):
        Conversion(checkpoint(tmp_path, 0, 1), 2, tmp_path, 0).make()
    assert converted == []


@pytest.mark.parametrize("how", ["fails", "is too slow"])
def test_a_conversion_that_fails_is_refused(tmp_path, monkeypatch, how):
    def run(command, timeout, **_):
        if how == "fails":
            return SimpleNamespace(returncode=1, stderr="Traceback\nKeyError: 'exp_avg'\n")
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(module.subprocess, "run", run)
    source = checkpoint(tmp_path, 0, 1)
    with pytest.raises(ConfigurationError) as caught:
        Conversion(source, 2, tmp_path, 0).make()
    assert caught.value.setting == "resume_from_checkpoint" and caught.value.got == source
    assert ("exp_avg" if how == "fails" else "600 s") in str(caught.value)


def test_a_node_that_shares_the_folder_and_is_faster_wins(tmp_path, converted, monkeypatch):
    source = checkpoint(tmp_path, 0, 1)
    slow, fast = Conversion(source, 2, tmp_path, 1), Conversion(source, 2, tmp_path, 0)
    sync = module.sync_tree

    def overtaken(folder: Path) -> None:
        sync(folder)
        if folder.name.endswith("-1"):
            fast.make()

    monkeypatch.setattr(module, "sync_tree", overtaken)
    slow.make()
    assert slow.folder.is_dir()


class Frozen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.trained, self.frozen = torch.nn.Linear(2, 2), torch.nn.Linear(3, 1)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.zeros(2))
        self.register_buffer("passing", torch.zeros(2), persistent=False)


def states(folder: Path, model: Frozen) -> Path:
    """Model states of two ranks under ZeRO-3, each with half of the frozen parameters."""
    folder.mkdir()
    frozen = {name: one for name, one in model.named_parameters() if not one.requires_grad}
    for rank in range(2):
        fragments = {}
        for name, one in frozen.items():
            padded = torch.nn.functional.pad(one.flatten(), (0, one.numel() % 2))
            fragments[name] = padded.chunk(2)[rank]
        content = {
            "module": {name: torch.empty(0) for name, _ in model.named_parameters()}
            | {"scale": model.scale},
            "param_shapes": [
                {"trained.weight": torch.Size([2, 2]), "trained.bias": torch.Size([2])}
            ],
            "shared_params": {},
            "frozen_param_shapes": {name: one.shape for name, one in frozen.items()},
            "frozen_param_fragments": fragments,
        }
        torch.save(content, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    return folder


def test_frozen_parameters_and_buffers_are_read_from_all_ranks(tmp_path):
    model = Frozen()
    model.scale.fill_(3)
    kept = kept_tensors(states(tmp_path / "states", model))
    expected = {
        "frozen.weight": model.frozen.weight,
        "frozen.bias": model.frozen.bias,
        "scale": model.scale,
    }
    assert kept.keys() == expected.keys()
    assert all(kept[name].equal(tensor) for name, tensor in expected.items())


def test_with_peft_the_checkpoint_has_no_frozen_parameters_and_zero_2_has_whole_ones(tmp_path):
    folder = tmp_path / "states"
    folder.mkdir()
    content = {"module": {"trained.weight": torch.ones(2), "lm_head": torch.ones(2), "frozen": torch.ones(3)},
               "param_shapes": [{"trained.weight": torch.Size([2])}], "shared_params": {"lm_head": "trained.weight"},
               "frozen_param_shapes": None}  # fmt: skip
    torch.save(content, folder / "mp_rank_00_model_states.pt")
    assert kept_tensors(folder).keys() == {"frozen"}


@pytest.mark.parametrize("missing", [False, True])
def test_the_model_gets_what_the_converted_checkpoint_keeps_and_a_lack_is_named(tmp_path, missing):
    saved = {
        "frozen.weight": torch.ones(1, 3),
        "frozen.bias": torch.ones(1),
        "scale": torch.ones(2),
    }
    if missing:
        del saved["frozen.bias"]
    save_file(saved, tmp_path / "kept.safetensors")
    model, conversion = Frozen(), Conversion(tmp_path, 2, tmp_path, 0)
    if missing:
        with refused("resume_from_checkpoint", "as many ranks", got=tmp_path) as caught:
            conversion._restore_kept(model, tmp_path / "kept.safetensors")
        assert "frozen.bias" in str(caught.value)
        return
    conversion._restore_kept(model, tmp_path / "kept.safetensors")
    for name, tensor in saved.items():
        assert model.state_dict()[name].equal(tensor)


def test_each_state_counts_its_own_steps():
    """DeepSpeed's loader for ZeRO-3 gives all states one tensor."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": [weight]} for weight in weights], fused=True)
    step = torch.tensor(100.0)
    for weight in weights:
        moments = {name: torch.zeros(2) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": step} | moments
        weight.grad = torch.ones(2)
    separate_steps(optimizer)
    for _ in range(10):
        optimizer.step()
    assert [float(optimizer.state[weight]["step"]) for weight in weights] == [110, 110]


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_optimizer_has_its_steps_on_its_device(fused):
    weight = torch.nn.Parameter(torch.ones(2, device="meta"))
    optimizer = SimpleNamespace(
        defaults={"fused": fused}, state={weight: {"step": torch.tensor(100.0)}}
    )
    separate_steps(optimizer)
    assert optimizer.state[weight]["step"].device.type == ("meta" if fused else "cpu")
    optimizer.state[weight]["step"] = 7
    separate_steps(optimizer)
    assert optimizer.state[weight] == {"step": 7}


class OwnClass:
    """No class of DeepSpeed's."""


@pytest.mark.parametrize("foreign", [False, True])
def test_each_parameter_group_gets_its_own_values_from_a_file_without_foreign_objects(
    tmp_path, foreign
):
    values = [
        {"lr": 0.1, "weight_decay": 0.5, "params": [0]},
        {"lr": 0.1, "weight_decay": 0.0, "params": [1]},
    ]
    content = {
        "optimizer_state_dict": {"param_groups": values},
        "loss_scaler": OwnClass() if foreign else LossScaler(1.0),
        "zero_stage": ZeroStageEnum.weights,
    }
    (tmp_path / "zero").mkdir()
    torch.save(content, tmp_path / "zero" / "optimizer_state.pt")
    groups = [{"lr": 0.1, "weight_decay": 0.5, "params": [name]} for name in "ab"]
    inner = SimpleNamespace(param_groups=groups)
    engine = SimpleNamespace(optimizer=SimpleNamespace(optimizer=inner))
    if foreign:
        with pytest.raises(pickle.UnpicklingError, match="OwnClass"):
            restore_groups(engine, tmp_path)
        return
    restore_groups(engine, tmp_path)
    assert [(group["weight_decay"], group["params"]) for group in groups] == [
        (0.5, ["a"]),
        (0.0, ["b"]),
    ]
