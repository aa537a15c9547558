"""A warning of a library appears once per node, and nothing else is left out."""

import logging
import os
import sys
import sysconfig
import warnings
from pathlib import Path

import pytest
from torch.distributed import HashStore

from trl_multinode.run import warn_once
from trl_multinode.run.reporter import warn
from trl_multinode.run.store import RunStore
from trl_multinode.run.topology import Topology
from trl_multinode.run.warn_once import WarnOnce

LIBRARY = Path(sysconfig.get_paths()["purelib"]) / "some_library.py"


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """Python's own way to show warnings, without pytest's recorder."""
    shown: list[str] = []
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("default")
        monkeypatch.setattr(sys, "warnoptions", [])
        monkeypatch.setattr(warn_once, "_seen", set())
        monkeypatch.setattr(
            warnings, "showwarning", lambda message, *_args, **_kw: shown.append(str(message))
        )
        # of Python, in the place of pytest's recorder
        monkeypatch.setattr(warnings, "_showwarnmsg_impl", lambda found: None)
        yield shown


@pytest.fixture
def once():
    filters = WarnOnce(lambda digest: True)
    filters.install()
    yield filters
    filters.restore()


def library_step(text: str = "old name") -> None:
    """Warn as a library does that forgets in every step what it has shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
    warnings.warn_explicit(text, FutureWarning, "torch/c10d_logger.py", 83, registry={})


def test_a_warning_that_python_repeats_in_every_step_appears_once(plain, once):
    for _ in range(644):
        library_step()
    library_step("another name")
    assert plain == ["old name", "another name"]
    once.restore()
    library_step()
    assert plain[2:] == ["old name"]


def test_a_block_that_began_before_does_not_end_it(plain):
    once = WarnOnce(lambda digest: True)
    with warnings.catch_warnings():
        once.install()
    for _ in range(3):
        library_step()
    once.restore()
    assert plain == ["old name"]


def test_who_records_warnings_gets_each_of_them(plain, once):
    library_step()
    with warnings.catch_warnings(record=True) as recorded:
        for _ in range(2):
            library_step()
    assert len(recorded) == 2 and plain == ["old name"]


def test_a_library_s_log_lines_appear_once_and_those_of_a_script_and_errors_always(caplog, once):
    library, script = logging.getLogger("some_library"), logging.getLogger("my_script")

    def log(logger, level, text, path=LIBRARY):
        logger.handle(logger.makeRecord(logger.name, level, str(path), 7, text, (), None))

    with caplog.at_level(logging.INFO):
        for _ in range(3):
            log(library, logging.WARNING, "cache flushed")
            log(library, logging.ERROR, "lost")
            log(library, logging.INFO, "step")
            log(script, logging.WARNING, "my row", Path("/home/me/train.py"))
            warn("checkpoint-4 is skipped")
        log(library, logging.WARNING, "cache flushed again")
    count = {text: caplog.messages.count(text) for text in caplog.messages}
    assert count == {
        "cache flushed": 1, "cache flushed again": 1, "lost": 3, "step": 3, "my row": 3, "checkpoint-4 is skipped": 3,
    }  # fmt: skip


def test_the_ranks_of_a_node_share_what_was_shown_and_another_node_shows_it_too(plain, monkeypatch):
    store = HashStore()
    for rank in range(4):
        topology = Topology(rank, 4, rank % 2, 2, rank // 2, 2, launched=True)
        monkeypatch.setattr(warn_once, "_seen", set())  # each rank has a process of its own
        filters = WarnOnce(RunStore(topology, store).is_first)
        filters.install()
        for _ in range(2):
            library_step()
        filters.restore()
    assert plain == ["old name", "old name"]  # one per node


def test_a_store_that_is_gone_hides_nothing(plain):
    class Gone:
        def add(self, *_):
            raise RuntimeError("Connection reset by peer")

    filters = WarnOnce(RunStore(Topology(1, 4, 1, 2, 0, 2, launched=True), Gone()).is_first)
    filters.install()
    library_step()
    filters.restore()
    assert plain == ["old name"]


def test_a_forked_child_never_uses_the_connection_of_its_rank(once):
    asked: list[str] = []
    once._is_first = lambda digest: bool(asked.append(digest)) or True
    child = os.fork()
    if child == 0:
        new = once.is_new("a warning of a data loader's worker")
        os._exit(0 if new and not asked else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.nightly
def test_a_user_who_has_chosen_by_w_sees_what_python_shows(plain, monkeypatch):
    monkeypatch.setattr(sys, "warnoptions", ["always"])
    filters = WarnOnce(lambda digest: True)
    filters.install()
    library_step()
    library_step()
    filters.restore()
    assert plain == ["old name"] * 2


@pytest.mark.nightly
def test_a_text_with_a_counter_does_not_fill_the_memory(plain, once, monkeypatch):
    monkeypatch.setattr(warn_once, "LONGEST_MEMORY", 10)
    for number in range(30):
        library_step(f"{number} flushes")
    assert len(plain) == 30 and len(warn_once._seen) == 10
