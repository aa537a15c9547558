"""Rounds of the ring, the slow link among many, and the measurement itself on forked processes."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from forks import forked

from multinode_kit.launch_files import free_port
from trl_multinode.tools.doctor import ring
from trl_multinode.tools.doctor.cluster import RingPlan, differing, measure_links
from trl_multinode.tools.doctor.facts import Fact, NodeReport
from trl_multinode.tools.doctor.links import (
    Link,
    link_findings,
    rounds_of_ring,
    slow_links,
    speed,
    usual_speed,
)


def ring_of(*speeds: float, device: str = "cpu") -> list[Link]:
    """Link k goes from node k to the next one."""
    count = len(speeds)
    return [Link(rank, (rank + 1) % count, one, 0.1, device) for rank, one in enumerate(speeds)]


def nodes_of(count: int, **facts: str) -> list[NodeReport]:
    found = [Fact(name, value, same=True) for name, value in facts.items()]
    return [
        NodeReport(rank, f"host{rank}", list(found), nic="ib0", versions={"torch": "2"})
        for rank in range(count)
    ]


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 63, 64])
def test_every_link_is_measured_once_and_no_node_is_in_two_transfers(nodes):
    rounds = rounds_of_ring(nodes)
    assert sorted(sender for senders in rounds for sender in senders) == list(range(nodes))
    for senders in rounds:
        busy = [rank for sender in senders for rank in (sender, (sender + 1) % nodes)]
        assert len(busy) == len(set(busy))
    assert len(rounds) == (2 if nodes % 2 == 0 else 3)


def test_equal_links_are_not_slow_and_one_slow_link_is_named_with_both_ends():
    assert slow_links(ring_of(9.4, 9.1, 8.0, 9.3)) == [] and usual_speed([]) == 0.0
    links = ring_of(9.4, 9.1, 0.09, 9.3)
    (finding,) = link_findings(links, nodes_of(4), on_gpus=False)
    parts = [
        "link 2 -> 3 ",
        "90 Mbit/s",
        "9.3 Gbit/s",
        "node 2 (host2, ib0)",
        "node 3 (host3, ib0)",
    ]
    assert [
        part for part in parts if part not in finding.what
    ] == [] and "`ethtool ib0`" in finding.cure


def test_a_node_with_two_slow_links_is_named_instead_of_them():
    """In a ring of three, two of three links are slow."""
    (finding,) = link_findings(ring_of(0.2, 0.2, 9.0), nodes_of(3), on_gpus=False)
    parts = ["both links of node 1 (host1, ib0)", "0 -> 1: 200 Mbit/s", "1 -> 2: 200 Mbit/s"]
    assert [part for part in parts if part not in finding.what] == []
    found = link_findings(
        ring_of(9.0, 0.2, 9.0, 9.0, 0.3, 0.3, 9.0, 9.0), nodes_of(8), on_gpus=False
    )
    assert [one.what.split(" is slow")[0].split(" are slow")[0] for one in found] == [
        "both links of node 5 (host5, ib0)",
        "the link 1 -> 2",
    ]


@pytest.mark.nightly
def test_of_two_nodes_the_slower_direction_is_named():
    (finding,) = link_findings(ring_of(9.0, 1.0), nodes_of(2), on_gpus=False)
    assert "link 1 -> 0 is slow: 1 Gbit/s" in finding.what
    assert link_findings(ring_of(9.0, 8.0), nodes_of(2), on_gpus=False) == []
    # of either node's second NIC
    both = [
        *ring_of(380.0, 380.0, device="0"),
        *ring_of(40.0, 40.0, device="1"),
    ]
    assert [one.what[:22] for one in link_findings(both, nodes_of(2), on_gpus=True)] == [
        "the link 0 -> 1 (GPU 1",
        "the link 1 -> 0 (GPU 1",
    ]


@pytest.mark.nightly
def test_each_gpu_has_a_link_of_its_own_and_a_slow_network_of_all_is_a_warning():
    links = [*ring_of(380.0, 390.0, 385.0, device="0"), *ring_of(380.0, 40.0, 385.0, device="1")]
    (finding,) = link_findings(links, nodes_of(3), on_gpus=True)
    assert "link 1 -> 2 (GPU 1) is slow: 40 Gbit/s" in finding.what
    (finding,) = link_findings(ring_of(0.9, 0.9), nodes_of(2), on_gpus=True)
    assert finding.severity == "warning" and "NCCL_DEBUG=INFO" in finding.cure
    assert (
        link_findings(ring_of(0.9, 0.9), nodes_of(2), on_gpus=False) == []
        and speed(0.9) == "900 Mbit/s"
    )


def test_differences_between_nodes_name_the_odd_one_out():
    nodes = nodes_of(4, driver="550", cores="96 of 96")
    assert list(differing(nodes)) == []
    nodes[2].facts[0] = Fact("driver", "535", same=True)
    nodes[3].facts.append(Fact("InfiniBand", "8 x 400 Gb/sec", same=True, nodes="error"))
    nodes[1].versions = {"torch": "3"}
    found = {one.about: one for one in differing(nodes)}
    assert (
        found["driver"].what
        == "driver differ: 550 on nodes 0 (host0), 1 (host1), 3 (host3), 535 on node 2 (host2)"
    )
    assert found["driver"].severity == "warning" and found["InfiniBand"].severity == "error"
    assert (
        "none on nodes 0 (host0), 1 (host1), 2 (host2), 8 x 400 Gb/sec on node 3"
        in found["InfiniBand"].what
    )
    assert (
        found["versions"].severity == "error"
        and "torch: 2 on nodes 0 (host0)" in found["versions"].what
    )


def test_links_are_measured_over_gloo_also_in_two_rings_of_one_process(tmp_path, monkeypatch):
    """With two GPUs a node there are two rings; here both are in host memory."""
    port = free_port()
    monkeypatch.setattr(ring, "TRANSFER_S", 0.05)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def node(rank: int) -> list:
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        plan = ring.RingPlan(rank, 3, "127.0.0.1", port, "gloo")
        dist.init_process_group("gloo", store=dist.PrefixStore("a", store), rank=rank, world_size=3)
        first = ring.Ring(plan, store, None).measure()
        monkeypatch.setattr(ring, "_choose_device", lambda gpu: torch.device("cpu"))
        monkeypatch.setattr(ring.torch.cuda, "synchronize", lambda gpu: None)
        second = ring.Ring(plan, store, 1).measure()
        dist.barrier()
        return [
            [one.sender, one.receiver, one.device, one.gbit_per_s > 0, one.round_trip_ms > 0]
            for one in first + second
        ]

    with forked(node, 3, tmp_path) as nodes:
        found = [one.result for one in nodes]
    expected = [
        [[before, rank, device, True, True] for device in ("cpu", "1")]
        for rank, before in enumerate([2, 0, 1])
    ]
    assert found == expected


@pytest.mark.nightly
@pytest.mark.real
def test_a_ring_that_does_not_come_together_gives_its_reason(monkeypatch):
    port = free_port()
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=600)
    )
    plan = RingPlan(5, 2, "127.0.0.1", port, "gloo")  # a rank that does not exist
    result = measure_links(plan, "lo", limit_s=600.0)
    assert result.links == [] and "exit code 1" in result.error and len(result.error) > 20
    assert "0 s" in measure_links(plan, "lo", limit_s=0.01).error
    del store
