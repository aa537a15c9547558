"""Rules for pre-emption: the time that a signal leaves, and the signal of the environment."""

from collections.abc import Iterator

from ...errors import ConfigurationError
from ...node_settings import NodeSettings
from ...run.preemption import grace_note
from ...wire.stop_signals import check_preempt_signal
from .launch import Launch, Problem


def preemption_problems(launch: Launch) -> Iterator[Problem]:
    """Yield a problem if the environment names a signal that cannot pre-empt a run."""
    try:
        check_preempt_signal()
    except ConfigurationError as error:
        yield Problem(str(error), "export TRL_MULTINODE_PREEMPT_SIGNAL=USR1, or unset it")


def preemption_notes(launch: Launch) -> Iterator[str]:
    """Yield how long the end of a step and a checkpoint may take, with the variables of this shell."""
    if launch.script.node_mode and launch.endpoint:
        yield grace_note(
            float(launch.script.values.get("preemption_grace", NodeSettings.preemption_grace))
        )
