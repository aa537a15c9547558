"""Jobs of a run: one process each, for the stages that share one engine."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .record import Recorder

# imports TRL and transformers, which `--list` and the check of the machine do not need
if TYPE_CHECKING:
    from .machine import Machine

V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@dataclass(frozen=True)
class Job:
    """Stages that one process runs.

    Attributes:
        name (`str`):
            Unique name. After a stage's letter it gives the key of a result: `"a bf16 graphs"`.
        stages (`str`):
            Letters of the stages, in order.
        run (`Callable[[Machine, Recorder, str, Path, str], None]`):
            Function that runs the job, called with machine, recorder, name, folder and the wanted stages.
        least_gib (`float`):
            GPU memory below which the job is skipped.
        least_gpus (`int`):
            Number of GPUs below which the job is skipped.
        on_cpu (`str`, *optional*):
            Reason why a rehearsal leaves the job out; `None` if it runs it.
    """

    name: str
    stages: str
    run: "Callable[[Machine, Recorder, str, Path, str], None]"
    least_gib: float = 0.0
    least_gpus: int = 1
    on_cpu: str | None = None

    def keys(self, wanted: str) -> list[str]:
        return [f"{stage} {self.name}" for stage in self.stages if stage in wanted]


def weights(
    shape: str, dtype: str, eager: bool, environment: dict[str, str] | None = None, **engine_args
):
    """Return a function that runs stages a to d on one engine. It imports late, because the import takes 20 s."""

    def run(machine: "Machine", record: Recorder, name: str, folder: Path, stages: str) -> None:
        from dataclasses import replace

        from .weights import run_stages

        machine = replace(machine, environment={**machine.environment, **(environment or {})})
        run_stages(machine, record, name, folder, stages, shape, dtype, eager, **engine_args)

    return run


def single(module: str):
    """Return a function that runs a job of one stage: the function with the job's name in `gpu_kit.<module>`."""

    def run(machine: "Machine", record: Recorder, name: str, folder: Path, stages: str) -> None:
        found = importlib.import_module(f".{module}", __package__)
        with record.stage(f"{stages} {name}") as figures:
            getattr(found, name.replace(" ", "_"))(machine, figures, folder)

    return run


NO_DEEPSPEED = "TRL's colocation does not start under DeepSpeed on the CPU build of vLLM"
ONE_RUNNER = "the CPU build of vLLM has one model runner and no CUDA graphs"
JOBS = (
    Job("bf16 graphs", "abcd", weights("1.5B", "bf16", eager=False)),
    Job("fp32 eager", "abcd", weights("0.5B", "fp32", eager=True)),
    Job("bf16 graphs v1", "ad", weights("0.5B", "bf16", eager=False, environment=V1), on_cpu=ONE_RUNNER),
    Job("fp32 eager v1", "a", weights("0.5B", "fp32", eager=True, environment=V1), on_cpu=ONE_RUNNER),
    Job("optimizer steps", "e", single("training")),
    Job("balanced", "e", single("training")),
    Job("colocation", "f", single("training"), on_cpu=NO_DEEPSPEED),
    Job("adapter", "g", single("variants")),
    Job("fp8", "h", single("variants"), on_cpu="the CPU build of vLLM has no FP8"),
    Job("long rows", "i", single("training")),
    Job("two gpus", "j", single("variants"), least_gpus=2),
    Job("7B bf16", "bc", weights("7B", "bf16", eager=True), least_gib=70.0, on_cpu="its figures are of size only"),
    Job("full gpu", "a", weights("0.5B", "bf16", eager=True, share=0.9, model_on_host=True), least_gib=20.0,
        on_cpu="a CPU has no memory share"),
)  # fmt: skip
STAGES = "".join(sorted({stage for job in JOBS for stage in job.stages}))
