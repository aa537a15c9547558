"""A weight that is NaN or infinite is named by the rank that holds it; no engine loads it and nothing saves it."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from forks import even_nodes, on_gloo_ranks
from peft import LoraConfig, get_peft_model
from served import Keeper, serving
from test_weight_sync import Sharded
from torch import nn

from multinode_kit.models import tiny_qwen2
from multinode_kit.sources import prepare
from trl_multinode.errors import WeightsNotFiniteError
from trl_multinode.host.updates import Updates
from trl_multinode.node_trainer import NodeTrainer
from trl_multinode.run.topology import Topology
from trl_multinode.weights.finite import unchecked
from trl_multinode.weights.gathering import ShardGather
from trl_multinode.weights.peft_source import AdapterSource, PeftSource
from trl_multinode.weights.shards import own_part
from trl_multinode.weights.source import ModuleSource
from trl_multinode.weights.sync import WeightSync
from trl_multinode.weights.timings import SyncTimings
from trl_multinode.wire.messages import WeightVersion

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
DOWN = "model.layers.1.mlp.down_proj.weight"


def check(source, step=17, frozen=False) -> None:
    source.check(source.metadata(), step, frozen)


def source_of(dtype=torch.float32, sent_as=torch.float32):
    model = tiny_qwen2().to(dtype)
    return model.get_parameter(DOWN), ModuleSource(model, sent_as)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_the_weight_and_the_step_are_named(value, dtype):
    weight, source = source_of(dtype, sent_as=dtype)
    check(source)
    with torch.no_grad():
        weight[-1, -1] = value
    with pytest.raises(WeightsNotFiniteError, match=rf"node 0, rank 0: {DOWN} .* step 17") as found:
        check(source)
    assert "resume_from_checkpoint=True" in str(found.value)


def test_a_value_that_the_engines_dtype_cannot_hold_has_another_cure():
    weight, source = source_of(sent_as=torch.float16)
    with torch.no_grad():
        weight[3, 5] = -7e4
    with pytest.raises(WeightsNotFiniteError, match=r"-70000 .* float16 .*'dtype': 'bfloat16'"):
        check(source)


def test_a_buffer_may_be_infinite_but_not_nan():
    module = nn.Linear(4, 4)
    module.register_buffer("mask", torch.full((3,), -INF))
    module.register_buffer("steps", torch.tensor(3))
    module.register_buffer("nothing", torch.empty(0))
    source = ModuleSource(module, torch.bfloat16)
    check(source)
    module.mask[1] = NAN
    with pytest.raises(WeightsNotFiniteError, match="mask .*nan"):
        check(source)


def test_frozen_weights_are_checked_before_the_first_sync_and_when_a_script_changed_them(tmp_path):
    weight, source = source_of()
    weight.requires_grad_(False)
    checked = []
    source.check = lambda weights, step, frozen: checked.append(frozen)
    with serving(Keeper(), folder=tmp_path) as engines:
        sync = WeightSync(source, engines, 40_000)
        for update in range(1, 5):
            if update == 3:
                sync.send_everything()
            sync.run(WeightVersion(update))
    assert checked == [True, False, True, False]
    with torch.no_grad():
        weight[0, 0] = NAN
    del source.check
    check(source, frozen=False)
    with pytest.raises(WeightsNotFiniteError, match=DOWN):
        check(source, frozen=True)


@pytest.mark.parametrize("kind", [AdapterSource, PeftSource])
def test_adapters_are_checked_whether_they_are_sent_or_merged(kind):
    base = get_peft_model(tiny_qwen2(), LoraConfig(r=4, target_modules=["q_proj"])).get_base_model()
    source = kind(base, torch.float32)
    check(source)
    with torch.no_grad():
        base.model.layers[0].self_attn.q_proj.lora_B["default"].weight[0, 0] = NAN
    with pytest.raises(
        WeightsNotFiniteError,
        match=r"layers\.0\.self_attn\.q_proj\.lora_B\.(default\.)?weight .*nan",
    ):
        check(source)


@pytest.mark.fault("9")
def test_no_engine_of_any_node_loads_a_bucket_if_one_shard_of_one_rank_has_a_nan(tmp_path):
    """The padding of the test's shards is NaN on every rank, and is no finding."""

    def body(rank: int) -> list:
        model = Sharded(rank, 4)
        if rank % 2:
            return two_updates(model, None, rank)
        with serving(keeper := Keeper(), folder=tmp_path / str(rank)) as engines:
            return [
                *two_updates(model, engines, rank),
                sorted({update for update, _ in keeper.loaded}),
            ]

    def two_updates(model: Sharded, engines, rank: int) -> list:
        sync = WeightSync(
            ModuleSource(model, torch.bfloat16, ShardGather(CPU, even_nodes(2))), engines, 700
        )
        model.move_to(1)
        sync.run(WeightVersion(1, 1))
        model.move_to(2)
        if rank == 3:
            model.even.ds_tensor[2] = NAN
        try:
            sync.run(WeightVersion(2, 2))
        # the rank leaves, as under the watchdog, and the others notice
        except WeightsNotFiniteError as error:
            return [str(error)[:25]]
        except RuntimeError as error:
            return [type(error).__name__]
        return ["sent"]

    *others, third = on_gloo_ranks(body, 4, tmp_path)
    assert third == ["node 1, rank 3: even has values"[:25]]
    assert others == [["RuntimeError", [1]], ["RuntimeError"], ["RuntimeError", [1]]]


