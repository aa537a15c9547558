"""RED at 06068d8: each of these is a bug of the library, named in its docstring."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forks import on_gloo_ranks
from peft import LoraConfig, get_peft_model

import trl_multinode
from trl_multinode.errors import ConfigurationError, WeightSyncError
from trl_multinode.peft_source import AdapterSource, PeftSource, adapter_obstacle
from trl_multinode.shards import Shard, ShardGather
from trl_multinode.testing.models import tiny_qwen2

PACKAGE = Path(trl_multinode.__file__).parent
VLLMS_OWN = {"init_weight_transfer_engine", "update_weights"}


def parsed(name: str) -> ast.Module:
    return ast.parse((PACKAGE / name).read_text())


def test_what_the_engine_calls_in_every_worker_is_a_method_of_the_extension():
    """The merge left `crc_of_slot` inside `_weights`: with vLLM every self test of a transport fails, and `nccl` and
    `ipc` silently become `host`."""
    (extension,) = [n for n in parsed("engine_worker.py").body if getattr(n, "name", "") == "WorkerExtension"]
    methods = {node.name for node in extension.body if isinstance(node, ast.FunctionDef)}
    calls = [node for node in ast.walk(parsed("engine_main.py")) if isinstance(node, ast.Call)]
    called = {c.args[0].value for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "collective_rpc"}
    assert called - VLLMS_OWN == methods


def test_an_empty_sharded_tensor_alone_in_its_bucket_is_gathered(tmp_path):
    """`view(dtype)` of a buffer of no bytes raises: its stride is 1, not 0."""

    def body(rank: int) -> bool:
        gather = ShardGather(2, torch.device("cpu"))
        (pieces,) = gather.start([Shard(torch.empty(0), 0, (0, 5))], [torch.bfloat16]).wait()
        return rank > 0 or pieces.full().shape == (0, 5)

    assert on_gloo_ranks(body, 4, tmp_path) == [True] * 4


def adapted(**settings):
    return get_peft_model(tiny_qwen2(tied=False), LoraConfig(r=4, target_modules=["q_proj"], **settings))


def test_a_reference_adapter_beside_modules_to_save_is_not_sent():
    """TRL adds "ref" with beta > 0; its copy of the head travels as `lm_head.modules_to_save.ref.weight`."""
    model = adapted(modules_to_save=["lm_head"])
    model.add_adapter("ref", model.peft_config["default"])
    names = {meta.name for meta in PeftSource(model.get_base_model(), torch.float32).metadata()}
    assert not [name for name in names if "modules_to_save" in name]


def test_trainable_tokens_are_merged_or_refused_as_the_documentation_says():
    """docs/lora.md: "merged instead"; what happens is an error about DoRA, in `merged` as well."""
    model = adapted(trainable_token_indices=[1, 2])
    assert "token" in (adapter_obstacle(model.get_base_model(), torch.float32, on_gpu=False) or "")


def unfreeze(model) -> None:
    model.get_base_model().model.norm.weight.requires_grad_(True)


@pytest.mark.parametrize("change", [unfreeze, lambda model: model.unload()], ids=["unfrozen", "unloaded"])
def test_a_base_that_no_longer_is_what_the_engines_hold_is_told(change):
    """Only a merged or another adapter is; a parameter that is trained after all, or an adapter that was taken out,
    goes on silently with old weights."""
    model = adapted()
    source = AdapterSource(model.get_base_model(), torch.float32)
    change(model)
    with pytest.raises(WeightSyncError), source.gathering(tuple(source.metadata()[-2:])):
        pass


def test_a_refused_beginning_is_heard_by_the_ranks_that_wait_for_it(tmp_path):
    """The refusal ends the update *before* (`attempted` stays), so the node's other ranks sit in `Await` until
    `engine_stall_timeout`."""
    from served import Keeper, serving

    from trl_multinode.protocol import Await, BeginUpdate, WeightVersion

    with serving(Keeper(), folder=tmp_path, stall_timeout_s=1.0) as engines:
        with pytest.raises(WeightSyncError, match="before a whole one"):
            engines.ask(0, BeginUpdate(version=WeightVersion(1, 0), first_bucket=1))
        engines.ask(0, Await(min_update=1))


def test_page_locking_that_failed_is_told(monkeypatch):
    """`cudaHostRegister` returns an error code, which nobody looks at."""
    from trl_multinode.slots import HostSlots

    failing = SimpleNamespace(cudaHostRegister=lambda *args: 2)  # cudaErrorMemoryAllocation
    monkeypatch.setattr(torch.cuda, "cudart", lambda: failing)
    slots = None
    try:
        with pytest.raises((WeightSyncError, RuntimeError)):
            slots = HostSlots(256, pin=True)
    finally:
        if slots is not None:
            slots.close()


class Experts(torch.nn.Module):
    """Mixture-of-experts layers of transformers hold their weights so: parameters, no linear layers."""

    def __init__(self):
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.randn(3, 8, 6))

    def forward(self, x):
        return torch.einsum("bi,eio->bo", x, self.gate_up)


def test_an_adapter_on_a_bare_parameter_is_merged_or_refused():
    """SILENT WRONG WEIGHTS: `target_parameters` makes a layer `experts`; no tensor is called `experts.weight`, so
    `experts.gate_up` travels without its adapter. B is zero at the first sync: the probe sees nothing."""
    config = LoraConfig(r=2, target_modules=[], target_parameters=["0.gate_up"])
    model = get_peft_model(torch.nn.Sequential(Experts()), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    try:
        source = PeftSource(model.get_base_model(), torch.float32)
    except ConfigurationError:
        return
    with source.gathering(tuple(source.metadata())) as finish:
        sent = [pieces.full().clone() for pieces in finish()]
    (expected,) = model.merge_and_unload().parameters()
    assert torch.allclose(sent[0], expected, atol=1e-6)
