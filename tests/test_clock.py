"""The offset between the nodes' clocks, over a real store: ranks as threads, one clock per node."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from trl_multinode.run import clock_offset as clock
from trl_multinode.run.clock_offset import clock_offset
from trl_multinode.run.topology import Topology

ALONE = Topology(0, 1, 0, 1, 0, 1, launched=False)
AHEAD = [0.0, 2.5, -40.0]  # seconds of each node's clock


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))


def topology(rank: int, ranks_per_node: int = 2) -> SimpleNamespace:
    return SimpleNamespace(
        rank=rank,
        node=rank // ranks_per_node,
        num_nodes=len(AHEAD),
        is_local_main=rank % ranks_per_node == 0,
    )


def measure(store, ranks) -> list[float | None]:
    def of(rank: int) -> float | None:
        client = dist.TCPStore(
            "127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=60)
        )
        ahead = AHEAD[rank // 2]
        return clock_offset(topology(rank), client, lambda: 1000.0 + ahead)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(of, ranks))


@pytest.mark.fault("clock_skew")
def test_every_rank_gets_its_nodes_offset(store, monkeypatch):
    monkeypatch.setattr(clock, "LONGEST_WAIT", timedelta(seconds=60))
    assert measure(store, range(6)) == [AHEAD[rank // 2] for rank in range(6)]


def test_a_rank_that_does_not_respond_costs_the_offset_and_not_the_run(store, monkeypatch):
    monkeypatch.setattr(clock, "LONGEST_WAIT", timedelta(seconds=0.2))
    assert measure(store, [2, 3]) == [None, None]  # rank 0 is missing
    assert measure(store, [0, 1]) == [None, 0.0]  # a local main process is


def test_a_single_process_is_its_own_clock():
    assert clock_offset(ALONE, dist.HashStore()) == 0.0
