"""What is checked before an engine starts, and what an engine is started with."""

import json
import os
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from places import topology_on
from refusals import refused

from trl_multinode.call_checks import check_context, check_dataset
from trl_multinode.config import MultiNodeGRPOConfig
from trl_multinode.engine import settings as engine_settings
from trl_multinode.engine.environment import engine_environment
from trl_multinode.engine.settings import EngineSettings, check_vllm, engine_dtype
from trl_multinode.engine_process.vllm_backend import batch_tokens
from trl_multinode.errors import EngineError
from trl_multinode.host import NodeHost
from trl_multinode.host.closing import Closing
from trl_multinode.host.updates import Updates
from trl_multinode.node_settings import NodeSettings
from trl_multinode.run.endings.exit_codes import CONFIGURATION
from trl_multinode.run.topology import EngineDevices, NodeShape, Topology
from trl_multinode.wire.stop_signals import PREEMPT_VARIABLE

ONE_RESERVED = EngineDevices((("7",),), shared_with_training=False)
NODE_1 = Topology(
    rank=7, world_size=14, local_rank=0, local_world_size=7, node=1, num_nodes=2, launched=True
)


def config(tmp_path, **settings):
    return MultiNodeGRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, num_generations=2, **settings
    )


def settings(tmp_path, devices=ONE_RESERVED, dtype=torch.bfloat16, max_num_seqs=32, **fields):
    node_settings = NodeSettings.of(config(tmp_path, **fields))
    return EngineSettings(node_settings, NODE_1, devices, dtype, {"max_num_seqs": max_num_seqs})


def test_a_missing_vllm_is_told_with_the_command_that_installs_one(monkeypatch):
    monkeypatch.setattr(engine_settings, "installed", lambda name: None)
    monkeypatch.setattr(engine_settings.importlib.util, "find_spec", lambda name: None)
    with refused("vllm", "`pip install 'vllm>=0.26,<0.34'`"):
        check_vllm()


@pytest.mark.parametrize("found", ["0.25.1", "0.34.0"])
def test_a_vllm_out_of_range_is_told_with_the_range(monkeypatch, found):
    monkeypatch.setattr(engine_settings, "installed", lambda name: found)
    with refused("vllm", "vllm>=0.26,<0.34", got=found):
        check_vllm()


def test_another_engine_such_as_the_fake_one_needs_no_vllm(monkeypatch):
    monkeypatch.setattr(engine_settings, "installed", lambda name: "0.1")
    monkeypatch.setenv("TRL_MULTINODE_ENGINE_MODULE", "multinode_kit.fake_engine")
    check_vllm()


def test_with_tools_the_engines_context_may_not_be_below_the_models(tmp_path):
    args = config(tmp_path, vllm_max_model_length=1024)
    with refused("vllm_max_model_length", got=1024, expected=4096):
        check_context(args, 4096)
    check_context(args, 1024)


def test_after_close_nothing_large_is_held():
    """`atexit` would hold it, and the next trainer of a script needs the memory."""

    closed: list[str] = []

    class Large:
        def close(self) -> None:
            closed.append("sync")

    watch = SimpleNamespace(close=lambda: None, forget_processes=lambda: None)
    rank = SimpleNamespace(watch=watch, topology="node 0, rank 0")
    updates, large = Updates.__new__(Updates), Large()
    updates._rank, updates._fleet = rank, SimpleNamespace(close=lambda engines: None)
    updates.remote = SimpleNamespace(close=lambda: closed.append("port"))
    updates.engines = SimpleNamespace(close=lambda: closed.append("engines"))
    updates.ahead_engines, updates.model, updates._sync = None, large, large
    closing = Closing(rank, SimpleNamespace(end=lambda: None), updates)
    held = weakref.ref(large)
    for _ in range(2):  # file numbers belong to somebody else by the second time
        closing.close()
    del large
    assert held() is None and closed == ["port", "engines", "sync", "port"]
    with pytest.raises(EngineError, match="node 0, rank 0"):
        updates.sync(None)


