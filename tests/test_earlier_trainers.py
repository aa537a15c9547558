"""A trainer that a script or a notebook has dropped or replaced: its engines end, and their GPUs are free."""

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
from datasets import Dataset
from forks import forked
from waiting import HANG_S

import trl_multinode.host.closing as host_module
from multinode_kit.engines import FAKE
from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from multinode_kit.waiting import wait_until
from trl_multinode import GRPOConfig, GRPOTrainer
from trl_multinode.host.closing import Closing
from trl_multinode.host.rank import RankContext
from trl_multinode.node_settings import NodeSettings
from trl_multinode.run.topology import EngineDevices, Topology
from trl_multinode.run.watch.watchdog import Watchdog
from trl_multinode.wire.supervisor import is_running

LIMIT_S = HANG_S


def build(folder) -> GRPOTrainer:
    args = GRPOConfig(
        str(folder), use_cpu=True, bf16=False, report_to=[], num_generations=4, per_device_train_batch_size=4,
        max_completion_length=None, vllm_max_model_length=24, max_steps=1, save_strategy="no",
        gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": ["1 =", "2 ="]})
    reward = lambda completions, **_: [float(len(text)) for text in completions]  # noqa: E731
    return GRPOTrainer(tiny_qwen2(), reward, args, data, processing_class=tiny_tokenizer())


def engine_of(trainer: GRPOTrainer) -> int:
    return trainer.vllm_generation.engines[0].ready.pid


def has_ended(pid: int, within_s: float = LIMIT_S) -> bool:
    return wait_until(lambda: not is_running(pid), within_s)


def test_the_engines_of_a_collected_trainer_end(tmp_path, monkeypatch):
    """In one process, as in a notebook; a trainer that has trained, and one that is collected by the next one."""
    monkeypatch.setenv("TRL_MULTINODE_ENGINE_MODULE", FAKE)

    def body(rank: int) -> dict:
        gc.disable()  # so that only this test and the library collect
        first = build(tmp_path / "first")
        engine = engine_of(first)
        found = {"runs": not has_ended(engine, 0.0)}
        del first
        second = build(tmp_path / "second")
        found["ended_before_the_next"] = (
            has_ended(engine, 0.0) and len(host_module._with_engines) == 1
        )
        second.train()
        found["limit_without_a_limit"] = second.max_completion_length
        engine, dropped, folder = (
            engine_of(second),
            weakref.ref(second),
            second.host.updates._fleet.folder,
        )
        del second
        gc.collect()
        found["collected_after_training"] = dropped() is None
        found["ended"] = has_ended(engine)
        for thread in [
            thread for thread in threading.enumerate() if thread.name.startswith("watch")
        ]:
            thread.join(LIMIT_S)
        return found | {"folder_left": folder.exists(), "hosts": len(host_module._with_engines)}

    with forked(body, 1, tmp_path) as (one,):
        found = one.result
    assert found == {
        "runs": True, "ended_before_the_next": True, "collected_after_training": True, "ended": True,
        "folder_left": False, "hosts": 0, "limit_without_a_limit": 24,
    }, one.text  # fmt: skip


class Hosts(list):
    add = list.append


def host(
    gpus: str = "7", share: float | None = None, launched: bool = False, **engine_kwargs
) -> SimpleNamespace:
    """A host with one engine per letter of `gpus`, that notes what is done to it."""
    done: list[str] = []
    rank = SimpleNamespace(
        settings=NodeSettings(vllm_gpu_memory_utilization=share, engine_kwargs=engine_kwargs),
        devices=EngineDevices(tuple((gpu,) for gpu in gpus) or ((),), shared_with_training=False),
        topology=SimpleNamespace(launched=launched, is_local_main=True), is_collected=False, report=done.append,
    )  # fmt: skip
    made = SimpleNamespace(
        _rank=rank,
        done=done,
        close=lambda: done.append("close"),
        end_engines=lambda: done.append("end"),
    )
    made._takes_gpus_of = lambda other: Closing._takes_gpus_of(made, other)
    return made


@pytest.mark.parametrize(
    ("earlier", "new", "ends"),
    [
        (host("67"), host("7"), True),
        (host("6"), host("7"), False),
        (host("7", 0.4), host("7", 0.5), False),
        (host("7", 0.4), host("7"), True),
        (host("7", gpu_memory_utilization=0.1), host("7", gpu_memory_utilization=0.2), False),
        (host(""), host(""), False),  # on a CPU
    ],
)
def test_a_cell_that_is_run_again_gets_the_gpus_of_the_trainer_that_it_replaces(
    monkeypatch, earlier, new, ends
):
    """A name is bound again only when the new trainer is built, so the earlier one is not collected yet."""
    monkeypatch.setattr(host_module, "_with_engines", Hosts([earlier, new]))
    Closing.make_room(new)
    assert earlier.done == (["close"] if ends else [])
    assert len(new.done) == ends and all(
        "need the GPUs of an earlier trainer's" in line for line in new.done
    )


def test_ranks_of_a_launch_wait_for_each_other_only_at_their_end(monkeypatch):
    earlier, collected, new = host(launched=True), host("1", launched=True), host(launched=True)
    collected._rank.is_collected = True
    monkeypatch.setattr(host_module, "_with_engines", Hosts([earlier, collected, new]))
    Closing.make_room(new)
    assert earlier.done == collected.done == ["end"] and len(new.done) == 1


def test_the_step_outlives_the_trainer_and_does_not_keep_it():
    class Trainer:
        state = SimpleNamespace(global_step=3)

    ended: list[object] = []
    rank, trainer = RankContext.__new__(RankContext), Trainer()
    rank.watch, rank.topology = (
        SimpleNamespace(end_with=ended.append),
        SimpleNamespace(launched=False),
    )
    closing = Closing.__new__(Closing)
    closing._rank = rank
    rank.follow(trainer, closing.on_collected)
    assert rank.step() == 3 and not ended and not rank.is_collected
    del trainer
    assert rank.step() == 3 and ended == [closing._unattended] and rank.is_collected


def test_the_watch_thread_ends_with_what_it_was_given_even_if_that_fails(capsys):
    made = Closing.__new__(Closing)
    made.close = lambda: (watch.close(), 1 / 0)
    watch = Watchdog(Topology(0, 1, 0, 1, 0, 1, launched=False))
    watch.end_with(made._unattended)
    watch.of_process.thread.join(LIMIT_S)
    assert not watch.of_process.thread.is_alive() and "ZeroDivisionError" in capsys.readouterr().err