@pytest.mark.nightly  # as below and above, on shards of real libraries
@pytest.mark.zero3
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero3"])
@pytest.mark.fault("9")
def test_the_rank_that_holds_the_nan_finds_it_before_a_sync_and_before_a_save(
    kind, tmp_path, monkeypatch
):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)  # DeepSpeed reads them

    def body(rank: int) -> list[str]:
        model = tiny_qwen2()
        source = ModuleSource(model, torch.float32, ShardGather(CPU, even_nodes(2)))
        _, step = prepare(kind, model)
        step(torch.randint(2, 300, (1, 32)))
        topology = Topology(
            rank, 2, local_rank=rank, local_world_size=2, node=0, num_nodes=1, launched=True
        )
        updates = Updates.__new__(Updates)
        updates._rank = SimpleNamespace(topology=topology, step=lambda: 1)
        before = [outcome(lambda: check(source)), outcome(lambda: updates.check_before_save(model))]
        weight = model.get_parameter(DOWN)
        poisoned = 0 if kind == "ddp" else 1  # the other copy of DDP goes nowhere
        if rank == poisoned:
            own_part(weight, sends_whole=True).view(-1)[-1] = NAN
        after = [outcome(lambda: check(source)), outcome(lambda: updates.check_before_save(model))]
        return [*before, *after]

    def outcome(call) -> str:
        try:
            call()
        except WeightsNotFiniteError as error:
            return DOWN if DOWN in str(error) and "nan" in str(error) else str(error)
        return "finite"

    ranks = on_gloo_ranks(body, 2, tmp_path)
    clean, found = ["finite"] * 4, ["finite", "finite", DOWN, DOWN]
    assert ranks == ([found, clean] if kind == "ddp" else [clean, found])


def test_shards_that_cannot_be_checked_are_counted_in_one_line(monkeypatch):
    """MiCS shares shards within smaller groups, NVMe has them on disk; ZeRO++ has a second copy of the same shard."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    model = nn.ModuleList(nn.Linear(8, 2, bias=False) for _ in range(6))
    model[5].weight.requires_grad_(False)
    assert unchecked(model) is None

    def shard(parameter, elements: int = 4, location: str | None = None):
        parameter.ds_tensor, parameter.ds_numel, parameter.ds_shape = (
            torch.zeros(elements),
            16,
            (2, 8),
        )
        parameter.ds_tensor.ds_numel = elements
        parameter.ds_tensor.final_location = location and SimpleNamespace(name=location)
        return parameter

    shard(model[0].weight)
    assert unchecked(model) is None
    shard(model[1].weight, elements=8)  # MiCS over 2 of 4 ranks
    shard(model[2].weight, location="nvme")
    shard(model[3].weight).ds_secondary_tensor = torch.zeros(8)  # ZeRO++: the first copy is checked
    shard(model[5].weight, elements=8)  # frozen, so nothing changes it
    assert (line := unchecked(model)) and line.startswith("2 of 5 ")

    class Engines(list):
        def post_all(self, request) -> list:
            return []

    told, timings = [], SyncTimings()
    for rank in (0, 1):
        topology = SimpleNamespace(rank=rank, is_local_main=False)
        updates = SimpleNamespace(
            _rank=SimpleNamespace(
                topology=topology,
                report=told.append,
                fills_slots=False,
                has_agents=False,
            ),
            _sync=SimpleNamespace(run=lambda version: timings, settle=dict, staged=False),
            engines=Engines(), model=model,
            divergence_limit=1.0, _read_clocks=lambda *_: None,
            _presence=SimpleNamespace(activity=SimpleNamespace()),
            _probe=lambda engines: None,
        )  # fmt: skip
        updates._prepare_model = partial(Updates._prepare_model, updates)
        for update in (1, 2):
            assert Updates.sync(updates, WeightVersion(update)) is timings
    assert told == [line]


def test_save_model_writes_nothing_and_so_no_push_has_a_file(monkeypatch):
    """`push_to_hub` and every checkpoint call it."""
    written = []
    monkeypatch.setattr(
        transformers.Trainer, "save_model", lambda self, *_, **__: written.append(self)
    )
    trainer = NodeTrainer.__new__(NodeTrainer)
    updates = Updates.__new__(Updates)
    updates._rank = SimpleNamespace(topology=Topology.from_environment({}), step=lambda: 5)
    trainer.host = SimpleNamespace(updates=updates)
    trainer.model = tiny_qwen2()
    trainer.save_model("folder")
    with torch.no_grad():
        trainer.model.get_parameter(DOWN)[0, 0] = INF
    with pytest.raises(WeightsNotFiniteError, match=rf"node 0, rank 0: {DOWN} .*inf .* step 5"):
        trainer.save_model("folder")
    assert len(written) == 1
