"""Where a resumed trainer is put, and what every rank saves and restores for it."""

import itertools
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from refusals import refused
from safetensors.torch import save_file
from stubs import rounds_of
from transformers import TrainerState

from trl_multinode.engine.client import Rollout
from trl_multinode.node_settings import NodeSettings
from trl_multinode.rollouts.groups import Group
from trl_multinode.rollouts.saved_groups import decoded
from trl_multinode.run.phases import Phases
from trl_multinode.saving.checkpoints import (
    CheckpointLog,
    ranks_of_zero,
)
from trl_multinode.saving.resume import Resume, move_schedule, steps_of
from trl_multinode.saving.saved_rollouts import (
    SavedRollouts,
    rollouts_file,
    save_rollouts,
)
from trl_multinode.wire.messages import WeightVersion

PROMPTS = [[5, 6], [7]]
VERSION = WeightVersion(3, 4)


class Accelerator:
    """Of rank 0 of two; `other` is what the other rank puts into a gather of that shape, else the same as this one."""

    device = torch.device("cpu")
    process_index, num_processes, is_local_main_process, distributed_type = 0, 2, True, "DEEPSPEED"
    is_main_process = True

    def __init__(self, other: list | None = None):
        self.other = other

    def gather(self, mine):
        other = mine if self.other is None else torch.tensor(self.other)
        return torch.cat([mine, other if other.shape == mine.shape else mine])

    def pad_across_processes(self, tensor, pad_index):
        return tensor

    def wait_for_everyone(self):
        pass


class Alone(Accelerator):
    """Of one rank."""

    num_processes = 1

    def gather(self, mine):
        return mine


class Rows:
    """A stream whose rows end when `go` is set, which it is at first."""

    rows_left, stopped = 0, False

    def __init__(self):
        self.go, self.requests = threading.Event(), []
        self.go.set()

    def add(self, requests) -> None:
        self.requests += requests
        self.rows_left += len(requests)

    def poll(self):
        if not self.go.wait(0.01):
            return []
        found, self.requests = self.requests, []
        self.rows_left -= len(found)
        return [(request, [rows()[request.row]]) for request in found]


class RoundsOfARank:
    """The generation object of a rank, with a round ahead of two rows."""

    def __init__(self, max_staleness: int):
        self.stream = Rows()
        self.rounds = None
        if max_staleness:
            self.rounds = rounds_of(self.stream)
            self.rounds.updates.add(VERSION, 1)

    def submit(self) -> None:
        group = Group(2, 0, [{}, {}], PROMPTS, due=2, begun=1, min_update=VERSION.update)
        self.rounds.groups.submit([group])
        self.rounds.last_begun = 2

    def wait_for_open(self) -> None:
        self.rounds.groups.wait_for_all()

    def take(self):
        """Return the completions of round 2, if they are here."""
        if self.rounds is None or not self.rounds.groups.ids:
            return None
        self.rounds.begin_round(2, 1, 2, lambda rounds: None)
        self.rounds.take()
        return self.rounds.made(PROMPTS)


class Loader:
    """Eight micro-steps an epoch."""

    def __len__(self):
        return 8


class Stream:
    """A dataloader over an iterable dataset: it has `__len__`, which raises."""

    def __len__(self):
        raise TypeError("object of type 'IterableDataset' has no len()")


def trainer_at(
    step: int, output_dir, accelerator=None, loader=None, num_iterations: int = 1, **fields
):
    """At optimizer step `step`; a round has two micro-steps per iteration, an optimizer step has one."""
    args = {
        "output_dir": str(output_dir), "gradient_accumulation_steps": 1, "per_device_train_batch_size": 2,
        "steps_per_generation": 2, "save_only_model": False, "max_staleness": 1, "save_total_limit": None,
        "ignore_data_skip": False,
    } | fields  # fmt: skip
    if args["max_staleness"] is None:  # TRL's own config has no such field
        del args["max_staleness"]
    args = SimpleNamespace(**args)
    phases = Phases()
    return SimpleNamespace(
        args=args,
        host=SimpleNamespace(
            phases=phases,
            agreement=SimpleNamespace(preemption=SimpleNamespace(leaves=False)),
            topology="node 0, rank 0",
            watch=SimpleNamespace(ending=SimpleNamespace(resumes=True)),
            settings=NodeSettings(max_staleness=getattr(args, "max_staleness", 0)),
        ),
        accelerator=accelerator or Accelerator(),
        state=SimpleNamespace(global_step=step),
        callback_handler=SimpleNamespace(train_dataloader=Loader() if loader is None else loader),
        vllm_generation=RoundsOfARank(getattr(args, "max_staleness", 0)),
        num_generations=2,
        num_iterations=num_iterations,
        steps_per_round=2 * num_iterations,
        max_staleness=getattr(args, "max_staleness", 0),
        _step=step,
        _last_loaded_step=step,
        _buffered_inputs=[{"ids": torch.tensor([[1, 2]])}, {"ids": torch.tensor([[3, 4]])}],
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        get_train_dataloader=lambda: Loader() if loader is None else loader,
        lr_scheduler=schedule(),
        model_wrapped=SimpleNamespace(global_steps=step),
    )


