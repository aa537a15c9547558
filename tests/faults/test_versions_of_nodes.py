"""Versions of libraries that differ between nodes."""

import logging

import pytest
from forks import forked
from store_host import RANKS, begin_early
from waiting import until

from trl_multinode.run import node_versions, versions
from trl_multinode.run import store as run_store
from trl_multinode.run.endings import exit_codes

FAILED = "[trl_multinode] the run failed: "


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    """A rank that has failed waits 3 s for the others."""
    monkeypatch.setattr(run_store, "GRACE_S", 3.0)


@pytest.mark.parametrize(("package", "other", "ends"), [("vllm", "0.30.0", True), ("transformers", "4.0", False)])
def test_row_28_versions_that_differ_between_nodes(tmp_path, store, monkeypatch, package, other, ends):
    monkeypatch.setattr(node_versions, "LOOK_EVERY_S", 0.2)

    def body(rank: int) -> None:
        logging.getLogger("trl_multinode").addHandler(logging.StreamHandler())  # not pytest's
        if rank // 2 == 1:
            found = node_versions.local_versions()
            monkeypatch.setattr(node_versions, "local_versions", lambda: {**found, package: other})
        watch = begin_early(rank, store, tmp_path)
        until((tmp_path / "seen").exists)
        watch.close()

    with forked(body, RANKS, tmp_path) as ranks:
        code = exit_codes.CONFIGURATION if ends else 0
        if not ends:
            ranks[0].wait_for(f"{package}: ")
            (tmp_path / "seen").touch()
        assert [rank.wait() for rank in ranks] == [code] * RANKS, ranks[0].text
        told = [rank.text for rank in ranks if f"{package}: " in rank.text]
        assert len(told) == (RANKS if ends else 1)
        assert all(f"{other} on node 1" in text and "on node 0" in text for text in told)
        if ends:
            assert FAILED + "node 0, rank 0, phase set-up: ConfigurationError: " in told[3]


def test_versions_of_many_nodes_are_one_short_line():
    nodes = [{"trl": "1.16.0", "torch": "2.13.0+cpu"} for _ in range(64)]
    nodes[7] = {"trl": "1.15.2", "torch": "2.13.0+cu130"}
    trl, torch = versions.differences(nodes)
    assert str(trl) == "trl: 1.16.0 on nodes 0, 1, 2, 3, 4, 5, 6, 8 and 55 more, 1.15.2 on node 7"
    assert (trl.is_error, torch.is_error) == (True, False)
    assert versions.differences(nodes[:7]) == []
