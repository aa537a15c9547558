"""Failure as a test input: what shall go wrong in which weight update, in words."""

from dataclasses import dataclass, replace

from .. import faults


@dataclass(frozen=True)
class Faults:
    """Faults for engines, given to them by the environment.

    ```python
    faults = Faults().lose_load(2).lie_about_load(3, 5).stale_head(6).slow_engine(1, seconds=0.5)
    with Nodes(2, 2, folder=tmp_path, env=faults.environment()) as nodes: ...
    ```
    """

    entries: tuple[str, ...] = ()
    slow: str = ""

    def lose_load(self, first: int, last: int | None = None) -> "Faults":
        """Weight updates `first` to `last` load nothing and commit nothing."""
        return self._add("skip_load", first, last)

    def lie_about_load(self, first: int, last: int | None = None) -> "Faults":
        """They load nothing and commit all the same: only log-probs can show it."""
        return self._add("skip_load_silently", first, last)

    def stale_head(self, first: int, last: int | None = None) -> "Faults":
        """They leave vLLM's packed copy of a tied head as it was (its real bug on a CPU)."""
        return self._add("stale_head", first, last)

    def slow_engine(self, index: int, seconds: float) -> "Faults":
        """Engine `index` of every node takes so much longer per request."""
        return replace(self, slow=f"{index}:{seconds}")

    def _add(self, name: str, first: int, last: int | None) -> "Faults":
        return replace(self, entries=(*self.entries, f"{name}@{first}-{last if last is not None else first}"))

    def environment(self) -> dict[str, str]:
        """For the process that starts the engines."""
        variables = {faults.VARIABLE: ",".join(self.entries), faults.SLOW_ENGINE: self.slow}
        return {name: value for name, value in variables.items() if value}