def schedule(kind=torch.optim.lr_scheduler.LambdaLR, **fields):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    return kind(optimizer, **fields or {"lr_lambda": lambda step: 1 - step / 100})


def rows() -> list[Rollout]:
    return [
        Rollout(np.array([i, 9], np.int32), np.array([-0.5, -i], np.float32), VERSION, i)
        for i in range(2)
    ]


def save(trainer, step: int):
    """A checkpoint of this rank; returns its folder."""
    with Resume(trainer).saving():
        pass
    folder = Path(trainer.args.output_dir) / f"checkpoint-{step}"
    state = {"epoch": 0.5, "global_step": step}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def resumed(trainer, folder):
    """The trainer at its first step; a second step changes nothing."""
    trainer._step, trainer._buffered_inputs = 0, None
    resume = Resume(trainer)
    resume.choose(str(folder))
    resume.restore_position()
    resume.restore_position()
    return trainer


def saved_at(step: int, tmp_path, ahead: bool = True, **fields):
    trainer = trainer_at(step, tmp_path, **fields)
    if ahead:
        trainer.vllm_generation.submit()
    return save(trainer, step)


@pytest.mark.parametrize("has_format", [True, False])
def test_inside_a_block_position_block_and_the_round_ahead_come_back(has_format, tmp_path):
    folder = saved_at(3, tmp_path)
    if not has_format:
        (folder / "multinode.json").unlink()
    trainer = resumed(trainer_at(3, tmp_path), folder)
    assert trainer._step == 3
    assert [part["ids"].tolist() for part in trainer._buffered_inputs] == [[[1, 2]], [[3, 4]]]
    made = trainer.vllm_generation.take()
    # the numbers of updates begin anew, the optimizer step stays
    assert made.rows[0].version == WeightVersion(-1, 4)
    for row, was in zip(made.rows, rows(), strict=True):
        assert (
            row.tokens.tolist() == was.tokens.tolist()
            and row.logprobs.tolist() == was.logprobs.tolist()
        )
        assert row.engine == was.engine


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_at_the_end_of_a_block_only_the_round_ahead_comes_back_and_only_with_staleness(
    max_staleness, tmp_path
):
    folder = saved_at(4, tmp_path)
    trainer = resumed(trainer_at(4, tmp_path, max_staleness=max_staleness), folder)
    assert trainer._step == 4 and trainer._buffered_inputs is None
    assert (trainer.vllm_generation.take() is not None) == bool(max_staleness)


def test_a_round_that_was_ahead_is_made_again_by_a_run_in_flight(tmp_path):
    trainer = resumed(trainer_at(4, tmp_path, max_staleness=2), saved_at(4, tmp_path))
    assert trainer.vllm_generation.rounds.groups.ids == []


def test_a_checkpoint_waits_for_rows_in_the_phase_of_generation_and_a_preemption_does_not_wait(
    tmp_path,
):
    trainer, seen = trainer_at(4, tmp_path), []
    generation = trainer.vllm_generation
    generation.stream.go.clear()
    generation.submit()
    wait = generation.wait_for_open

    def wait_for_slow() -> None:
        """Let the rows end only when the checkpoint waits for them."""
        seen.append(trainer.host.phases.current)
        generation.stream.go.set()
        wait()

    generation.wait_for_open = wait_for_slow
    with trainer.host.phases("checkpoint"):
        trainer.host.agreement.preemption.leaves = True
        assert "open" not in Resume(trainer)._collect().notes
        trainer.host.agreement.preemption.leaves = False
        data = Resume(trainer)._collect().tensors["open"].numpy().tobytes()
        assert [row is not None for group in decoded(data).groups for row in group.rollouts] == [
            True,
            True,
        ]
    # which may take any time, while a checkpoint that writes nothing counts as stuck
    assert seen == ["generate"]
    assert generation.take() is not None  # the run itself goes on with it


