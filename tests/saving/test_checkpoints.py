"""Exact resume: positions, permutations, files, and which checkpoints are whole."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import safe_open
from trl.trainer.utils import RepeatSampler

from trl_multinode.errors import ConfigurationError
from trl_multinode.saving.checkpoints import (
    CheckpointLog,
    epochs_behind,
    fast_forward,
    load_rollouts,
    micro_steps_done,
    pack_block,
    rollouts_file,
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
    found = load_rollouts(tmp_path, 3, torch.device("cpu"))
    assert found.notes["layout"] == [4, 2, 2]
    for was, now in zip(block(), unpack_block(found), strict=True):
        assert torch.equal(was["ids"], now["ids"]) and now["items"].ndim == 0
        assert now["num_images"] == was["num_images"] and now.get("mask") is None
    assert load_rollouts(tmp_path, 2, torch.device("cpu")) is None
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts_rank3.safetensors"]


def test_the_file_holds_tensors_and_json_only(tmp_path):
    save_rollouts(tmp_path, 0, pack_block(block()))
    with safe_open(rollouts_file(tmp_path, 0), framework="pt") as file:
        assert json.loads(file.metadata()["notes"])["block"][1] == {"num_images": [2, 1]}


# ---- whole or not


def accelerator(others: list[int] = (), rank: int = 0, barrier=lambda: None):
    """Of two ranks; `others` is what the other one sees."""

    def gather(mine):
        return torch.cat([mine, torch.tensor([*others, -1])])

    return SimpleNamespace(
        device=torch.device("cpu"), process_index=rank, num_processes=2, is_local_main_process=True, gather=gather,
        pad_across_processes=lambda tensor, pad_index: tensor, wait_for_everyone=barrier,
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
    (tmp_path / "checkpoint-best").mkdir()
    assert CheckpointLog(tmp_path, accelerator([2, 4, 10])).last_whole() == tmp_path / "checkpoint-10"
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(" is skipped")[0][-13:] for text in said] == [f"checkpoint-{step}" for step in (12, 14, 16)]
    assert "`latest` is missing" in said[2]
    assert CheckpointLog(tmp_path, accelerator([2, 4])).last_whole() == tmp_path / "checkpoint-4"
    with pytest.raises(ConfigurationError, match=r"rank 0 sees those of the steps \[2, 4, 10\].*save_on_each_node"):
        CheckpointLog(tmp_path, accelerator([12])).last_whole()
    assert epochs_behind(tmp_path / "checkpoint-10") == 1


def test_a_first_run_has_nothing_to_go_on_from(tmp_path):
    assert CheckpointLog(tmp_path, accelerator([])).last_whole() is None


def test_a_checkpoint_that_a_rank_did_not_finish_is_unfinished_although_the_main_process_did(tmp_path, caplog):
    log = CheckpointLog(tmp_path, accelerator([2, 4]))
    with log.saving(2) as folder:
        finish(folder)
    with pytest.raises(OSError, match="disk full"), log.saving(4) as folder:  # noqa: PT012
        finish(folder)
        raise OSError("disk full")
    assert log.last_whole() == tmp_path / "checkpoint-2"
    assert "checkpoint-4 is skipped: unfinished" in caplog.text


def test_the_marker_goes_after_the_last_rank_is_through(tmp_path):
    seen = []
    log = CheckpointLog(tmp_path, accelerator(barrier=lambda: seen.append(log._whole_steps())))
    with log.saving(2) as folder:
        finish(folder)
    assert seen == [[]] and log._whole_steps() == [2]
