"""`StepReport`: the numbers of one rank between two logs, and the metrics of all ranks from one gather."""

import time
from typing import Any

import psutil
import torch

from ..rollouts.generation import NodeGeneration
from ..rollouts.staleness import StalenessMeter, column, summarize_rounds
from ..weights.timings import STAGES, SyncTimings, sync_metrics
from .flops import ModelFlops, model_flops, peak_flops
from .metrics import NUMBERS, RankNumbers, RunShape, pool_measure, step_metrics

GIB = 2**30


class StepReport:
    """Metrics for `Trainer.log`.

    Args:
        host ([`NodeHost`]), accelerator (`Accelerator`), meter ([`StalenessMeter`]), generation ([`NodeGeneration`]):
            Objects of the calling rank.
        model (`torch.nn.Module`):
            Model to train, for its FLOPs; this object keeps no reference to it.
        iterations (`int`, *optional*, defaults to 1):
            Times that the trainer trains on a completion.
    """

    def __init__(
        self,
        host: Any,
        accelerator: Any,
        meter: StalenessMeter,
        generation: NodeGeneration,
        model: torch.nn.Module,
        iterations: int = 1,
    ):
        self._host = host
        self._accelerator = accelerator
        self._meter = meter
        self._generation = generation
        self._counts: torch.Tensor | None = (
            None  # tokens, squared lengths, trained tokens; on the rank's device
        )
        self._since: float | None = None
        self._logged_step = 0
        self._num_logs = 0
        # all intervals but the first, which includes the warm-up: seconds and steps
        self._timed = (0.0, 0)
        self._shape = RunShape(
            host.topology,
            iterations=iterations,
            flops=model_flops(model),
            peak_flops=peak_flops(host.settings, accelerator.device),
        )

    def restart(self) -> None:
        """Forget the time since the last log, because the script trains again."""
        self._since = None

    def begin_step(self, step: int) -> None:
        """Start the clocks of the first interval; later intervals start at the log before them.

        What was counted until now belongs to the set-up or to a rehearsal, and to no step.
        """
        if self._since is None:
            self._since, self._logged_step, self._counts = time.perf_counter(), step, None
            self._meter.restart(self._host.updates.clocks.seconds)
            self._host.phases.take_sums()
            self._host.updates.clocks.take_kv_use()
            self._generation.take_seconds_ahead()

    def count(self, inputs: dict[str, Any]) -> None:
        """Count the tokens of a micro-batch on the device, so that the host does not wait for it."""
        if (counts := count_tokens(inputs, self._shape.flops)) is not None:
            self._counts = counts if self._counts is None else self._counts + counts

    def metrics(self, sync: SyncTimings, steps_left: int) -> dict[str, float]:
        """Return the metrics since the last log. A collective of all training ranks: one gather of a few numbers.

        Args:
            sync (`SyncTimings`):
                Timings of the last weight sync.
            steps_left (`int`):
                Optimizer steps until the end of the run.
        """
        host, generation = self._host, self._generation
        steps = max(1, host.step() - self._logged_step)
        self._logged_step = host.step()
        clocks, restarts = host.updates.clocks, host.updates.num_restarts
        rounds = self._meter.take(
            generation.take_seconds_ahead(), clocks.seconds, clocks.take_kv_use(), restarts
        )
        mine = [
            *host.phases.take_sums(),
            *sync.stages(),
            *rounds.values(),
            *self._take_step(),
        ]
        rows = self._accelerator.gather(
            torch.tensor([mine], device=self._accelerator.device)
        ).tolist()
        ranks = [dict(zip(NUMBERS, row, strict=True)) for row in rows]
        self._num_logs += 1
        idle = [rank["generate"] + rank["wait"] for rank in ranks]
        stages = [[rank[name] for name in STAGES] for rank in ranks]
        return {
            **step_metrics(ranks, steps, self._shape),
            **self._eta(ranks, steps, steps_left),
            **summarize_rounds(ranks, idle),
            **sync_metrics(sync, stages, host.topology),
            **self._pool(ranks),
        }

    def _take_step(self) -> tuple[float, ...]:
        """Return the last of `NUMBERS`, which this object measures."""
        now = time.perf_counter()
        since, self._since = now if self._since is None else self._since, now
        counts, self._counts = self._counts, None
        tokens, squares, trained = (0.0, 0.0, 0.0) if counts is None else counts.tolist()
        gpu_gib, gpu_share = gpu_memory(self._accelerator.device)
        host_gib = psutil.Process().memory_info().rss / GIB
        return now - since, tokens, squares, trained, gpu_gib, gpu_share, host_gib

    def _pool(self, ranks: list[RankNumbers]) -> dict[str, float]:
        """Publish the use of all engines for the scheduler of agents, and return it. Rank 0 of a run with agents."""
        host = self._host
        if host.topology.rank or not host.rank.has_agents:
            return {}
        remote, own = host.updates.remote, sum(node.engines for node in host.topology.nodes)
        engines = remote.num_serving
        measure = pool_measure(ranks, host.step(), own, engines, remote.take_filled())
        found = {"pool/number": remote.members.number, "pool/engines": engines}
        if measure is None:
            return found
        remote.publish(measure)
        return {**found, "pool/filled": measure.filled, "pool/waiting": measure.waiting}

    def _eta(self, ranks: list[RankNumbers], steps: int, steps_left: int) -> dict[str, float]:
        """Return the seconds until the last step at the mean speed since the first log."""
        seconds, count = self._timed
        seconds, count = seconds + max(column(ranks, "interval_s")), count + steps
        if self._num_logs > 1:
            self._timed = seconds, count
        return {"perf/eta_s": seconds / count * max(0, steps_left)}


def count_tokens(inputs: dict[str, Any], flops: ModelFlops | None) -> torch.Tensor | None:
    """Count tokens, squared row lengths and trained tokens of a micro-batch; `None` if it has no masks.

    Args:
        inputs (`dict[str, Any]`):
            Batch with `prompt_mask` and `completion_mask` (and perhaps `tool_mask`), or with `attention_mask` and
            `labels`.
        flops ([`ModelFlops`], *optional*):
            FLOPs of the model, for the squares; `None`: they are not used.
    """
    if "completion_mask" in inputs and "prompt_mask" in inputs:
        completion = inputs["completion_mask"]
        lengths = inputs["prompt_mask"].sum(-1) + completion.sum(-1)
        tools = inputs.get("tool_mask")
        trained = completion if tools is None else completion * tools
    elif "attention_mask" in inputs and "labels" in inputs:
        lengths, trained = inputs["attention_mask"].sum(-1), inputs["labels"] != -100
    else:
        return None
    lengths = lengths.double()
    squares = flops.squares(lengths) if flops else lengths
    return torch.stack([lengths.sum(), squares.sum(), trained.sum().double()])


def gpu_memory(device: torch.device) -> tuple[float, float]:
    """Return a rank's peak of reserved GPU memory in GiB, and the used share of the GPU; NaN without a GPU."""
    if device.type != "cuda":
        return float("nan"), float("nan")
    peak = torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    return peak / GIB, max(peak, total - free) / total
