"""Exact resume: positions, permutations, files, and which checkpoints are whole."""

import json
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from trl.trainer.utils import RepeatSampler

from trl_multinode.saving.checkpoint_files import (
    check_finished,
    epochs_behind,
    has_optimizer,
    newest_whole,
    read_metadata,
)
from trl_multinode.saving.checkpoints import (
    CheckpointLog,
    fast_forward,
    micro_steps_done,
)
from trl_multinode.saving.saved_rollouts import (
    load_rollouts,
    pack_block,
    save_rollouts,
    unpack_block,
)

# ---- where a run is


@pytest.mark.parametrize(
    ("steps_in_epoch", "accumulation"), [(8, 1), (8, 2), (6, 4), (5, 3), (2, 8)]
)
def test_the_position_is_the_one_of_a_run_that_did_not_stop(steps_in_epoch, accumulation):
    position, steps = 0, 0
    for _ in range(3):
        left = steps_in_epoch
        while left:
            taken = min(left, accumulation)  # the last optimizer step of an epoch may have fewer
            left, position, steps = left - taken, position + taken, steps + 1
            assert micro_steps_done(steps, steps_in_epoch, accumulation) == position
    assert micro_steps_done(7, None, 3) == 21


def sampler(shuffle: bool = True) -> RepeatSampler:
    return RepeatSampler(
        range(11), mini_repeat_count=2, batch_size=3, repeat_count=2, shuffle=shuffle, seed=7
    )


def test_the_second_epochs_order_is_the_second_epochs_order_after_a_resume():
    whole = sampler()
    epochs = [list(whole) for _ in range(3)]
    assert epochs[0] != epochs[1]
    resumed = fast_forward(sampler(), 1)
    assert [list(resumed), list(resumed)] == epochs[1:]
    assert list(fast_forward(sampler(), 0)) == epochs[0]
    assert list(fast_forward(sampler(shuffle=False), 2)) == list(sampler(shuffle=False))


# ---- files


def block() -> list[dict]:
    whole = torch.arange(12).reshape(4, 3)
    return [
        {"ids": whole[:2], "items": torch.tensor(7), "num_images": [1, 0], "mask": None},
        {"ids": whole[2:], "items": torch.tensor(7), "num_images": [2, 1], "mask": None},
    ]


def test_a_block_comes_back_as_trl_reads_it(tmp_path):
    saved = pack_block(block())
    saved.notes["layout"] = [4, 2, 2]
    save_rollouts(tmp_path, 3, saved)
    # as accelerate calls the CPU of a launched rank
    found = load_rollouts(tmp_path, 3)
    assert found.notes["layout"] == [4, 2, 2]
    for was, now in zip(block(), unpack_block(found), strict=True):
        assert torch.equal(was["ids"], now["ids"]) and now["items"].ndim == 0
        assert now["num_images"] == was["num_images"] and now.get("mask") is None
    assert load_rollouts(tmp_path, 2) is None
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts_rank3.safetensors"]


# ---- whole or not


def accelerator(others: list[int] = (), rank: int = 0, barrier=lambda: None):
    """Of two ranks; `others` is what the other one sees."""

    def gather(mine):
        return torch.cat([mine, torch.tensor([*others, -1])])

    return SimpleNamespace(
        device=torch.device("cpu"), process_index=rank, num_processes=2, is_local_main_process=True, gather=gather,
        pad_across_processes=lambda tensor, pad_index: tensor, wait_for_everyone=barrier, distributed_type="NO",
    )  # fmt: skip


class Both:
    """Accelerator of two ranks that see the same, but for one checkpoint that the other one `refuses`."""

    device = torch.device("cpu")
    process_index, num_processes, is_local_main_process = 0, 2, True

    def __init__(self, refuses=None):
        self.refuses = refuses and int(refuses.name.rpartition("-")[2])
        self.newest = None

    def pad_across_processes(self, tensor, pad_index):
        self.newest = int(tensor.max())
        return tensor

    def gather(self, mine):
        is_vote = len(mine) == 1 and int(mine) in (0, 1)
        return torch.cat([mine, mine * (self.newest != self.refuses) if is_vote else mine])


def finish(folder, epoch=1.5) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"epoch": epoch}))


