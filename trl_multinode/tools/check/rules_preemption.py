"""Rules for pre-emption: the time that a signal leaves, and the signal of the environment."""

from collections.abc import Iterator

from ...errors import ConfigurationError
from ...node_settings import NodeSettings
from ...run.endings.ending import RESUMING
from ...run.preemption import grace_note
from ...wire.stop_signals import check_preempt_signal
from .launch import Launch, Problem, problem_of


def preemption_problems(launch: Launch) -> Iterator[Problem]:
    """Yield a problem if the environment names a signal that cannot pre-empt a run."""
    try:
        check_preempt_signal()
    except ConfigurationError as error:
        yield problem_of(error)


def preemption_notes(launch: Launch) -> Iterator[str]:
    """Yield how long the end of a step and a checkpoint may take, and whether the next launch continues from it."""
    if launch.script.node_mode and launch.endpoint:
        yield grace_note(
            float(launch.script.values.get("preemption_grace", NodeSettings.preemption_grace))
        )
        if launch.script.begins_anew:
            yield (
                f"`{launch.script.name}` never resumes: a job that the scheduler starts again, as the job files of "
                f"`trl-multinode render` are, would begin at step 1. It continues with {RESUMING}"
            )
