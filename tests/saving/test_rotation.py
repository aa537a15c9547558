"""Rotation of checkpoints by transformers' own Trainer: a run killed at any moment leaves a whole one to resume."""

import errno
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints
from transformers.utils import hub as transformers_hub

from multinode_kit.models import tiny_qwen2
from trl_multinode import node_trainer
from trl_multinode.errors import HubPushError
from trl_multinode.node_settings import NodeSettings
from trl_multinode.node_trainer import NodeTrainer
from trl_multinode.run.phases import Phases
from trl_multinode.run.topology import Topology
from trl_multinode.saving import pushing
from trl_multinode.saving.checkpoints import CheckpointLog
from trl_multinode.saving.resume import Resume


class Model(torch.nn.Module):
    """Four numbers, all equal to the step."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))


class Saving(NodeTrainer):
    """A trainer in node mode that saves checkpoints and does nothing else."""

    max_staleness, steps_per_round = 0, 1

    def __init__(self, folder: Path, model: torch.nn.Module | None = None, **settings):
        args = TrainingArguments(
            str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **settings
        )
        args.hub_push_must_succeed = True
        Trainer.__init__(self, model or Model(), args)
        self.create_optimizer_and_scheduler(10)
        self.host = SimpleNamespace(
            agreement=SimpleNamespace(preemption=SimpleNamespace(leaves=False)),
            topology=Topology(0, 1, 0, 1, 0, 1, launched=False),
            updates=SimpleNamespace(check_before_save=lambda model: None),
            phases=Phases(),
            watch=SimpleNamespace(ending=SimpleNamespace(resumes=True)),
            settings=NodeSettings(),
        )
        self.vllm_generation = SimpleNamespace(rounds=None)
        self._step, self.num_iterations = 0, 1
        self._initial_global_step = 0  # transformers 5.23 reads it at the end of a training
        self.use(folder)

    def use(self, folder: Path) -> None:
        self.args.output_dir = str(folder)
        self._resume = Resume(self)

    def save(self, step: int) -> Path:
        self.state.global_step = step
        self.state.epoch = step / 10
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(step)
        self._save_checkpoint(self.model, None)
        return Path(self.args.output_dir) / f"checkpoint-{step}"

    def last(self) -> Path | None:
        return CheckpointLog(Path(self.args.output_dir), self.accelerator).last_whole()


def test_old_logs_keep_what_trl_keeps(tmp_path, monkeypatch):
    """All ranks held 11.5 MiB more after 1000 logs of 100 metrics, and every checkpoint had them."""
    monkeypatch.setattr(node_trainer, "KEPT_LOGS", 3)
    trainer = Saving(tmp_path)
    trainer.vllm_generation.last_sync = None
    trainer._report = SimpleNamespace(metrics=lambda *_: {"perf/step_s": 1.0})
    for step in range(5):
        trainer.log({"loss": float(step)})
        trainer.log({"eval_reward": 0.5})
    losses = [one for one in trainer.state.log_history if "loss" in one]
    assert ["perf/step_s" in one for one in losses] == [False, False, False, False, True]
    assert [one["loss"] for one in losses] == [0.0, 1.0, 2.0, 3.0, 4.0]


# ---- kills ----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone: whatever runs after this may not touch a file either."""


class Disk:
    """Counts what changes files; from number `kill_at` on, nothing is changed any more."""

    def __init__(self):
        self.armed, self.count, self.kill_at, self.log = False, 0, None, []
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple) -> None:
        if self.armed and (event in CHANGES or (event == "open" and writes(args))):
            self.change(f"{event} {args[0]}")

    def change(self, what: str) -> None:
        self.log.append(what)
        self.count += 1
        if self.kill_at is not None and self.count >= self.kill_at:
            raise Killed

    @contextmanager
    def killing(self, at: int | None) -> Iterator[None]:
        self.armed, self.count, self.kill_at, self.log = True, 0, at, []
        try:
            yield
        except Killed:
            pass
        finally:
            self.armed = False


CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}


def writes(args: tuple) -> bool:
    return (
        isinstance(args[0], str)
        and isinstance(args[2], int)
        and bool(args[2] & (os.O_WRONLY | os.O_RDWR))
    )


@pytest.fixture(scope="module")
def hooked() -> Disk:
    return Disk()  # an audit hook cannot be removed


