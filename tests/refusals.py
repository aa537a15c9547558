"""Expected refusals: tests check the fields of a `ConfigurationError`, and no wording."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from trl_multinode.errors import ConfigurationError


@contextmanager
def refused(
    setting: str, cure: str = "", **fields: Any
) -> Iterator[pytest.ExceptionInfo[ConfigurationError]]:
    """Expect a `ConfigurationError` about a setting, with these fields, and with `cure` in what it advises."""
    with pytest.raises(ConfigurationError) as caught:
        yield caught
    check(caught.value, setting, cure, **fields)


def refusal(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> ConfigurationError:
    """Call a function that must refuse its arguments, and return the error."""
    with pytest.raises(ConfigurationError) as caught:
        function(*arguments, **keywords)
    return caught.value


def check(error: ConfigurationError, setting: str, cure: str = "", **fields: Any) -> None:
    """Compare the fields of an error; its message must have the setting, the value and the cure."""
    found = {"setting": error.setting} | {name: getattr(error, name) for name in fields}
    assert found == {"setting": setting} | fields, error
    assert cure in error.cure and error.cure in str(error), error
