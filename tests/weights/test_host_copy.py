"""The copy of the last sent weights holds all that an engine needs from scratch, whatever a sync sends."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from served import Keeper, digest, serving
from torch import nn

from multinode_kit.models import tiny_qwen2
from trl_multinode.engine.group import EngineGroup
from trl_multinode.errors import WeightSyncError
from trl_multinode.weights.host_copy import HostCopy
from trl_multinode.weights.peft_source import AdapterSource, PeftSource
from trl_multinode.weights.source import ModuleSource, WeightSource
from trl_multinode.weights.sync import WeightSync
from trl_multinode.weights.transport import Transport
from trl_multinode.wire.messages import WeightVersion

LIMIT = 40_000  # bytes of a bucket; a layer is split over two


def sent(source: WeightSource) -> dict[str, torch.Tensor]:
    """Return what a sync of everything would send now."""
    metadata = tuple(source.metadata())
    with source.gathering(metadata) as finish:
        found = zip(metadata, finish(), strict=True)
        return {meta.name: pieces.full().to(meta.dtype).clone() for meta, pieces in found}


@torch.no_grad()
def train(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * 0.2)


@pytest.mark.parametrize("transport", ["host", "nccl"])
@pytest.mark.parametrize(
    ("source_class", "dtype"),
    [(ModuleSource, torch.bfloat16), (PeftSource, torch.float32), (AdapterSource, torch.bfloat16)],
)
def test_a_copy_has_the_last_sent_weights_whole(source_class, dtype, transport, tmp_path):
    """With an adapter of its own only the first update sends the base, and the copy keeps it from there."""
    model, lines = tiny_qwen2(), []
    if source_class is not ModuleSource:
        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
        ).get_base_model()
    source = source_class(model, dtype)
    running, again = Keeper(), Keeper()
    with serving(running, again, folder=tmp_path) as engines:
        said = Transport(transport, workers=[1], folder=tmp_path, report=pytest.fail)
        sync = WeightSync(source, EngineGroup([engines[0]]), LIMIT, said)
        sync.copy = HostCopy(lines.append)
        memory = []
        for update in (1, 2, 3):
            train(model)
            timings = sync.run(WeightVersion(update, update))
            memory.append(
                [sync.copy._buckets[bucket].data_ptr() for bucket in range(len(sync.buckets))]
            )
        assert memory[0] == memory[1] == memory[2]  # not allocated anew in every sync
        expected = sent(source)
        assert (timings.num_buckets < len(sync.buckets)) == (source_class is AdapterSource)
        train(model)  # the copy does not change with the model
        timings = sync.send_copy(WeightVersion(3, 3), EngineGroup([engines[1]]))
        assert digest(again.tensors) == digest(expected) and timings.num_buckets == len(
            sync.buckets
        )
        assert len(lines) == 1 and " MiB " in lines[0]
        sync.run(WeightVersion(4, 4))  # in new slots, and without the frozen weights, as before
        assert digest(running.tensors | sent(source)) == digest(running.tensors)
        sync.close()


def test_a_copy_of_another_version_is_not_sent(tmp_path):
    with serving(Keeper(), folder=tmp_path) as engines:
        sync = WeightSync(ModuleSource(tiny_qwen2(), torch.float32), engines, LIMIT)
        sync.copy = HostCopy(lambda text: None)
        # the first update sends everything
        assert sync.send_copy(WeightVersion(), engines).num_buckets == 0
        sync.run(WeightVersion(1, 0))
        with pytest.raises(WeightSyncError, match=r"update 1 \(step 0\).* update 2 \(step 1\)"):
            sync.send_copy(WeightVersion(2, 1), engines)
        sync.close()
