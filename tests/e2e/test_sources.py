"""Weights of a model under DDP, FSDP2, ZeRO-1, -2 and -3, with and without offload, are the engine's after a sync."""

import json
from pathlib import Path

import pytest
from waiting import HANG_S

from multinode_kit.engines import FORKED
from multinode_kit.nodes import Nodes
from multinode_kit.sources import KINDS

SCRIPT = Path(__file__).parent / "scripts" / "sources.py"
NAMES = {
    "ddp": "DDP", "fsdp2": "FSDP2", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3",
    "zero3_offload_optimizer": "ZeRO-3, optimizer offloaded",
    "zero3_offload_param": "ZeRO-3, parameters and optimizer offloaded",
    "zero3_hpz": "ZeRO-3 with a secondary shard per node (ZeRO++)",
}  # fmt: skip
pytestmark = [pytest.mark.engine, pytest.mark.zero3, pytest.mark.two_node]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """One launch of two nodes x two ranks, a real vLLM on each, every kind in turn."""
    folder = tmp_path_factory.mktemp("sources")
    with Nodes(2, 2, folder=folder, forked=True) as nodes:
        nodes.launch(SCRIPT, str(folder), FORKED)
        assert nodes.wait(timeout_s=HANG_S) == [0, 0], nodes.rank_log(0)[-3000:]
    return [json.loads((folder / f"result_rank{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.feature("Weight sources", NAMES[kind]))
        for kind in KINDS
    ],
)
def test_log_probs_agree_after_each_of_five_syncs_and_disagree_before(kind, found):
    for rank in (0, 2):
        assert min(found[rank][kind]["stale"]) > 0.1 and len(found[rank][kind]["stale"]) == 5
        assert max(found[rank][kind]["fresh"]) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_source_costs_one_collective_across_nodes_per_bucket_and_a_whole_one_none(
    kind, found
):
    for rank in found:
        buckets, (across, within) = rank[kind]["buckets"], rank[kind]["collectives"]
        assert buckets > 5 and across == within
        # a forward without a backward leaves embedding and head whole, of three buckets each
        if kind == "fsdp2":
            assert buckets - 6 <= across < buckets
        else:
            assert across == (buckets if kind.startswith("zero3") else 0)