@pytest.fixture
def disk(hooked, monkeypatch) -> Disk:
    """Also sees what torch writes; its files and those of safetensors are opened outside of Python."""
    save = torch.save

    def seen(tensors, target, *args, **keywords):
        if hooked.armed:
            hooked.change(f"torch.save {target}")
        save(tensors, target, *args, **keywords)

    monkeypatch.setattr(torch, "save", seen)
    # 10 ms each; a kill of the process loses no page
    monkeypatch.setattr(os, "fsync", lambda number: None)
    return hooked


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.fault("34")
def test_a_run_killed_at_any_moment_of_saving_resumes_from_a_whole_checkpoint(
    tmp_path, disk, limit
):
    trainer = Saving(tmp_path / "whole", save_total_limit=limit)
    expected = names(trainer.save(1))
    trainer.save(2)
    with disk.killing(None):
        trainer.save(3)
    moments, log = disk.count, disk.log
    assert moments >= 15 and trainer.last().name == "checkpoint-3"
    for moment in range(1, moments + 1):
        folder = tmp_path / f"killed{moment}"
        trainer.use(folder)
        trainer.save(1)
        trainer.save(2)
        with disk.killing(moment):
            trainer.save(3)
        found = trainer.last()
        assert found is not None, f"nothing is whole after a kill before {log[moment - 1]}"
        step = int(found.name.removeprefix("checkpoint-"))
        assert step in (2, 3) and names(found) == expected, (
            f"{found} after a kill before {log[moment - 1]}"
        )
        assert load_file(found / "model.safetensors")["weight"].tolist() == [step] * 4
        assert torch.load(found / "optimizer.pt", weights_only=True).keys() == {
            "state",
            "param_groups",
        }
        trainer.save(3)
        assert trainer.last().name == "checkpoint-3"
        assert len(list(folder.glob("checkpoint-*"))) == limit and not list(
            folder.rglob("deleting-*")
        )
        shutil.rmtree(folder)


@pytest.mark.nightly  # the end of training; the moments of a save decide
def test_a_run_killed_while_its_last_checkpoint_gives_way_to_the_best_one_resumes_from_a_whole_one(
    tmp_path, disk
):
    """With `save_total_limit=1` transformers deletes all but the best checkpoint at the end of training."""
    trainer = Saving(tmp_path / "whole", save_total_limit=1)
    expected = names(finished(trainer))
    with disk.killing(None):
        trainer._finalize_training(None, 8, time.time())
    moments = disk.count
    assert moments >= 8 and trainer.last().name == "checkpoint-1"
    for moment in range(1, moments + 1):
        trainer.use(tmp_path / f"killed{moment}")
        finished(trainer)
        with disk.killing(moment):
            trainer._finalize_training(None, 8, time.time())
        assert names(trainer.last()) == expected
        trainer._resume.choose(None)
        assert not list(Path(trainer.args.output_dir).rglob("deleting-*"))


def finished(trainer: Saving) -> Path:
    """The best checkpoint of a trainer that has saved two, and trains no more."""
    trainer.state.best_model_checkpoint = None
    best = trainer.save(1)
    trainer.state.best_model_checkpoint = str(best)
    trainer.save(2)
    trainer._tr_loss, trainer._total_loss_scalar, trainer.state.max_steps = torch.zeros(()), 0.0, 2
    return best


class Ranks:
    """Rank 0 of two; the other one sees the finished checkpoints `others`, and `meet` is called where both wait."""

    device, process_index, num_processes, is_local_main_process = torch.device("cpu"), 0, 2, True
    distributed_type = "MULTI_CPU"

    def __init__(self, others: tuple[int, ...] = (), meet=lambda: None):
        self.others, self.wait_for_everyone = others, meet

    def pad_across_processes(self, tensor, pad_index):
        return tensor

    def gather(self, mine):
        return torch.cat([mine, torch.tensor([*self.others])])


# ---- what is deleted ------------------------------------------------------------------------------------------------


def folders_with(tmp_path: Path, times: dict[int, float]) -> Path:
    for step, seconds in times.items():
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text('{"epoch": 0}')
        os.utime(folder, (seconds, seconds))
    return tmp_path


