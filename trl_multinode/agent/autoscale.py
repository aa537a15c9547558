"""The number of engines that a run needs, from the run's own measure. Pure arithmetic; a scheduler calls it."""

from statistics import fmean

from ..engine.agents import Measure

# Share of the time of ranks: less is not worth a GPU. An engine more, of ten GPUs in all, costs a tenth.
WAITING = 0.1
# Share of the slots above which engines count as filled. Waits with slots left are those for the last long rows, which
# more engines do not shorten. The windows of `EngineSettings` let rows take two thirds to three quarters of all slots.
# With `max_staleness=0` engines are idle while ranks train: generation then takes more than half of a step, and GPUs
# that generate are as useful as GPUs that train if both take a half.
FILLED = 0.5
# Share of the slots of the other engines that rows may take after an engine has left. It is below `FILLED`, so that no
# load makes the number swing: after a change in one direction, the condition of the other one does not hold.
TAKEN_OVER = 0.45
# Intervals of the log whose mean decides, all of them after the last change
INTERVALS = 2
# After which a change counts as done although the run does not show it: the scheduler has no place, or another engine
# has left meanwhile. A start takes minutes, for the largest models and their compilation.
LATE_S = 900.0


class Autoscaler:
    """Autoscaler of the engines of one scheduler, which may not be all engines of the run.

    Args:
        least (`int`), most (`int`):
            Bounds of the number of engines.
    """

    def __init__(self, least: int, most: int):
        self._least = least
        self._most = most
        self._wanted: int | None = None
        self._step = -1  # of the last measure
        # with equal numbers of engines; the interval of the first one may have begun before the last change
        self._measures: list[Measure] = []
        # of the last change: direction, engines of the run afterwards, and time after which it is late
        self._change: tuple[int, int, float] | None = None

    def wanted(self, measure: Measure | None, engines: int, now_s: float) -> tuple[int, str]:
        """Return how many engines of this scheduler there should be now, and why it changes ("" if it does not).

        Args:
            measure (`Measure`, *optional*):
                Last measure of the run; `None` if there is none.
            engines (`int`):
                Engines of this scheduler that run now, whether they serve already or not.
            now_s (`float`):
                Time on any clock that does not go back.
        """
        if self._wanted is None:
            self._wanted = self._bounded(engines)
        if measure is None or measure.step == self._step:
            return self._wanted, ""
        self._note(measure)
        if self._awaits_change(measure, now_s) or len(self._measures) <= INTERVALS:
            return self._wanted, ""
        direction, reason = self._decision()
        # an engine that still has no place is not asked for twice
        if direction > 0 and engines < self._wanted:
            direction = 0
        before, self._wanted = self._wanted, self._bounded(self._wanted + direction)
        if self._wanted == before:
            return before, ""
        self._change = direction, measure.engines + direction, now_s + LATE_S
        self._measures = []
        return self._wanted, reason

    def _bounded(self, engines: int) -> int:
        return min(max(self._least, engines), self._most)

    def _note(self, measure: Measure) -> None:
        """Keep a new measure, and forget those of another run or of another number of engines."""
        if measure.step < self._step:
            self._change = None
            self._measures = []
        if self._measures and self._measures[-1].engines != measure.engines:
            self._measures = []
        self._step = measure.step
        self._measures.append(measure)

    def _awaits_change(self, measure: Measure, now_s: float) -> bool:
        """Return whether the engines of a measure are not yet those that were asked for."""
        if self._change is None:
            return False
        direction, engines, late_s = self._change
        is_done = (measure.engines - engines) * direction >= 0
        if is_done or now_s > late_s:
            self._change = None
        return self._change is not None

    def _decision(self) -> tuple[int, str]:
        """Return 1, 0 or -1 engines more, and the reason."""
        last = self._measures[-INTERVALS:]
        engines = last[-1].engines
        filled = fmean(measure.filled for measure in last)
        waiting = fmean(measure.waiting for measure in last)
        if waiting > WAITING and filled > FILLED:
            return 1, f"ranks wait {waiting:.0%} of the time, and engines are {filled:.0%} filled"
        if engines > 1 and filled * engines / (engines - 1) < TAKEN_OVER:
            return (
                -1,
                f"{engines} engines are {filled:.0%} filled, which {engines - 1} can take over",
            )
        return 0, ""
