"""Faults as a test input: the fault, and the weight updates or the engine that it affects.

A fault is a word on the command line of an engine of the test kit, before the path of its spec:

- `skip_load@2-3`: in weight updates 2 to 3 an engine loads nothing and commits nothing, as if it had lost them;
- `skip_load_silently@2-3`: it loads nothing but commits the version, a bug that only log-probs reveal;
- `stale_head@2-3`: it keeps the old packed copy of a tied head (a real bug of vLLM on a CPU);
- `late_outputs@2-3`: it reads outputs from vLLM late, as a process under load does;
- `slow=1:0.5`: engine 1 of every node delays each generation request by 0.5 s;
- `slow_tokens=0.02`: a fake engine waits 0.02 s after every token of a completion;
- `hold_rows=20`: a fake engine waits in four of the first rows of rounds in flight, after the row's first token,
  until the weights are swapped or for 20 s;
- `slow_restart=9`: a fake engine that is started again takes 9 s longer.
"""

import sys
from dataclasses import dataclass

HOOK = "TRL_MULTINODE_ENGINE_MODULE"  # variable that replaces the engine's module and adds words to its command line
REAL = "trl_multinode.engine_process.main"
FAULTY_REAL = "multinode_kit.faulty_engine"  # REAL accepts no faults
TREE = "multinode_kit.forked_vllm"  # the real engine whose vLLM processes are its forks; it accepts faults
FAKE = "multinode_kit.fake_engine"

# Slot of a self test for which an engine with faults returns checksums of its weights, without adapters
WEIGHTS = -1

# TREE, or FAKE, as a fork of a template process. `forking.from_template` adds the template's socket and the program.
# The process that a rank starts only stands for the fork, so vLLM's processes are no descendants of it
FORKED = "multinode_kit.forked_engine"


@dataclass(frozen=True)
class Faults:
    """Faults of the engines. Without `last`, one update is affected.

    ```python
    faults = Faults().lose_load(2).lie_about_load(3, 5).stale_head(6).slow_engine(1, seconds=0.5)
    with Nodes(2, 2, folder=tmp_path, env=faults.environment()) as nodes:
        ...
    with running_engines(model, tmp_path, faults.engine(FAKE)) as engines:
        ...
    ```
    """

    words: tuple[str, ...] = ()

    # ---- in the test

    def lose_load(self, first: int, last: int | None = None) -> "Faults":
        """Make weight updates `first` to `last` load nothing and commit nothing."""
        return self._add("skip_load", first, last)

    def lie_about_load(self, first: int, last: int | None = None) -> "Faults":
        """Make weight updates `first` to `last` load nothing and still commit, which only log-probs can reveal."""
        return self._add("skip_load_silently", first, last)

    def stale_head(self, first: int, last: int | None = None) -> "Faults":
        """Leave vLLM's packed copy of a tied head stale in updates `first` to `last` (a real bug of vLLM on a CPU)."""
        return self._add("stale_head", first, last)

    def late_outputs(self, first: int, last: int | None = None) -> "Faults":
        """Let the engine read a request's outputs from vLLM 1 s late, after updates `first` to `last`."""
        return self._add("late_outputs", first, last)

    def slow_engine(self, index: int, seconds: float) -> "Faults":
        """Delay every request to engine `index` of every node by `seconds`."""
        return Faults((*self.words, f"slow={index}:{seconds}"))

    def slow_tokens(self, seconds: float) -> "Faults":
        """Make a fake engine wait after every token of a completion, so that generation takes longer than training."""
        return Faults((*self.words, f"slow_tokens={seconds}"))

    def hold_rows(self, seconds: float) -> "Faults":
        """Make a fake engine wait with four of its first rows of rounds in flight for the next weight swap, for up
        to `seconds`. So rows with tokens of several weights exist, however long a training step takes."""
        return Faults((*self.words, f"hold_rows={seconds}"))

    def slow_restart(self, seconds: float) -> "Faults":
        """Make the start of a fake engine take so much longer if it replaces one that died."""
        return Faults((*self.words, f"slow_restart={seconds}"))

    def engine(self, module: str = REAL) -> str:
        """Return the value of `HOOK`: `module` with these faults; `running_engines(module=...)` takes it too."""
        return " ".join((FAULTY_REAL if module == REAL else module, *self.words))

    def environment(self, module: str = REAL) -> dict[str, str]:
        """Return the variable to set in the process that starts the engines."""
        return {HOOK: self.engine(module)}

    def _add(self, name: str, first: int, last: int | None) -> "Faults":
        return Faults((*self.words, f"{name}@{first}-{first if last is None else last}"))

    # ---- in the engine and in vLLM's workers

    @classmethod
    def from_command_line(cls) -> "Faults":
        return cls(tuple(sys.argv[1:-1]))

    def skips_load(self, update: int) -> bool:
        return self.skips_commit(update) or self._affects("skip_load_silently", update)

    def skips_commit(self, update: int) -> bool:
        return self._affects("skip_load", update)

    def keeps_head(self, update: int) -> bool:
        return self._affects("stale_head", update)

    def delays_outputs(self, update: int) -> bool:
        return self._affects("late_outputs", update)

    def delay_s(self, index: int) -> float:
        """Return the seconds by which engine `index` delays each generation request."""
        return self._seconds(f"slow={index}:")

    def token_delay_s(self) -> float:
        """Return the seconds for which a fake engine waits after every token."""
        return self._seconds("slow_tokens=")

    def hold_s(self) -> float:
        """Return the seconds for which a fake engine waits for a weight swap in some rows of rounds in flight."""
        return self._seconds("hold_rows=")

    def restart_delay_s(self) -> float:
        """Return the seconds by which the start of a fake engine takes longer if it replaces one that died."""
        return self._seconds("slow_restart=")

    def _seconds(self, start: str) -> float:
        return sum(float(word.removeprefix(start)) for word in self.words if word.startswith(start))

    def _affects(self, name: str, update: int) -> bool:
        for word in self.words:
            fault, _, updates = word.partition("@")
            if fault == name:
                first, last = map(int, updates.split("-"))
                if first <= update <= last:
                    return True
        return False