def test_a_run_that_begins_anew_has_nothing_left_of_the_last_one(tmp_path):
    trainer = trainer_at(5, tmp_path)
    trainer.vllm_generation.submit()
    resume, trainer.state.global_step = Resume(trainer), 0
    assert resume.choose(None) is None
    resume.restore_position()
    assert (trainer._step, trainer._buffered_inputs, trainer.vllm_generation.take()) == (
        0,
        None,
        None,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
        {"num_iterations": 2},
    ],
    ids=str,
)
def test_rows_of_another_layout_are_not_used(tmp_path, change, caplog):
    """With other iterations, or another batch, the same position means another place in another block."""
    trainer = resumed(trainer_at(6, tmp_path, **change), saved_at(6, tmp_path))
    assert trainer._buffered_inputs is None and trainer.vllm_generation.take() is None
    assert "Rank 0: " in caplog.text and "checkpoint-6" in caplog.text


def test_a_rank_whose_neighbour_has_no_file_generates_afresh_with_it(tmp_path):
    """One rank that generates syncs and gathers; another that trains on a saved block would never meet it."""
    folder = saved_at(3, tmp_path)
    trainer = resumed(trainer_at(3, tmp_path, Accelerator(other=[0])), folder)
    assert trainer._buffered_inputs is None


def test_trls_own_config_resumes_from_a_checkpoint_without_rollouts(tmp_path):
    folder = saved_at(4, tmp_path, ahead=False)
    rollouts_file(folder, 0).unlink()
    trainer = resumed(trainer_at(4, tmp_path, max_staleness=None), folder)
    assert trainer._step == 4


def test_a_stream_has_no_length_and_its_position_counts_from_its_beginning(tmp_path):
    trainer = trainer_at(0, tmp_path, loader=Stream())
    resume = Resume(trainer)
    resume.choose(None)
    resume.restore_position()
    assert trainer._step == 0
    assert resumed(trainer_at(5, tmp_path, loader=Stream()), saved_at(5, tmp_path))._step == 5


@pytest.mark.parametrize(
    ("epoch", "data", "fields", "is_refused"),
    [
        (1.4, "stream", {}, True), (2.1, "stream", {}, True), (0.4, "stream", {}, False), (1.4, "table", {}, False),
        (1.4, "stream", {"ignore_data_skip": True}, False),
    ],
)  # fmt: skip
def test_a_checkpoint_of_a_later_pass_over_a_stream_is_refused_with_the_pass(
    epoch, data, fields, is_refused, tmp_path
):
    """Before: 6 prompts in 3 steps, stopped at step 4; the resumed run trained those of step 4 again."""
    folder, table = saved_at(4, tmp_path), Dataset.from_dict({"prompt": ["a", "b"]})
    (folder / "trainer_state.json").write_text(json.dumps({"epoch": epoch}))
    trainer = trainer_at(4, tmp_path, loader=Stream(), **fields)
    trainer.train_dataset = table.to_iterable_dataset() if data == "stream" else table
    if is_refused:
        with refused("train_dataset", "`ignore_data_skip=True`", got="IterableDataset"):
            Resume(trainer).choose(str(folder))
    else:
        assert Resume(trainer).choose(str(folder)) == str(folder)


def test_a_checkpoint_written_again_by_fewer_ranks_is_whole(tmp_path):
    """A run of two ranks was killed inside it; its second rank's marker has nobody else to remove it."""
    log = CheckpointLog(tmp_path, Accelerator())
    saving = log.saving(6)
    saving.__enter__()
    (tmp_path / "_multinode" / "saving" / "checkpoint-6.rank1").touch()
    del saving  # killed
    log = CheckpointLog(tmp_path, Alone())
    with log.saving(6) as folder:
        (folder / "trainer_state.json").write_text('{"epoch": 0.5}')
    assert log.last_whole() == tmp_path / "checkpoint-6"


# ---- checkpoints of other launches ----------------------------------------------------------------------------------


