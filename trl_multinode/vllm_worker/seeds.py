"""Seeded requests whose prompt a CPU engine computes in several parts."""

from typing import Any

import torch


def keep_seeds(runner: Any) -> None:
    """Let vLLM's V1 model runner take back a draw of a seeded request on a CPU.

    A request samples in every step, also before its prompt is complete. vLLM then discards the token and sets the
    generator's offset back, which only CUDA's generators have: on a CPU this ended the engine. It happened with a
    seeded prompt that did not fit into one step, and with frozen requests whose cache is computed again.
    """
    # V2 computes a token's randomness from seed and position
    batch = getattr(runner, "input_batch", None)
    if runner.device.type == "cpu" and batch is not None:
        batch.generators = RewindingGenerators(batch.generators)


class RewindingGenerators(dict):
    """Generators of a batch, by row; they remember their states before the last draw."""

    def __init__(self, generators: dict[int, torch.Generator]):
        super().__init__(generators)
        self._before: dict[int, torch.Tensor] = {}  # by `id` of the generator

    def items(self) -> Any:
        """Return the generators for a draw of every row, which is all that vLLM iterates over them for."""
        self._before = {id(generator): generator.get_state() for generator in self.values()}
        return super().items()

    def get(self, row: int, default: Any = None) -> Any:
        """Return what vLLM takes a row's draw back with. It also moves rows in a batch by `get` and an assignment."""
        generator = super().get(row)
        return default if generator is None else Rewind(generator, self._before.get(id(generator)))

    def __setitem__(self, row: int, generator: Any) -> None:
        super().__setitem__(
            row, generator.generator if isinstance(generator, Rewind) else generator
        )


class Rewind:
    """A generator's offset as CUDA's have it; setting it takes back the last draw."""

    def __init__(self, generator: torch.Generator, before: torch.Tensor | None):
        self.generator = generator
        self._before = before

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        assert self._before is not None
        self.generator.set_state(self._before)
