"""Pre-emption: a signal at any rank leads to a checkpoint at the end of the optimizer step and to exit code 143.

All ranks must save at the same step, although a signal reaches them at different moments or reaches only one. So the
end of each step is a [`StepDecision`], and a rank with a signal tries to be the first one for its current step.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from torch.distributed import Store

from ..wire.stop_signals import OF_LAUNCHERS, environment_signals, preempt_signals
from .decision import StepDecision
from .endings.ending import RESUMING
from .endings.exit_codes import PREEMPTED
from .endings.fatal import Fatal
from .reporter import report
from .topology import Topology
from .watch.signals import Preempted
from .watch.watchdog import Watchdog

TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
LAUNCHER_S = 30.0  # torchrun's default between its SIGTERM and its SIGKILL
MARGIN_S = 5.0  # between the deadline and the launcher's SIGKILL, for the last line and the end of the engines


def launcher_limit() -> float:
    """Return the seconds after which torchrun kills the ranks that it has sent SIGTERM or SIGHUP."""
    try:
        return float(os.environ[TIMEOUT_VARIABLE])
    except (KeyError, ValueError):  # torchrun itself reports a value that is no number
        return LAUNCHER_S


def grace_after(stop: signal.Signals, grace_s: float) -> float:
    """Return the seconds that a rank has after a signal: `preemption_grace`, or less if the launcher leaves less.

    A rank cannot see who sent SIGTERM or SIGHUP, so the launcher's limit counts for each. Other signals have no such
    limit.
    """
    if stop not in OF_LAUNCHERS:
        return grace_s
    limit = launcher_limit()
    return min(grace_s, max(limit - MARGIN_S, limit / 2))


def grace_note(grace_s: float) -> str:
    """Return a line for the start of a run: how long a step and a checkpoint may take after a signal."""
    grace = grace_after(signal.SIGTERM, grace_s)
    text = (
        f"after a SIGTERM or SIGHUP {grace:.0f} s are left for the end of the step and a checkpoint"
    )
    if grace < grace_s:
        text += f": torchrun kills the ranks after {launcher_limit():.0f} s ({TIMEOUT_VARIABLE})"
    for other in environment_signals():
        text += f"; after a {other.name} {grace_s:.0f} s"
    return text


def launcher_would_end(launcher: int) -> bool:
    """Return whether the signal of the environment would end the launcher, which neither ignores nor handles it."""
    numbers = environment_signals()
    try:
        lines = Path(f"/proc/{launcher}/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigIgn:", "SigCgt:"))]
    return any(not any(mask >> (number - 1) & 1 for mask in masks) for number in numbers)


class Preemption:
    """Pre-emption of one rank.

    ```python
    preemption = Preemption(topology, store, settings.preemption_grace, watch)  # receives the watch thread's signals
    preemption.step = 8         # accepts signals
    if preemption.end_step(8):  # every rank gets the same answer
        save()
        preemption.leave(8)     # raises `SystemExit(143)`
    ```

    Args:
        topology (`Topology`):
            Topology of this rank.
        store (`torch.distributed.Store`):
            Client of the thread that trains.
        grace_s (`float`):
            Value of `preemption_grace`.
        watch ([`Watchdog`]):
            Watchdog of this rank.
    """

    def __init__(
        self,
        topology: Topology,
        store: Store,
        grace_s: float,
        watch: Watchdog,
    ):
        self._topology = topology
        self.decision = StepDecision(topology, store, "preempt")
        self._grace_s = grace_s
        self._watch = watch
        self.leaves = False  # whether the ranks leave as soon as the checkpoint is saved
        # optimizer step under way, counted from 1; 0 outside of training, where a signal ends the run at once
        self.step = 0
        self.asked = False  # whether this rank has a signal
        self._decided = False
        self._deadline = float("inf")
        if topology.launched and topology.is_local_main and launcher_would_end(os.getppid()):
            name = environment_signals()[0].name.removeprefix("SIG")
            report(
                f"warning: node {topology.node}: a SIG{name} would end the launcher, and with it the run. If the "
                f"scheduler sends it to every process, start with `trap '' {name}; exec accelerate launch ...`"
            )
        watch.on_stop = self.ask
        watch.chores.append(self.publish)

    # ---- the watch thread, with a client of its own -----------------------------------------------------------------

    def ask(self, stop: signal.Signals) -> bool:
        """Note a signal; return `False` if it must end the run at once, because no step is under way.

        A further signal changes nothing, unless it leaves less time than the first one.
        """
        if stop not in preempt_signals() or self.step == 0:
            return False
        grace = grace_after(stop, self._grace_s)
        if not self.asked and self._watch.store.is_first("preempted"):
            report(
                f"{self._topology}: received {stop.name}. A checkpoint follows at the end of step {self.step}, then "
                f"all ranks leave with code {PREEMPTED}; {grace:.0f} s are left for that"
            )
        self.asked = True
        deadline = time.monotonic() + grace
        if deadline < self._deadline:
            self._deadline = deadline
            timer = threading.Timer(grace, self._end_at_deadline, (stop, grace))
            timer.daemon = True
            timer.start()
        return True

    def publish(self, store: Store) -> None:
        """Decide for the first step whose end no rank has reached, if this rank has a signal."""
        if not self.asked or self._decided:
            return
        for step in (self.step, self.step + 1):  # the others may be one step ahead, and not more
            # rank 0 has deleted the key of an older step, and the request would make it anew
            if self.decision.ask(step, store) and step >= self.step:
                self._decided = True
                return

    def _end_at_deadline(self, stop: signal.Signals, grace: float) -> None:
        is_saved = self._watch.ending.preempted is not None
        what = (
            "the end of the script"
            if is_saved or self.step == 0
            else f"the end of step {self.step}"
        )
        limit = f"`preemption_grace` ({grace:.0f} s)"
        if grace < self._grace_s:
            limit = f"{grace:.0f} s, which torchrun's {TIMEOUT_VARIABLE} leaves (raise it before the launch)"
        checkpoint = self._watch.ending.checkpoint()
        last = (
            f"The last whole checkpoint is {checkpoint}"
            if checkpoint
            else "There is no whole checkpoint"
        )
        line = f"pre-empted by {stop.name}: {what} did not come within {limit}. {last}"
        self._watch.report(line, code=PREEMPTED)
        # the watch thread ends the process meanwhile, unless it has ended itself
        time.sleep(MARGIN_S - 1.0)
        report(f"{self._topology}: {line}", error=True)
        os._exit(PREEMPTED)

    # ---- the main thread --------------------------------------------------------------------------------------------

    def end_step(self, step: int) -> bool:
        """Return whether the run is pre-empted at the end of `step`; the same on all ranks. Every rank calls it."""
        return self.decision.read(step, asks=self.asked)

    def leave(self, checkpoint: str) -> NoReturn:
        """End the script with code 143, after the checkpoint is whole. Every rank calls it.

        The script ends as by `sys.exit`: its `finally` blocks run, the ranks wait for each other, the engines end.
        torchrun sends SIGTERM to the ranks of a node when its first rank has left, so they ignore it from now on.
        """
        self._watch.ending.preempted = Fatal(f"pre-empted: {checkpoint} is saved", PREEMPTED)
        with suppress(ValueError):  # not the main thread
            for number in preempt_signals():
                signal.signal(number, signal.SIG_IGN)
        if self._topology.rank == 0:
            then = "continues from it"
            if not self._watch.ending.resumes:
                then = f"begins at step 1, because the script has not called {RESUMING}"
            report(
                f"pre-empted: {checkpoint} is saved. All ranks leave now, and a new launch {then}"
            )
        raise Preempted