def zero_checkpoint(folder, *ranks: int, prefix: str = "") -> Path:
    states = folder / "checkpoint-4" / "global_step4"
    states.mkdir(parents=True)
    for rank in ranks:
        (states / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
        (states / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_model_states.pt").touch()
    return states.parent


@pytest.mark.parametrize("prefix", ["", "bf16_"])
@pytest.mark.parametrize(
    ("mine", "others"), [((0, 1), (2, 1)), ((0,), (2, 1)), ((), (0, 0))], ids=str
)
def test_a_checkpoint_of_as_many_ranks_is_not_converted_shared_or_not_and_none_without_zero(
    tmp_path, mine, others, prefix
):
    folder = zero_checkpoint(tmp_path, *mine, prefix=prefix)
    assert ranks_of_zero(folder, Accelerator([list(others)])) == (2 if mine else 0)


@pytest.mark.parametrize(
    ("mine", "others"), [((0, 1, 2, 3), (4, 1)), ((0, 1), (4, 0)), ((0,), (1, 0))], ids=str
)
def test_a_checkpoint_of_another_number_of_ranks_is_found(tmp_path, mine, others):
    saved_by = ranks_of_zero(zero_checkpoint(tmp_path, *mine), Accelerator([list(others)]))
    assert saved_by == (others[0] or len(mine))


def test_a_node_that_sees_only_its_own_ranks_knows_the_others(tmp_path):
    folder, wide = zero_checkpoint(tmp_path, 0), Accelerator()
    wide.num_processes = 4
    with CheckpointLog(tmp_path, wide).saving(4):
        pass
    assert ranks_of_zero(folder, Accelerator([[4, 1]])) == 4


def test_nodes_that_changed_places_are_told(tmp_path):
    """Rank 0 finds rank 1's file and the other way round."""
    with refused("machine_rank", "`--machine_rank`", got=[0, 1]):
        ranks_of_zero(zero_checkpoint(tmp_path, 1), Accelerator([[1, 0]]))


@pytest.mark.parametrize("prefix", ["", "bf16_"])
def test_what_a_larger_launch_left_in_a_folder_does_not_make_the_new_checkpoint_unusable(
    tmp_path, prefix
):
    """Four ranks wrote it, or began to; then one rank came to the same step."""
    folder = zero_checkpoint(tmp_path, 0, 1, 2, 3, prefix=prefix)
    save_rollouts(folder, 3, SavedRollouts({}, {"block": [], "layout": [4, 1, 1, 1, 1]}))
    (folder / "rng_state_3.pth").touch()
    alone = Alone()
    with CheckpointLog(tmp_path, alone).saving(4):
        save_rollouts(folder, 0, SavedRollouts({}, {"block": [], "layout": [1, 1, 1, 1, 1]}))
    assert ranks_of_zero(folder, alone) == 1
    left = {path.name for path in folder.rglob("*") if path.is_file()}
    assert left == {
        f"{prefix}zero_pp_rank_0_mp_rank_00_{part}_states.pt" for part in ("optim", "model")
    } | {"rollouts_rank0.safetensors", "multinode.json", "latest"}  # fmt: skip


def test_zero_states_are_no_part_of_a_checkpoint_without_deepspeed(tmp_path):
    """One rank under ZeRO, then two under DDP at the same step."""
    folder, both = zero_checkpoint(tmp_path, 0), Accelerator()
    (folder / "latest").write_text("global_step4")
    both.distributed_type = "MULTI_GPU"
    with CheckpointLog(tmp_path, both).saving(4):
        pass
    assert ranks_of_zero(folder, both) == 0
    assert [path.name for path in folder.iterdir()] == ["multinode.json"]


@pytest.mark.parametrize("content", ["missing", "strange", "cut off"])
def test_a_run_goes_on_without_a_rollouts_file_of_ours_and_logs_rank_and_folder(
    tmp_path, content, caplog
):
    folder = saved_at(3, tmp_path)
    path = rollouts_file(folder, 0)
    if content == "missing":
        path.unlink()
    elif content == "strange":
        save_file({"x": torch.zeros(1)}, path)
    else:
        path.write_bytes(path.read_bytes()[:-1])
    trainer = resumed(trainer_at(3, tmp_path), folder)
    assert trainer._buffered_inputs is None and trainer._step == 3
    assert "Rank 0: " in caplog.text and str(folder) in caplog.text
    if content == "missing":
        return
    zero = zero_checkpoint(tmp_path / "other", 0, 1)
    rollouts_file(zero, 0).write_bytes(path.read_bytes())
    assert ranks_of_zero(zero, Accelerator([[2, 1]])) == 2


def test_a_launch_that_begins_anew_beside_checkpoints_names_them_and_the_way_to_continue(
    tmp_path, caplog
):
    """As a requeued job does whose script calls a plain `train()`."""
    trainer, newest = trainer_at(0, tmp_path), saved_at(3, tmp_path)

    def warned(wanted, resumes: bool) -> bool:
        caplog.clear()
        trainer.host.watch.ending.resumes = resumes
        Resume(trainer).choose(wanted)
        return "checkpoint-3" in caplog.text and "last_checkpoint()" in caplog.text

    assert warned(None, resumes=False)
    assert not warned(None, resumes=True)
    assert not warned(str(newest), resumes=False)
    trainer.accelerator.is_main_process = False
    assert not warned(None, resumes=False)
    trainer = trainer_at(0, tmp_path / "empty")
    assert not warned(None, resumes=False)


def test_an_unfinished_checkpoint_that_the_script_names_is_refused(tmp_path):
    """transformers' `get_last_checkpoint` names it, for example."""
    folder = saved_at(3, tmp_path)
    (tmp_path / "_multinode" / "saving" / "checkpoint-3.rank1").touch()
    with refused("resume_from_checkpoint", got=tmp_path / "checkpoint-3"):
        Resume(trainer_at(3, tmp_path)).choose(str(folder))


# ---- other batches --------------------------------------------------------------------------------------------------


def after_steps(tmp_path, batches: list[int], rows: int = 16, epoch: float = 1.5) -> Path:
    """A checkpoint after 20 steps, in the second epoch after so many of its 32 rows."""
    folder = tmp_path / "first" / "checkpoint-20"
    folder.mkdir(parents=True)
    state = {"epoch": epoch, "global_step": 20, "best_global_step": 20}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    metadata = {"ranks": 2, "batches": batches, "place": [int(epoch), rows]}
    (folder / "multinode.json").write_text(json.dumps(metadata))
    return folder


@pytest.mark.parametrize(
    ("batches", "rows", "steps", "again"),
    [
        ([8, 4, 1, 2], 16, None, 0),
        ([16, 8, 1, 2], 16, 12, 0),
        ([4, 2, 1, 2], 16, 12, 0),
        # at the begin of the third round of 8
        ([4, 2, 1, 2], 22, 12, 3),
        ([6, 3, 1, 2], 12, 10, 2),
        # the same rounds, in a step of its own or with the begin of the next one
        ([8, 8, 1, 2], 24, 14, 0),
        ([8, 3, 1, 2], 15, 10, 3),
        # each round was trained twice, the third one once
        ([8, 4, 2, 2], 40, 12, 2),
        # half as many prompts
        ([8, 4, 1, 4], 16, 10, 0),
    ],
    ids=str,
)
def test_a_resume_with_other_batches_goes_on_at_the_same_rows(
    tmp_path, batches, rows, steps, again, caplog
):
    """This launch has rounds of 8 rows, steps of 4, and 8 steps an epoch."""
    trainer = trainer_at(20, tmp_path / "second")
    resume = Resume(trainer)
    folder = after_steps(tmp_path, batches, rows)
    resume.choose(str(folder))
    with resume.loading():
        trainer.state = TrainerState.load_from_json(str(folder / "trainer_state.json"))
    assert trainer.state.global_step == (steps or 20) and resume.epochs == 1
    trainer.lr_scheduler.last_epoch = 20
    resume.restore_position()
    if steps is None:
        assert trainer.model_wrapped.global_steps == 20
        return
    assert trainer.lr_scheduler.get_last_lr() == [pytest.approx(1 - steps / 100)]
    assert trainer.lr_scheduler.last_epoch == trainer.model_wrapped.global_steps == steps
    # else transformers would take a later checkpoint-20 for it
    assert trainer.state.best_global_step is None
    assert f" {again} prompts are trained again" in caplog.text


@pytest.mark.parametrize("was", [(8, 1, 2), (12, 1, 4), (12, 3, 2), (40, 2, 4)], ids=str)
@pytest.mark.parametrize("now", [(8, 1, 4), (12, 2, 2), (20, 1, 2), (40, 1, 4)], ids=str)
def test_no_prompt_is_left_out_whatever_the_rounds_and_steps_were(was, now):
    """Those behind are of whole rounds; less than a round of each and a step come again."""
    (round_was, iterations_was, of_prompt_was), (round_now, iterations, of_prompt) = was, now
    for step_was, step_now in itertools.product((4, 6), (2, 4, 8)):
        for step in range(0, 240 // step_was):
            rows = step * step_was
            found = steps_of(
                rows,
                [round_was, step_was, iterations_was, of_prompt_was],
                [round_now, step_now, iterations, of_prompt],
            )
            whole = rows // (round_was * iterations_was) * round_was / of_prompt_was
            behind = found * step_now / iterations / of_prompt
            most = (round_now + step_now / iterations) / of_prompt
            assert behind <= whole < behind + most


def test_epochs_that_leave_out_other_rows_are_counted_whole(tmp_path):
    """The epochs before had 3 rounds of 10, 30 of 32 rows, and this launch has 4 rounds of 8."""
    trainer = trainer_at(6, tmp_path / "second")
    resume = Resume(trainer)
    resume.choose(str(after_steps(tmp_path, [10, 10, 1, 2], rows=0, epoch=2.0)))
    assert resume.epochs == 2 and resume._steps == 16


def test_a_place_counts_the_short_last_step_of_an_epoch(tmp_path):
    """8 micro-steps an epoch, 3 an optimizer step: the third step has 2."""
    folder = saved_at(4, tmp_path, gradient_accumulation_steps=3)
    metadata = json.loads((folder / "multinode.json").read_text())
    assert metadata["place"] == [1, 12] and metadata["batches"] == [8, 12, 1, 2]


def test_a_later_pass_over_a_stream_is_refused_with_other_batches_too(tmp_path):
    trainer = trainer_at(6, tmp_path / "second", loader=Stream())
    trainer.train_dataset = Dataset.from_dict({"prompt": ["a"]}).to_iterable_dataset()
    with refused("train_dataset", "ignore_data_skip"):
        Resume(trainer).choose(str(after_steps(tmp_path, [4, 2, 1, 2])))


def test_larger_steps_in_the_same_folder_are_refused(tmp_path):
    """Their checkpoints would have lower numbers than those that are there."""
    folder = after_steps(tmp_path, [4, 2, 1, 2])
    expected = {"got": [8, 4, 1, 2], "expected": [4, 2, 1, 2]}
    with refused("gradient_accumulation_steps", "another `output_dir`", **expected):
        Resume(trainer_at(6, folder.parent)).choose(str(folder))


def test_a_schedule_of_deepspeed_moves_and_one_that_cannot_is_named(caplog):
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    def warmed(last: int) -> WarmupDecayLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        return WarmupDecayLR(optimizer, 200, 0.0, 1.0, 10, last_batch_iteration=last)

    whole = warmed(-1)
    for _ in range(100):
        whole.step()
    moved = warmed(50)
    move_schedule(SimpleNamespace(scheduler=moved), 100)
    assert moved.get_last_lr() == whole.get_last_lr() and "WarmupDecayLR" not in caplog.text
    move_schedule(schedule(torch.optim.lr_scheduler.StepLR, step_size=3), 100)
    assert "StepLR" in caplog.text


def test_a_checkpoint_of_deepspeed_is_refused_without_it(tmp_path):
    """transformers would load the weights, begin with a fresh optimizer and schedule, and say nothing."""
    folder = zero_checkpoint(tmp_path, 0)
    (folder / "trainer_state.json").write_text('{"epoch": 0.5, "global_step": 4}')
    (folder / "latest").write_text("global_step4")
    without = Alone()
    without.distributed_type = "MULTI_GPU"
    with refused("resume_from_checkpoint", "DeepSpeed config", got=folder):
        Resume(trainer_at(4, tmp_path, without)).choose(str(folder))


@pytest.mark.parametrize(("was", "ranks", "without"), [(3, 1, "[0]"), (1, 2, "[0, 1]")])
def test_random_states_that_begin_anew_are_named(tmp_path, capsys, caplog, was, ranks, without):
    folder = after_steps(tmp_path, [4 * ranks, 2 * ranks, 1], epoch=0.5)
    metadata = {"ranks": was}
    (folder / "multinode.json").write_text(json.dumps(metadata))
    Resume(trainer_at(6, tmp_path, Alone() if ranks == 1 else None)).choose(str(folder))
    assert f"those of the ranks {without}" in caplog.text + capsys.readouterr().out
