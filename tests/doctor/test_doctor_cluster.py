"""The level `cluster`: nodes with addresses of their own, in network namespaces, of which one has a slow link."""

import json
import os
import re
import secrets
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import pytest
from doctoring import config_in
from forks import Rank, forked

from multinode_kit.namespaces import Namespaces, enter_node, namespaces_available
from trl_multinode.tools.doctor import cluster, exchange
from trl_multinode.tools.doctor.exchange import Exchange
from trl_multinode.tools.doctor.report import main
from trl_multinode.tools.launch.joining import place_of

# One node in one process decides in test_doctor_report.py, and the links of a ring in test_doctor_links.py
pytestmark = [pytest.mark.real, pytest.mark.nightly]
PORT = 29512  # in the namespaces of a test
NODES = 3
SLOW = 1
SLOW_MBIT_PER_S = 20


@pytest.fixture(scope="module")
def hosts():
    if reason := namespaces_available():
        pytest.skip(reason)
    made = Namespaces(f"tmn-{secrets.token_hex(3)}", NODES)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in [
        name
        for name in os.environ
        if name.startswith(("PET_", "SLURM_", "TRL_MULTINODE_", "GLOO_", "NCCL_"))
    ]:
        monkeypatch.delenv(name)


def config_of(folder: Path, hosts: Namespaces, nodes: int) -> str:
    return config_in(
        folder,
        num_machines=nodes,
        num_processes=nodes,
        main_process_ip=hosts.address(0),
        main_process_port=PORT,
    )


def run_doctors(
    folder: Path, hosts: Namespaces, nodes: int, *flags: str, env_of=lambda rank: {}
) -> list[Rank]:
    """Run one doctor per node until all have ended; `result` is the exit status, `text` all output."""
    config = config_of(folder, hosts, nodes)
    (temporary := folder / "tmp").mkdir()

    def node(rank: int) -> int:
        enter_node(hosts.namespace(rank), hosts.mounts(rank, temporary))
        os.environ.update(env_of(rank))
        words = [
            config,
            "--level",
            "cluster",
            "--timeout",
            "600",
            *flags,
            "--machine_rank",
            str(rank),
        ]
        with redirect_stdout(
            sys.stdout if "--json" not in flags else open(folder / f"document{rank}", "w")
        ):
            return main(words)

    with forked(node, nodes, folder) as ranks:
        for rank in ranks:
            assert rank.wait() == 0, rank.text
    return ranks


def lines(rank: Rank, severity: str) -> list[str]:
    return [line for line in rank.text.splitlines() if line.startswith(f"{severity}: ")]


INTERFACE = {"GLOO_SOCKET_IFNAME": "eth0"}


def test_three_nodes_stand_side_by_side_and_the_one_with_slow_links_is_named(tmp_path, hosts):
    """Two nodes lack the variable for gloo, which then listens on loopback; the links are measured all the same.

    Only the slow node has a limit, far below what starved cores reach.
    """
    hosts.limit_link(SLOW, SLOW_MBIT_PER_S)
    try:
        ranks = run_doctors(
            tmp_path, hosts, NODES, env_of=lambda rank: INTERFACE if rank == 0 else {}
        )
    finally:
        hosts.limit_links(None)
    assert [rank.result for rank in ranks] == [1, 1, 1]
    text = ranks[0].text
    error, host_name = lines(ranks[0], "error")
    assert "nodes 1-2" in host_name and "loopback" in host_name
    assert (
        re.search(r"links of node 1 \(.*, eth0\)", error)
        and "0 -> 1: " in error
        and "1 -> 2: " in error
    )
    speeds = [float(value) for value in re.findall(r"-> \d: ([.\d]+) Mbit/s", error)]
    assert len(speeds) == 2 and max(speeds) < 2 * SLOW_MBIT_PER_S, error
    (warning,) = [line for line in lines(ranks[0], "warning") if "variables" in line]
    assert re.search(r"nodes 1 \(.*\), 2 \(.*\), GLOO_SOCKET_IFNAME=eth0 on node 0 \(", warning)
    assert "3 nodes over gloo" in text
    assert re.search(r"NIC .* eth0 10\.77\.0\.1 .* eth0 10\.77\.0\.2 .* eth0 10\.77\.0\.3", text)
    bars = [
        line.count("#") + line.count("█")
        for line in text.splitlines()
        if re.search(r"\d \(.*\) -> \d \(", line)
    ]
    assert len(bars) == 3 and bars[2] == 30 and max(bars[:2]) <= 6
    assert "node 0" in ranks[1].text
    assert error in lines(ranks[1], "error")  # every node ends for a reason that it prints