@pytest.mark.parametrize("times", [
    {1: 10, 2: 20, 3: 30, 4: 40},
    {9: 10, 1: 20, 2: 30, 3: 40},  # an earlier run in the same folder went further
    {1: 10, 2: 10, 3: 10, 4: 10},  # a file system without times
], ids=["in order", "a second run", "no times"])  # fmt: skip
@pytest.mark.parametrize("limit", [1, 2, 3, 5])
@pytest.mark.parametrize("best", [None, 1, 2])
def test_the_checkpoints_that_stay_are_those_that_transformers_would_keep(
    tmp_path, times, limit, best
):
    newest = list(times)[-1]
    kept = []
    for who in ("transformers", "ours"):
        folder = folders_with(tmp_path / who, times)
        best_folder = str(folder / f"checkpoint-{best}") if best else None
        if who == "ours":
            (folder / "_multinode").mkdir()
            CheckpointLog(folder, Ranks()).rotate(newest, limit, best_folder, deletes=True)
        else:
            rotate_checkpoints(str(folder), limit, best_folder, use_mtime=True)
        kept.append({path.name for path in folder.glob("checkpoint-*")})
    assert kept[0] == kept[1] and f"checkpoint-{newest}" in kept[1]


def test_unfinished_checkpoints_go_before_whole_ones(tmp_path):
    folder = folders_with(tmp_path, {1: 10, 2: 20, 3: 30})
    markers = folder / "_multinode" / "saving"
    markers.mkdir(parents=True)
    (markers / "checkpoint-2.rank0").touch()
    CheckpointLog(folder, Ranks()).rotate(3, 2, None, deletes=True)
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-3"}


def test_the_old_checkpoint_stays_until_no_rank_marks_the_new_one_as_unfinished(tmp_path):
    """The other node has its own folder, and ends with its marker there: then both have only the old one in common."""
    markers = tmp_path / "_multinode" / "saving"
    seen = []

    def meet():
        seen.append(
            (any(markers.iterdir()), sorted(path.name for path in tmp_path.glob("checkpoint-*")))
        )
        if len(seen) == 3:  # two inside the save: before and after the record of the files
            raise ConnectionError("the other rank is gone")

    log = CheckpointLog(folders_with(tmp_path, {1: 10}), Ranks(others=(1,), meet=meet))
    with log.saving(2) as folder:
        (folder / "trainer_state.json").write_text('{"epoch": 0}')
    with pytest.raises(ConnectionError, match="the other rank is gone"):
        log.rotate(2, 1, None, deletes=True)
    assert seen == [(marked, ["checkpoint-1", "checkpoint-2"]) for marked in (True, True, False)]
    assert log.last_whole() == tmp_path / "checkpoint-1"


@pytest.mark.parametrize("refused", [False, True])
def test_a_checkpoint_that_another_node_moves_or_that_cannot_be_moved_ends_no_run(
    refused, tmp_path, monkeypatch, caplog
):
    """With `save_on_each_node` nodes may share the folder; the other one moves it after this one has listed it."""
    folder = folders_with(tmp_path, {1: 10, 2: 20})
    (folder / "_multinode").mkdir()
    rename = Path.rename

    def late(path, target):
        if refused:
            raise PermissionError(13, "Permission denied", str(path))
        shutil.rmtree(path)
        rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    CheckpointLog(folder, Ranks()).rotate(2, 1, None, deletes=True)
    assert refused or names(folder) == {"checkpoint-2", "_multinode"}
    assert refused == ("checkpoint-1" in caplog.text and "Permission denied" in caplog.text)


@pytest.mark.nightly  # e2e/test_continued decides
def test_what_a_run_was_deleting_is_deleted_at_the_next_start_and_never_resumed_from(tmp_path):
    trainer = Saving(tmp_path)
    left = tmp_path / "_multinode" / "deleting-checkpoint-7-1"
    shutil.copytree(trainer.save(1), left)
    assert trainer.last().name == "checkpoint-1" and left.exists()
    trainer._resume.choose(None)
    assert not left.exists() and (tmp_path / "checkpoint-1").exists()


def test_the_saved_arguments_have_the_users_limit(tmp_path):
    trainer = Saving(tmp_path, save_total_limit=3)
    saved = torch.load(trainer.save(1) / "training_args.bin", weights_only=False)
    assert saved.save_total_limit == trainer.args.save_total_limit == 3