def test_the_newest_checkpoint_that_all_ranks_see_is_chosen_and_the_others_are_named(
    tmp_path, caplog
):
    for step in (2, 4, 10):
        finish(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "checkpoint-14").mkdir()
    (tmp_path / "checkpoint-14" / "trainer_state.json").write_text('{"epoch": 1.')
    finish(tmp_path / "checkpoint-16")
    (tmp_path / "checkpoint-16" / "global_step16").mkdir()
    (tmp_path / "checkpoint-18" / "trainer_state.json").mkdir(parents=True)
    (tmp_path / "checkpoint-best").mkdir()
    assert (
        CheckpointLog(tmp_path, accelerator([2, 4, 10])).last_whole() == tmp_path / "checkpoint-10"
    )
    said = [record.getMessage() for record in caplog.records]
    skipped = [f"checkpoint-{step}" for step in (12, 14, 16, 18)]
    assert [text.partition(" is skipped")[0][-13:] for text in said] == skipped
    assert "`latest`" in said[2] and "not readable" in said[3]
    assert CheckpointLog(tmp_path, accelerator([2, 4])).last_whole() == tmp_path / "checkpoint-4"
    with refused("output_dir", "`save_on_each_node=True`", rank=0, got=[2, 4, 10]):
        CheckpointLog(tmp_path, accelerator([12])).last_whole()
    assert epochs_behind(tmp_path / "checkpoint-10") == 1


def test_a_first_run_has_nothing_to_go_on_from(tmp_path):
    assert CheckpointLog(tmp_path, accelerator([])).last_whole() is None


# ---- nothing whole


@pytest.mark.parametrize("other", [-1, -2], ids=["the other sees none", "the other sees some too"])
def test_only_unfinished_checkpoints_are_an_error_with_the_way_out_and_no_new_beginning(
    tmp_path, other
):
    """A requeued run that begins anew at step 1 would look like one that resumed."""
    log = CheckpointLog(tmp_path, accelerator([other]))
    with pytest.raises(OSError, match="disk full"), log.saving(2) as folder:  # noqa: PT012
        finish(folder)
        raise OSError("disk full")
    (tmp_path / "checkpoint-4").mkdir()
    with refused("resume_from_checkpoint", rank=0) as raised:
        log.last_whole()
    said = str(raised.value)
    assert (
        f"`rm -r {tmp_path}/checkpoint-2 {tmp_path}/checkpoint-4`" in said
        and "`output_dir`" in said
    )