def test_two_equal_nodes_are_ready_and_every_node_has_the_same_document(tmp_path, hosts):
    # both directions are equally slow, however busy the cores are
    hosts.limit_links(SLOW_MBIT_PER_S)
    try:
        ranks = run_doctors(tmp_path, hosts, 2, "--json", env_of=lambda rank: INTERFACE)
    finally:
        hosts.limit_links(None)
    assert [rank.result for rank in ranks] == [0, 0]
    first, second = (json.loads((tmp_path / f"document{rank}").read_text()) for rank in (0, 1))
    assert "2 of 2 nodes" in ranks[0].text
    assert (
        first == second and first["ok"] and first["backend"] == "gloo" and first["findings"] == []
    )
    assert [node["address"] for node in first["nodes"]] == [hosts.address(0), hosts.address(1)]
    assert [(link["sender"], link["receiver"]) for link in first["links"]] == [(1, 0), (0, 1)]
    assert all(0 < link["gbit_per_s"] < 2e-3 * SLOW_MBIT_PER_S for link in first["links"]), first[
        "links"
    ]


def test_a_neighbour_that_cannot_be_reached_is_named_before_the_ring(tmp_path, hosts):
    """All nodes reach node 0, and node 1 does not reach node 2."""
    route = [
        "ip",
        "-n",
        hosts.namespace(1),
        "route",
        "add",
        "unreachable",
        f"{hosts.address(2)}/32",
    ]
    subprocess.run(route, check=True)
    try:
        ranks = run_doctors(tmp_path, hosts, NODES, env_of=lambda rank: INTERFACE)
    finally:
        subprocess.run([*route[:4], "delete", *route[5:]], check=True)
    (error,) = lines(ranks[0], "error")
    assert re.search(
        r"node 1 \(.*\) .*node 2 \(.*\) .*10\.77\.0\.3:\d+ \(No route to host\)", error
    )
    assert "ring of" not in ranks[0].text and [rank.result for rank in ranks] == [1, 1, 1]


def test_a_node_that_does_not_come_is_named_with_the_report_of_this_one(
    tmp_path, hosts, monkeypatch
):
    monkeypatch.setattr(cluster, "place_of", lambda *words: replace(place_of(*words), linger_s=0.2))
    config = config_of(tmp_path, hosts, 2)
    (temporary := tmp_path / "tmp").mkdir()

    def alone(_: int) -> int:
        enter_node(hosts.namespace(0), hosts.mounts(0, temporary))
        os.environ.update(INTERFACE)
        return main([config, "--level", "cluster", "--timeout", "3", "--machine_rank", "0"])

    with forked(alone, 1, tmp_path) as (rank,):
        assert rank.result == 1
    assert "/dev/shm" in rank.text.split("roll-call:")[0]  # before the wait
    error = lines(rank, "error")[-1]
    assert "1 of 2 nodes" in error and "machine_rank 1" in error and "3 s" in error


def test_a_node_that_is_lost_after_the_roll_call_is_named(tmp_path, hosts, monkeypatch):
    monkeypatch.setattr(exchange, "LEAVE_S", 0.5)
    monkeypatch.setattr(Exchange, "gather", partialmethod(Exchange.gather, limit_s=3.0))
    config = config_of(tmp_path, hosts, 2)
    (temporary := tmp_path / "tmp").mkdir()

    def node(rank: int) -> int:
        enter_node(hosts.namespace(rank), hosts.mounts(rank, temporary))
        os.environ.update(INTERFACE)
        if rank == 1:
            monkeypatch.setattr(Exchange, "gather", lambda *_: os._exit(9))
        return main([config, "--level", "cluster", "--timeout", "600", "--machine_rank", str(rank)])

    with forked(node, 2, tmp_path) as (first, second):
        assert second.wait() == 9 and first.result == 1
    error = lines(first, "error")[-1]
    assert "node 1" in error and "3 s" in error and "roll-call" in error
