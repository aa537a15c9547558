"""Exact resume: positions, permutations, files, and which checkpoints are whole."""

import json
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from trl.trainer.utils import RepeatSampler

from trl_multinode.errors import ConfigurationError
from trl_multinode.saving.checkpoint_files import FORMAT, check_format, epochs_behind
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


@pytest.mark.parametrize(("steps_in_epoch", "accumulation"), [(8, 1), (8, 2), (6, 4), (5, 3), (2, 8)])
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
    return RepeatSampler(range(11), mini_repeat_count=2, batch_size=3, repeat_count=2, shuffle=shuffle, seed=7)


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
    found = load_rollouts(tmp_path, 3, torch.device("cpu:0"))  # as accelerate calls the CPU of a launched rank
    assert found.notes["layout"] == [4, 2, 2]
    for was, now in zip(block(), unpack_block(found), strict=True):
        assert torch.equal(was["ids"], now["ids"]) and now["items"].ndim == 0
        assert now["num_images"] == was["num_images"] and now.get("mask") is None
    assert load_rollouts(tmp_path, 2, torch.device("cpu")) is None
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


def finish(folder, epoch=1.5) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"epoch": epoch}))


def test_the_newest_checkpoint_that_all_ranks_see_is_chosen_and_the_others_are_named(tmp_path, caplog):
    for step in (2, 4, 10):
        finish(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "checkpoint-14").mkdir()
    (tmp_path / "checkpoint-14" / "trainer_state.json").write_text('{"epoch": 1.')
    finish(tmp_path / "checkpoint-16")
    (tmp_path / "checkpoint-16" / "global_step16").mkdir()
    (tmp_path / "checkpoint-18" / "trainer_state.json").mkdir(parents=True)
    (tmp_path / "checkpoint-best").mkdir()
    assert CheckpointLog(tmp_path, accelerator([2, 4, 10])).last_whole() == tmp_path / "checkpoint-10"
    said = [record.getMessage() for record in caplog.records]
    skipped = [f"checkpoint-{step}" for step in (12, 14, 16, 18)]
    assert [text.partition(" is skipped")[0][-13:] for text in said] == skipped
    assert "`latest`" in said[2] and "not readable" in said[3]
    assert CheckpointLog(tmp_path, accelerator([2, 4])).last_whole() == tmp_path / "checkpoint-4"
    with pytest.raises(ConfigurationError, match=r"rank 0 .*\[2, 4, 10\].*save_on_each_node"):
        CheckpointLog(tmp_path, accelerator([12])).last_whole()
    assert epochs_behind(tmp_path / "checkpoint-10") == 1


def test_a_first_run_has_nothing_to_go_on_from(tmp_path):
    assert CheckpointLog(tmp_path, accelerator([])).last_whole() is None


# ---- nothing whole


@pytest.mark.parametrize("other", [-1, -2], ids=["the other sees none", "the other sees some too"])
def test_only_unfinished_checkpoints_are_an_error_with_the_way_out_and_no_new_beginning(tmp_path, other):
    """A requeued run that begins anew at step 1 would look like one that resumed."""
    log = CheckpointLog(tmp_path, accelerator([other]))
    with pytest.raises(OSError, match="disk full"), log.saving(2) as folder:  # noqa: PT012
        finish(folder)
        raise OSError("disk full")
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(ConfigurationError, match="checkpoint-2 .*checkpoint-4 ") as raised:
        log.last_whole()
    said = str(raised.value)
    assert f"`rm -r {tmp_path}/checkpoint-2 {tmp_path}/checkpoint-4`" in said and "`output_dir`" in said


def test_unfinished_checkpoints_on_another_node_are_an_error_here_too(tmp_path):
    with pytest.raises(ConfigurationError, match="another node.*`rm -r FOLDERS`"):
        CheckpointLog(tmp_path, accelerator([-2])).last_whole()
    finish(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-4").mkdir()
    assert CheckpointLog(tmp_path, accelerator([2])).last_whole() == tmp_path / "checkpoint-2"


def test_a_folder_is_called_deletable_only_beside_one_that_all_ranks_can_resume(tmp_path, caplog):
    (tmp_path / "checkpoint-4").mkdir()
    finish(tmp_path / "checkpoint-2")
    with pytest.raises(ConfigurationError, match="all ranks"):
        CheckpointLog(tmp_path, accelerator([3])).last_whole()
    assert "checkpoint-4 is skipped" in caplog.text and "deleted" not in caplog.text
    CheckpointLog(tmp_path, accelerator([2])).last_whole()
    assert "checkpoint-4" in caplog.text and "deleted" in caplog.text


# ---- formats


def test_a_checkpoint_names_its_format_and_one_without_is_taken(tmp_path):
    with CheckpointLog(tmp_path, accelerator()).saving(2) as folder:
        finish(folder)
    written = json.loads((folder / "multinode.json").read_text())
    assert written == {"format": FORMAT, "trl_multinode": metadata.version("trl-multinode"), "ranks": 2}
    check_format(folder)
    (folder / "multinode.json").unlink()  # before format 1, or plain TRL
    check_format(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 9, "trl_multinode": "3.1"}', r"format 9 .*trl_multinode 3\.1.* 2\b"),
        ('{"form', "multinode.json"),
        ("[1]", "multinode.json"),
    ],
)
def test_a_newer_format_is_refused_with_the_cure(tmp_path, text, message):
    (tmp_path / "multinode.json").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        check_format(tmp_path)