# ---- the disk -------------------------------------------------------------------------------------------------------


def test_every_file_and_folder_is_on_disk_before_the_checkpoint_counts(tmp_path, disk, monkeypatch):
    synced, trainer = [], Saving(tmp_path, save_total_limit=1)
    trainer.save(1)
    monkeypatch.setattr(
        os,
        "fsync",
        lambda number: synced.append((os.readlink(f"/proc/self/fd/{number}"), disk.count)),
    )
    with disk.killing(None):
        folder = trainer.save(2)
    (unmarked,) = [
        i for i, what in enumerate(disk.log) if what.endswith("saving/checkpoint-2.rank0") and i > 2
    ]
    (renamed,) = [i for i, what in enumerate(disk.log) if what.endswith("checkpoint-1")]
    # the record of all files follows them, and is synced by itself
    ours = (
        "latest",
        "multinode.json",
    )
    last_write = max(
        i
        for i, what in enumerate(disk.log)
        if i < unmarked and not any(name in what for name in ours)
    )
    before = {path for path, count in synced if last_write < count <= unmarked}
    wanted = {str(path) for path in (*folder.rglob("*"), folder, tmp_path)} - {
        str(folder / "multinode.json")
    }
    assert len(wanted) >= 9 and wanted <= before
    (recorded,) = [
        i
        for i, what in enumerate(disk.log)
        if "os.rename" in what and "multinode.json" in what and i > last_write
    ]
    assert {(f"{folder}/multinode.json.rank0", recorded), (str(folder), recorded + 1)} <= set(
        synced
    )
    markers = str(tmp_path / "_multinode" / "saving")
    assert (markers, 2) in synced  # the marker, before the folder exists
    # its end, before a deletion
    assert any(path == markers and unmarked < count <= renamed for path, count in synced)
    assert (str(tmp_path), renamed + 1) in synced  # the new name, before the first file goes


def test_a_disk_that_cannot_write_leaves_the_checkpoint_unfinished(tmp_path, monkeypatch):
    trainer = Saving(tmp_path, save_total_limit=1)
    trainer.save(1)
    monkeypatch.setattr(os, "fsync", fails_on("optimizer.pt", errno.ENOSPC))
    with pytest.raises(OSError, match=r"No space left.*checkpoint-2/optimizer.pt"):
        trainer.save(2)
    assert trainer.last().name == "checkpoint-1"


def test_a_file_system_that_syncs_no_folders_will_do(tmp_path, monkeypatch):
    trainer = Saving(tmp_path)
    monkeypatch.setattr(os, "fsync", fails_on("checkpoint-1", errno.EINVAL))
    assert trainer.save(1) == trainer.last()


def fails_on(name: str, number: int):
    def fsync(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(name):
            raise OSError(number, os.strerror(number))

    return fsync


# ---- pushes ---------------------------------------------------------------------------------------------------------


@pytest.mark.nightly  # test_hub decides what a failed push raises
def test_a_push_that_failed_leaves_the_next_checkpoint_finished_and_the_old_one_there(
    tmp_path, loopback_hub, monkeypatch
):
    """The push of checkpoint 1 fails in the background; with `hub_push_must_succeed` checkpoint 2 raises its error."""
    monkeypatch.setattr(transformers_hub, "_hf_api", HfApi(endpoint=loopback_hub.endpoint))
    monkeypatch.setattr(pushing, "WAITS_S", (0.01,))
    trainer = Saving(
        tmp_path / "run", tiny_qwen2(), push_to_hub=True, hub_token="hf_x", save_total_limit=1
    )
    loopback_hub.fail(401, times=1, on="/commit/")
    trainer.save(1)
    trainer.push_in_progress.wait_until_done()
    with pytest.raises(HubPushError, match="hf upload tester/run"):
        trainer.save(2)
    assert trainer.last().name == "checkpoint-2" and (tmp_path / "run" / "checkpoint-1").is_dir()
    assert loopback_hub.commits == []
    assert trainer.save(3) == trainer.last() and not (tmp_path / "run" / "checkpoint-1").exists()
    # raises the reason of a push that failed
    assert all(job.result(60) for job in trainer.push_in_progress.jobs)
    assert loopback_hub.commits == ["Training in progress, step 3"]