@pytest.mark.fault("21")
def test_a_dataset_smaller_than_a_generation_batch_is_refused(tmp_path):
    args = config(tmp_path, per_device_train_batch_size=8)
    with refused("train_dataset", got=3, expected=4):
        check_dataset([1, 2, 3], args)
    check_dataset([1, 2, 3, 4], args)
    check_dataset(iter([]), args)  # a stream has no length


@pytest.mark.fault("22")
def test_batches_that_hold_no_whole_groups_are_told_with_ones_that_do(tmp_path):
    with refused("num_generations", "8, 16 or 32", got=8):
        MultiNodeGRPOConfig(
            str(tmp_path),
            use_cpu=True,
            bf16=False,
            num_generations=8,
            per_device_train_batch_size=3,
        )


def test_engines_get_nothing_that_would_join_them_to_the_trainers_and_no_token(
    monkeypatch, tmp_path
):
    for name in (
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "HF_TOKEN",
        "WANDB_API_KEY",
        "TORCHELASTIC_RUN_ID",
        "VLLM_API_KEY",
    ):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    found = engine_environment({"CUDA_VISIBLE_DEVICES": "7"}, tmp_path)
    assert "secret" not in found.values()
    assert found["VLLM_LOGGING_LEVEL"] == "INFO" and found["CUDA_VISIBLE_DEVICES"] == "7"
    assert found["VLLM_HOST_IP"] == "127.0.0.1"  # nothing listens beyond the node
    assert found["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"  # a fork would not load our plugin


@pytest.mark.nightly
@pytest.mark.real
def test_an_engine_logs_its_start_although_trl_has_asked_vllm_for_silence(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # as `import trl` does
    silenced = engine_environment({}, tmp_path)
    assert (silenced["VLLM_LOGGING_LEVEL"], silenced["TRL_MULTINODE_VLLM_LOGGING_LEVEL"]) == (
        "INFO",
        "ERROR",
    )
    script = (
        "from trl_multinode.engine.environment import logging_levels as levels; print(levels())"
    )
    chosen = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    printed = subprocess.run(
        [sys.executable, "-c", script], env=chosen, capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "{}"  # the user's own choice holds from the beginning


def test_memory_share_depends_on_who_else_is_on_the_gpu_and_the_users_value_wins(tmp_path):
    shared = EngineDevices((("0",),), shared_with_training=True)
    assert settings(tmp_path).arguments(tmp_path, 0)["gpu_memory_utilization"] == 0.9
    assert settings(tmp_path, shared).arguments(tmp_path, 0)["gpu_memory_utilization"] == 0.3
    chosen = settings(tmp_path, vllm_gpu_memory_utilization=0.5).arguments(tmp_path, 0)
    assert chosen["gpu_memory_utilization"] == 0.5


def test_rows_in_flight_count_all_ranks_of_the_node(tmp_path):
    assert settings(tmp_path).arguments(tmp_path, 0)["max_num_seqs"] == 7 * 32
    two = EngineDevices((("6",), ("7",)), False)
    assert settings(tmp_path, two).arguments(tmp_path, 0)["max_num_seqs"] == 7 * 16
    assert settings(tmp_path, two).window == 12  # of 16 that are a rank's share of one engine
    # nothing is left to balance: rows held back would wait for others beside free places of the only engine
    assert settings(tmp_path).window >= 7 * 32
    # JSON, as on a command line
    chosen = settings(tmp_path, two, engine_kwargs='{"max_num_seqs": 70}')
    assert chosen.arguments(tmp_path, 0)["max_num_seqs"] == 70 and chosen.window == 7


def test_an_engine_has_room_for_the_open_rounds_but_not_for_more_than_vllm_can_run_at_once(
    tmp_path,
):
    # of 7 x 256; vLLM did not start with 2048
    assert settings(tmp_path, max_num_seqs=256).max_num_seqs == 1024
    assert (
        settings(tmp_path, max_num_seqs=256, engine_kwargs={"max_num_seqs": 1792}).max_num_seqs
        == 1792
    )
    open_rounds = SimpleNamespace(
        in_flight=True,
        max_staleness=3,
        engine_kwargs={},
        vllm_tensor_parallel_size=1,
        min_engines=None,
    )
    rows = [
        EngineSettings(open_rounds, NODE_1, ONE_RESERVED, None, {"max_num_seqs": n}).max_num_seqs
        for n in (8, 64)
    ]
    assert rows == [4 * 7 * 8, 1024]


@pytest.mark.parametrize(
    ("chosen", "rows", "default", "expected"),
    [
        (None, 1024, 16384, None),  # an H100
        (None, 1024, 2048, 8192),
        (None, 64, 4096, 8192),  # a CPU
        (None, 6000, 8192, 12000),  # rows from `engine_kwargs`
        (512, 1024, 16384, 512),
    ],
)
def test_an_engine_computes_prompts_while_all_its_rows_generate(chosen, rows, default, expected):
    assert (
        batch_tokens(SimpleNamespace(max_num_batched_tokens=chosen, max_num_seqs=rows), default)
        == expected
    )


def test_engines_of_all_nodes_have_different_seeds_and_their_own_gpus(tmp_path):
    two = EngineDevices((("6",), ("7",)), False)
    made = settings(tmp_path, two, seed=42)
    made = replace(made, topology=topology_on([NodeShape(5, 3, 3), NodeShape(6, 2, 2)], rank=5))
    assert [made.arguments(tmp_path, index)["seed"] for index in (0, 1)] == [45, 46]
    assert [made.environment(index)["CUDA_VISIBLE_DEVICES"] for index in (0, 1)] == ["6", "7"]


def test_rows_of_open_rounds_leave_a_part_of_every_engine_free_for_evaluation(tmp_path):
    made = settings(tmp_path, max_staleness=3, engine_kwargs='{"max_num_seqs": 112}')
    assert made.open_window == 12  # of 16 that are a rank's share
    assert settings(tmp_path, max_staleness=3, engine_kwargs='{"max_num_seqs": 7}').open_window == 1


def test_the_engines_type_follows_training_and_can_be_set(tmp_path):
    model = SimpleNamespace(dtype=torch.float32)
    assert engine_dtype(NodeSettings.of(config(tmp_path)), model) == torch.float32
    assert engine_dtype(NodeSettings(bf16=True), model) == torch.bfloat16
    assert engine_dtype(NodeSettings(fp16=True), model) == torch.float16
    assert (
        engine_dtype(NodeSettings.of(config(tmp_path, engine_kwargs={"dtype": "float16"})), model)
        == torch.float16
    )


def test_a_failed_check_in_a_single_process_ends_its_watch_and_frees_its_folder(
    tmp_path, monkeypatch
):
    """In a notebook the user mends the setting and builds the next trainer."""

    def ending() -> dict:
        return json.loads((tmp_path / "_multinode/ending-node0.json").read_text())

    monkeypatch.setenv(PREEMPT_VARIABLE, "TERM")
    threads = threading.enumerate()
    with refused("TRL_MULTINODE_PREEMPT_SIGNAL", got="TERM"):
        NodeHost(config(tmp_path))
    assert not [
        thread
        for thread in threading.enumerate()
        if thread not in threads and thread.name == "watch"
    ]
    assert not (tmp_path / "_multinode/owner.json").exists()
    assert ending()["code"] == CONFIGURATION and "USR1 or USR2" in ending()["cause"]
    monkeypatch.delenv(PREEMPT_VARIABLE)
    host = NodeHost(config(tmp_path))
    host.phases.begin_step(0, is_last=False)
    with host.phases("train"):
        pass
    assert not host.rank.phase_file.path.exists()
    host.close()
    assert ending()["code"] == 0
    assert '"train"' in host.rank.phase_file.path.read_text()  # of a step that has not ended