def test_unfinished_checkpoints_on_another_node_are_an_error_here_too(tmp_path):
    with refused("resume_from_checkpoint", "`rm -r FOLDERS`", got={}):
        CheckpointLog(tmp_path, accelerator([-2])).last_whole()
    finish(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-4").mkdir()
    assert CheckpointLog(tmp_path, accelerator([2])).last_whole() == tmp_path / "checkpoint-2"


def test_a_folder_is_called_deletable_only_beside_one_that_all_ranks_can_resume(tmp_path, caplog):
    (tmp_path / "checkpoint-4").mkdir()
    finish(tmp_path / "checkpoint-2")
    with refused("output_dir", "`output_dir`", got=[2]):
        CheckpointLog(tmp_path, accelerator([3])).last_whole()
    assert "checkpoint-4 is skipped" in caplog.text and "deleted" not in caplog.text
    CheckpointLog(tmp_path, accelerator([2])).last_whole()
    assert "checkpoint-4" in caplog.text and "deleted" in caplog.text


# ---- damaged


def whole_checkpoint(output_dir, step: int):
    with CheckpointLog(output_dir, accelerator()).saving(step) as folder:
        finish(folder)
        (folder / "model.safetensors").write_bytes(b"header" + bytes(200_000) + b"end")
        (folder / "optimizer.pt").write_bytes(bytes(300_000))
        (folder / "scheduler.pt").write_bytes(b"schedule")
        (folder / "config.json").write_text("{}")
        (folder / "shards").mkdir(exist_ok=True)
        (folder / "shards" / "__0_0.distcp").write_bytes(b"shard")
    return folder


def replace_in(name: str, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


@pytest.mark.fault("damaged_checkpoint")
@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (
            replace_in("model.safetensors", lambda data: b""),
            "model.safetensors has 0 bytes, and 200009",
        ),
        (replace_in("model.safetensors", lambda data: data[:-1]), "has 200008 bytes"),
        (
            replace_in("model.safetensors", lambda data: b"HEADER" + data[6:]),
            "model.safetensors has other content",
        ),
        (
            replace_in("model.safetensors", lambda data: data[:-3] + b"END"),
            "model.safetensors has other content",
        ),
        (replace_in("shards/__0_0.distcp", lambda data: b""), "shards/__0_0.distcp has 0 bytes"),
        (replace_in("config.json", lambda data: b""), "config.json is no JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "scheduler.pt").unlink(), "scheduler.pt is missing"),
        (lambda folder: (folder / "optimizer.pt").unlink(), "optimizer.pt is missing"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    ],
)
def test_a_checkpoint_whose_files_changed_is_named_and_an_older_one_is_taken(
    tmp_path, damage, named, caplog
):
    """A requeued run would fail at this one again and again, or go on with a fresh optimizer."""
    older, newer = whole_checkpoint(tmp_path, 2), whole_checkpoint(tmp_path, 4)
    damage(newer)
    log = CheckpointLog(tmp_path, Both())
    assert log.last_whole() == older == newest_whole(tmp_path)
    assert named in caplog.text and "checkpoint-4" in caplog.text
    with refused("resume_from_checkpoint", got=newer) as caught:
        check_finished(newer, reads_files=True)
    assert named in str(caught.value)
    damage(older)
    with refused("resume_from_checkpoint", "`rm -r "):
        log.last_whole()


def test_a_checkpoint_that_another_node_finds_damaged_is_not_taken(tmp_path):
    older = whole_checkpoint(tmp_path, 2)
    newer = whole_checkpoint(tmp_path, 4)
    assert CheckpointLog(tmp_path, Both()).last_whole() == newer
    assert CheckpointLog(tmp_path, Both(refuses=newer)).last_whole() == older


def test_what_a_user_may_change_is_no_damage(tmp_path):
    folder = whole_checkpoint(tmp_path, 2)
    finish(folder, epoch=7)
    (folder / "config.json").write_text('{"use_cache": false}')
    (folder / "note.txt").write_text("the best one")
    check_finished(folder, reads_files=True)


def test_a_save_into_the_folder_of_an_earlier_one_has_a_record_of_its_own(tmp_path):
    whole_checkpoint(tmp_path, 2)
    with CheckpointLog(tmp_path, accelerator()).saving(2) as folder:
        finish(folder)
        (folder / "model.safetensors").write_bytes(b"another model")
        (folder / "scheduler.pt").unlink()
    check_finished(folder, reads_files=True)


def test_one_rank_of_each_folder_records_its_files(tmp_path):
    """Node 1 has a folder of its own: the lowest rank there is rank 1."""
    own = tmp_path / "node1"
    with CheckpointLog(own, accelerator(rank=1)).saving(2) as folder:
        finish(folder)
    assert "files" in read_metadata(folder)
    (tmp_path / "_multinode" / "saving").mkdir(parents=True)
    # of a rank that shares the folder
    (tmp_path / "_multinode" / "saving" / "checkpoint-2.rank0").touch()
    with CheckpointLog(tmp_path, accelerator(rank=1)).saving(2) as folder:
        finish(folder)
    assert "files" not in read_metadata(folder)


@pytest.mark.parametrize("missing", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_with_half_of_the_optimizers_state_is_refused(tmp_path, missing):
    """transformers loads none of the two then. One of plain TRL has no record of its files."""
    finish(tmp_path)
    assert not has_optimizer(tmp_path)
    for name in ("optimizer.pt", "scheduler.pt"):
        (tmp_path / name).write_bytes(b"state")
    assert has_optimizer(tmp_path)
    (tmp_path / missing).unlink()
    with refused("resume_from_checkpoint", "`resume_from_checkpoint`"):
        has_optimizer(tmp_path)


# ---- metadata


def test_a_checkpoint_has_metadata_and_one_without_is_taken(tmp_path):
    with CheckpointLog(tmp_path, accelerator()).saving(2, in_flight=False) as folder:
        finish(folder)
    written = json.loads((folder / "multinode.json").read_text())
    assert written == {
        "in_flight": False, "trl_multinode": metadata.version("trl-multinode"), "ranks": 2,
        "files": {"trainer_state.json": None},
    }  # fmt: skip
    (folder / "multinode.json").unlink()  # plain TRL
    check_finished(folder, reads_files=True)


@pytest.mark.parametrize("reads_files", [True, False])
@pytest.mark.parametrize("text", ['{"form', "[1]"])
def test_metadata_that_are_cut_off_are_refused_by_every_rank(tmp_path, text, reads_files):
    finish(tmp_path)
    (tmp_path / "multinode.json").write_text(text)
    with refused("resume_from_checkpoint", "resume_from_checkpoint", got=tmp_path):
        check_finished(tmp_path, reads_files)
