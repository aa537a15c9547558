"""What tests of open groups share."""

import pytest

from trl_multinode.rollouts.groups import OpenGroups


@pytest.fixture
def no_collecting_afterwards(monkeypatch):
    """Without it, the threads of a test's open groups would wait for the rest of their rows as long as the process."""
    made, init = [], OpenGroups.__init__

    def noted(groups: OpenGroups, *args, **kwargs) -> None:
        made.append(groups)
        init(groups, *args, **kwargs)

    monkeypatch.setattr(OpenGroups, "__init__", noted)
    yield
    for groups in made:
        groups._thread = None
