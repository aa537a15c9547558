"""An engine and a model on one GPU, and the limits for the difference between their log-probs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from multinode_kit.engines import SyncDriver, running_engines
from trl_multinode.weights.transport import Transport

from . import rows as comparing
from .machine import Machine, build_model, perturb

LIMITS = {"fp32": 1e-3, "bf16": 0.03}  # mean |difference| of log-probs per token
STALE_FACTOR = 10
FLOOR_FACTOR = 1.5


def bucket_bytes(machine: Machine) -> int:
    return 40_000 if machine.rehearsal else 512 << 20


class Bench:
    """An engine, the model whose weights it gets, and the settings of both."""

    def __init__(self, machine: Machine, trainer: SyncDriver, dtype: str, log_folder: Path):
        self.machine, self.trainer, self.dtype, self.log_folder = (
            machine,
            trainer,
            dtype,
            log_folder,
        )
        self.model, self.engines = trainer.model, trainer.engines

    @property
    def runner(self) -> str:
        """Name of vLLM's model runner, as the engine reports it."""
        return self.engines[0].ready.model_runner

    def rows(self) -> comparing.Rows:
        """Sample 16 rows of 64 tokens (a rehearsal: 4 of 24) with the engine's current weights."""
        each, tokens = (1, 24) if self.machine.rehearsal else (4, 64)
        asked = comparing.prompts(self.model.config.vocab_size, 4)
        return comparing.sample(self.engines, asked, each, tokens, self.trainer.version.update)

    def limit(self, rows: comparing.Rows) -> tuple[float, float]:
        """Return the largest difference allowed for fresh weights on `rows`, and the trainer's own rounding error.

        A random model's rounding error grows with its layers, so the limit is 1.5 times this error where that is above
        the limit of the dtype.
        """
        floor = comparing.rounding_floor(self.model, rows)
        return max(LIMITS[self.dtype], FLOOR_FACTOR * floor), floor

    def send_changed(self) -> None:
        """Add noise to the weights and send them."""
        perturb(self.model)
        self.trainer.send()


@contextmanager
def bench(
    machine: Machine,
    folder: Path,
    shape: str,
    dtype: str,
    eager: bool,
    model_on_host: bool = False,
    gpus: int = 1,
    kind: str = "host",
    **engine_args,
) -> Iterator[Bench]:
    """
    Start an engine that shares the first GPU with the model, and send the first update.

    Args:
        shape (`str`), dtype (`str`), eager (`bool`):
            Shape and dtype of model and engine; `eager` turns the engine's CUDA graphs off.
        model_on_host (`bool`, *optional*, defaults to `False`):
            Keep the model in host memory, so that the engine can have nearly all of the GPU.
        gpus (`int`, *optional*, defaults to 1):
            Number of GPUs that the engine sees.
        kind (`str`, *optional*, defaults to `"host"`):
            Transport of the first update.
        **engine_args:
            Further keywords of vLLM's `EngineArgs`.
    """
    model = build_model(
        machine, shape, dtype, torch.device("cpu") if model_on_host else machine.device
    )
    args = machine.engine_args(dtype, eager, **{"max_model_len": 2048, **engine_args})
    environment = machine.engine_environment(gpus) | (
        {"TRITON_F32_DEFAULT": "ieee"} if dtype == "fp32" else {}
    )
    module = machine.engine_module
    with running_engines(
        model, folder, module, stall_timeout_s=120.0, environment=environment, **args
    ) as engines:
        transport = Transport(
            kind, machine.device, pin=not machine.rehearsal, seen_as=[0], folder=folder
        )
        trainer = SyncDriver(model, engines, bucket_bytes(machine), transport=transport)
        trainer.send()
        yield Bench(machine, trainer, dtype, folder)
