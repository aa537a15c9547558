"""Faults as a test input: the fault, and the weight updates or the engine that it affects."""

from dataclasses import dataclass, replace

from .. import faults


@dataclass(frozen=True)
class Faults:
    """Faults of the engines, passed through environment variables. Without `last`, one update is affected.

    ```python
    faults = Faults().lose_load(2).lie_about_load(3, 5).stale_head(6).slow_engine(1, seconds=0.5)
    with Nodes(2, 2, folder=tmp_path, env=faults.environment()) as nodes: ...
    ```
    """

    entries: tuple[str, ...] = ()
    slow: str = ""

    def lose_load(self, first: int, last: int | None = None) -> "Faults":
        """Make weight updates `first` to `last` load nothing and commit nothing."""
        return self._add("skip_load", first, last)

    def lie_about_load(self, first: int, last: int | None = None) -> "Faults":
        """Make weight updates `first` to `last` load nothing and still commit, which only log-probs can reveal."""
        return self._add("skip_load_silently", first, last)

    def stale_head(self, first: int, last: int | None = None) -> "Faults":
        """Leave vLLM's packed copy of a tied head stale in updates `first` to `last` (a real bug of vLLM on a CPU)."""
        return self._add("stale_head", first, last)

    def slow_engine(self, index: int, seconds: float) -> "Faults":
        """Delay every request to engine `index` of every node by `seconds`."""
        return replace(self, slow=f"{index}:{seconds}")

    def _add(self, name: str, first: int, last: int | None) -> "Faults":
        return replace(self, entries=(*self.entries, f"{name}@{first}-{last if last is not None else first}"))

    def environment(self) -> dict[str, str]:
        """Return the variables to set in the process that starts the engines."""
        variables = {faults.VARIABLE: ",".join(self.entries), faults.SLOW_ENGINE: self.slow}
        return {name: value for name, value in variables.items() if value}
