"""Calls of tools, environments and a `rollout_func`: a limit for one that does not return, and errors with a place."""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from typing import Any

from trl.trainer.utils import get_callable_name

from ..errors import RolloutError
from ..libraries import replaced
from ..run.endings.error_text import described
from .reward_call import Call
from .user_calls import UserCalls


class ToolFailed(BaseException):
    """Carries a [`RolloutError`] through TRL's tool loop, which gives every `Exception` to the model."""


class ToolCalls(UserCalls):
    """
    Tools of one rank.

    Args:
        raises (`bool`):
            Whether an exception in a tool ends the run, and is not given to the model.
        *args:
            Arguments of [`UserCalls`].
    """

    def __init__(
        self, topology: Any, timeout_s: float | None, report: Callable[..., None], raises: bool
    ):
        super().__init__(topology, timeout_s, report)
        self._raises = raises
        # `rows`: an iterator over the rows that the thread's next resets are for
        self.resets = threading.local()

    @contextmanager
    def named(
        self, what: str, place: str, fatal: bool = True, limited: bool = True
    ) -> Iterator[None]:
        """Limit a call in this thread, and name it in the error that it raises.

        Args:
            what (`str`):
                Name of what runs, for example "the tool `search`".
            place (`str`):
                Row for which it runs, for example ", for row 3".
            fatal (`bool`, *optional*, defaults to `True`):
                Whether an `Exception` ends the run too. Others always do.
            limited (`bool`, *optional*, defaults to `True`):
                Whether `call_timeout` holds for it.
        """
        with self.open_call(Call(what, place)) if limited else nullcontext():
            try:
                yield
            except (RolloutError, ToolFailed):
                raise
            except (Exception, KeyboardInterrupt, SystemExit) as error:
                if (isinstance(error, Exception) and not fatal) or is_ctrl_c(error):
                    raise
                raise ToolFailed(self.error(what, place, error)) from error

    def error(self, what: str, place: str, error: BaseException) -> RolloutError:
        """Return the error that ends the run."""
        found = RolloutError(
            f"{self.topology}: {what} failed{place} with {described(error)}. Mend it, or let it answer "
            "with the fault instead of raising it."
        )
        found.__cause__ = error
        return found

    # ---- tools ------------------------------------------------------------------------------------------------------

    def watch(self, trainer: Any, first_row: int, failures: list[RolloutError]) -> None:
        """Limit and name the tools of a batch, for which TRL has just built the dictionaries.

        Args:
            trainer (`Any`):
                Trainer, or its stand-in, whose `_sync_tool_dicts` and `_async_tool_dicts` are replaced.
            first_row (`int`):
                Place of the batch's first row among the rows of this rank.
            failures (`list[RolloutError]`):
                List that gets the errors of async tools: TRL takes anything that they raise for their answer.
        """
        for tools, watched in (
            (trainer._sync_tool_dicts, self._sync),
            (trainer._async_tool_dicts, self._async),
        ):
            for row, of_row in enumerate(tools, first_row):
                place = f", for row {row} of this rank"
                of_row.update(
                    {name: watched(name, tool, place, failures) for name, tool in of_row.items()}
                )

    def _sync(
        self, name: str, tool: Callable, place: str, failures: list[RolloutError]
    ) -> Callable:
        @functools.wraps(tool)
        def call_tool(**arguments: Any) -> Any:
            if not accepts(tool, arguments):
                # raises at once what TRL gives to the model, whose fault it is
                return tool(**arguments)
            with self.named(f"the tool `{name}`", place, self._raises):
                return tool(**arguments)

        return call_tool

    def _async(
        self, name: str, tool: Callable, place: str, failures: list[RolloutError]
    ) -> Callable:
        async def await_tool(**arguments: Any) -> Any:
            with self.open_call(Call(f"the tool `{name}`", place)) as call:
                try:
                    call.coroutine = tool(**arguments)
                    return await call.coroutine
                except (Exception, KeyboardInterrupt, SystemExit) as error:
                    found = self.error(call.name, place, error)
                    if self._raises or not isinstance(error, Exception):
                        failures.append(found)
                    if isinstance(error, Exception):
                        raise
                    raise found from error  # itself it would end the thread of all async tools, which are waited for

        @functools.wraps(tool)
        def call_tool(**arguments: Any) -> Any:
            return await_tool(**arguments) if accepts(tool, arguments) else tool(**arguments)

        return call_tool

    # ---- environments, and a round that TRL makes in the main call -----------------------------------------------

    def watch_environments(self, trainer: Any) -> None:
        """Limit and name the `reset` of a trainer's environments, also of those that TRL has not built yet."""

        def watched(build: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: self.watch_reset(build())

        trainer.environment_factories = {
            name: watched(build) for name, build in trainer.environment_factories.items()
        }
        for environment in (one for pool in trainer._environment_pool.values() for one in pool):
            self.watch_reset(environment)

    def watch_reset(self, environment: Any) -> Any:
        """Limit and name the `reset` of an environment, which TRL calls for each row, and return the environment. One
        that takes no new attributes stays as it is."""
        reset, what = (
            environment.reset,
            f"the `reset` of the environment {type(environment).__name__}",
        )

        @functools.wraps(reset)
        def call_reset(**row: Any) -> Any:
            rows = getattr(self.resets, "rows", None)  # a tool may call `reset` too, in any thread
            with self.named(what, "" if rows is None else f", for row {next(rows)} of this rank"):
                return reset(**row)

        with suppress(AttributeError):  # `__slots__`
            environment.reset = call_reset
        return environment

    @contextmanager
    def naming(self, trainer: Any, num_rows: int) -> Iterator[None]:
        """Name the rows of resets and the `rollout_func` while TRL makes a round of a trainer in this thread."""
        self.resets.rows = count()
        rollout_func = self.named_rollout(trainer.rollout_func, 0, num_rows)
        with unwrapped(), replaced(trainer, "rollout_func", rollout_func):
            yield

    def named_rollout(
        self, rollout_func: Callable | None, first_row: int, num_rows: int
    ) -> Callable | None:
        """Return a `rollout_func` that is named in its errors, with these rows; `None` without one."""
        if rollout_func is None:
            return None
        what = f"`rollout_func` ({get_callable_name(rollout_func)})"
        rows = f", for rows {first_row} to {first_row + num_rows - 1} of this rank"

        def call_rollout(*args: Any) -> Any:
            with self.named(what, rows, limited=False):
                return rollout_func(*args)

        return call_rollout


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise the error that a [`ToolFailed`] carries."""
    try:
        yield
    except ToolFailed as failed:
        (error,) = failed.args
        raise error from error.__cause__


def accepts(tool: Callable, arguments: dict[str, Any]) -> bool:
    """Return whether a tool can be called with the arguments that the model gave."""
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        pass
    return True


def is_ctrl_c(error: BaseException) -> bool:
    """Return whether an exception is the user's Ctrl-C, which Python raises in the main thread."""
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
    )
