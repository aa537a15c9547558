"""Fixtures for tests of open groups."""

import pytest

from trl_multinode.rollouts.groups import OpenGroups


@pytest.fixture
def no_collecting_afterwards(monkeypatch):
    """End the threads of a test's open groups after the test: some of their rows never end."""
    made, init = [], OpenGroups.__init__

    def noted(groups: OpenGroups, *args, **kwargs) -> None:
        made.append(groups)
        init(groups, *args, **kwargs)

    monkeypatch.setattr(OpenGroups, "__init__", noted)
    yield
    for groups in made:
        groups._thread = None
