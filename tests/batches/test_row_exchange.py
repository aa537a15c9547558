"""Records reach their targets over two hops, and no rank has more peers than nodes and ranks of its node."""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forks import forked, on_gloo_ranks
from places import topology_on
from test_batching import num_calls

from trl_multinode.batches import row_exchange
from trl_multinode.batches.row_exchange import RowExchange
from trl_multinode.run.topology import Topology

CPU = torch.device("cpu")


def topology(rank: int, nodes: int, per_node: int) -> Topology:
    return topology_on([per_node] * nodes, rank)


def record(row: int, size: int) -> torch.Tensor:
    return torch.full((size,), row, dtype=torch.int32)


@pytest.mark.parametrize(
    ("nodes", "peers_of_rank"),
    [
        ([2, 2, 2], [[3, 2]] * 6),
        ([3], [[3]] * 3),
        ([1, 1, 1], [[3]] * 3),
        ([2, 1], [[3, 2], [3, 2], [3]]),
        ([2, 3], [[3, 2], [2, 2], [3, 3], [2, 3], [3, 3]]),
    ],
    ids=str,
)
def test_every_record_reaches_its_target_and_goes_back(nodes, peers_of_rank, tmp_path):
    """Rows of unequal sizes, one of no tokens; several rows, one or none between two ranks; rank 0 only receives."""
    ranks, rows = sum(nodes), 5
    random = np.random.default_rng(0)
    sizes, sources = random.integers(0, 9, ranks * rows), np.repeat(np.arange(ranks), rows)
    targets = np.where(sources == 0, 0, random.integers(0, ranks, ranks * rows))
    peers: list[int] = []

    def body(rank: int) -> list:
        exchange = RowExchange(topology_on(nodes, rank), "world", CPU)
        send = dist.all_to_all_single

        def spy(incoming, outgoing, in_sizes, out_sizes, group):
            peers.append(len(in_sizes))
            return send(incoming, outgoing, in_sizes, out_sizes, group=group)

        row_exchange.dist.all_to_all_single = spy
        held = {int(row): record(row, sizes[row]) for row in np.flatnonzero(sources == rank)}
        arrived = exchange.move(held, sizes, sources, targets)
        back = exchange.move(held | arrived, sizes, targets, sources)
        return [
            [{row: got.tolist() for row, got in found.items()} for found in (arrived, back)],
            peers,
        ]

    for rank, ((arrived, back), seen) in enumerate(on_gloo_ranks(body, ranks, tmp_path)):
        into = np.flatnonzero((targets == rank) & (sources != rank))
        home = np.flatnonzero((targets != rank) & (sources == rank))
        for found, expected in ((arrived, into), (back, home)):
            assert found == {str(row): record(row, sizes[row]).tolist() for row in expected}
        assert seen == peers_of_rank[rank] * 2


def test_rows_that_stay_on_their_node_cross_no_network(tmp_path):
    def body(rank: int) -> list:
        exchange = RowExchange(topology(rank, 2, 2), "node", CPU)
        sources, targets = np.arange(4), np.array([1, 0, 3, 2])
        arrived = exchange.move({rank: record(rank, 3)}, np.full(4, 3), sources, targets)
        return [exchange.groups, len(exchange._between._ranks), list(arrived)]

    arrived = [[[2, 2], 1, [row]] for row in (1, 0, 3, 2)]
    assert on_gloo_ranks(body, 4, tmp_path) == arrived


def test_lengths_of_all_ranks_in_their_order(tmp_path):
    def body(rank: int) -> list:
        exchange = RowExchange(topology(rank, 1, 3), "world", CPU)
        return exchange.all_lengths(torch.tensor([[rank, 10], [rank, 20]])).tolist()

    assert on_gloo_ranks(body, 3, tmp_path) == [[[[rank, 10], [rank, 20]] for rank in range(3)]] * 3


def test_a_rank_without_node_mode_learns_of_uneven_nodes(tmp_path, monkeypatch):
    """Two ranks on the first node, one on the second."""
    places = [topology_on([2, 1], rank) for rank in range(3)]

    def body(rank: int) -> list[int]:
        names = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
        )
        mine = places[rank]
        values = (rank, 3, mine.local_rank, mine.local_world_size, mine.node, 2)
        os.environ |= {name: str(value) for name, value in zip(names, values, strict=True)}
        found = row_exchange.topology_of_ranks(CPU)
        assert found == mine
        return [*found.first_ranks, *map(found.node_of, range(3))]

    assert on_gloo_ranks(body, 3, tmp_path) == [[0, 2, 0, 0, 1]] * 3


@pytest.mark.nightly  # a long simulation of the cost
def test_at_128_nodes_a_rank_has_133_peers_and_touches_only_its_own_rows_in_python(tmp_path):
    """With a process group that sends nothing: the calls are those of the rank's own work, 128 rows each."""
    nodes, per_node, rows = 128, 7, 128

    def body(_: int) -> dict:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=5, world_size=nodes * per_node, store=FakeStore())
        exchange = RowExchange(topology(5, nodes, per_node), "world", CPU)
        sources = np.arange(nodes * per_node * rows) // rows
        targets = np.random.default_rng(0).permutation(sources)
        sizes = np.full(len(sources), 600)
        held = {int(row): record(row, 600) for row in np.flatnonzero(sources == 5)}
        arrived: dict[int, torch.Tensor] = {}
        calls = num_calls(lambda: arrived.update(exchange.move(held, sizes, sources, targets)))
        peers = sum(len(hop._ranks) - 1 for hop in (exchange._between, exchange._within))
        return {"peers": peers, "arrived": len(arrived), "away": int((targets[sources == 5] != 5).sum()),
                "calls": calls}  # fmt: skip

    with forked(body, 1, tmp_path) as (one,):
        found = one.result
    assert found["peers"] == 133 and found["arrived"] == found["away"] > 100
    assert found["calls"] < 20 * rows, found
