"""Reports of a run: its set-up, its seconds per phase, and advice on the split of the GPUs."""

from typing import Any

import torch

from .node_settings import GPU_SHARE_OF_RESERVED, GPU_SHARE_OF_TRAINING, is_node_mode
from .rollouts.generation import NodeGeneration
from .rollouts.staleness import RoundSums, StalenessMeter, summarize_rounds
from .run.phases import PHASES, split_advice, summarize
from .run.reporter import report
from .weights.sync import STAGES, SyncTimings, sync_metrics

ADVICE_AT_STEP = 5


def report_choices(args: Any, ours: type, is_ours: bool) -> None:
    """
    Print what happens if a config selects something else than its author may expect. The main process prints.

    Args:
        args ([`~trl.GRPOConfig`]):
            Config of a trainer.
        ours (`type`):
            Config class of this library for that trainer.
        is_ours (`bool`):
            `True` if `args` has the settings of node mode, as `ours` has.
    """
    if args.process_index != 0:
        return
    name = ours.__name__.removeprefix("MultiNode")
    if not is_node_mode(args) and not is_ours:
        derived = type(args).__name__ if type(args) not in ours.__mro__ else None
        whose = f"{derived} is derived from trl.{name} and has" if derived else f"a plain trl.{name} has"
        instead = f"derive it from trl_multinode.{name}" if derived else f"use trl_multinode.{name}"
        report(
            f"node mode is off: {whose} TRL's defaults. For node mode {instead}, or use_vllm=True, vllm_mode='node'."
        )
    elif args.use_vllm and not is_node_mode(args):
        report(
            f"node mode is off: with vllm_mode={args.vllm_mode!r} TRL's own vLLM generates (use_vllm=True is the "
            "default here). For node mode leave vllm_mode out; use_vllm=False generates without vLLM."
        )
    if args.use_vllm and getattr(args, "use_transformers_continuous_batching", False):
        report(
            "use_transformers_continuous_batching has no effect: vLLM generates, because use_vllm=True is the default "
            f"of trl_multinode.{name}. For transformers' generation set use_vllm=False."
        )


def report_start(args: Any, host: Any) -> None:
    """Print the set-up of node mode, including the changed defaults. Rank 0 calls it."""
    topology, share = host.topology, host.settings.vllm_gpu_memory_utilization
    where = "CPU" if not host.devices.per_engine[0] else f"GPUs {list(host.devices.per_engine)}"
    seed = host.settings.rollout_seed
    by_kind = f"{GPU_SHARE_OF_RESERVED} on a reserved GPU, else {GPU_SHARE_OF_TRAINING}"
    lines = [
        f"{topology.num_nodes} node(s) x {topology.ranks_per_node} training ranks, "
        f"{len(host.devices.per_engine)} engine(s) per node on {where}",
        f"defaults that differ from TRL's: use_vllm={args.use_vllm}, vllm_mode={args.vllm_mode!r}, "
        f"vllm_gpu_memory_utilization={share if share is not None else by_kind}",
        f"rollout_seed={seed}" + ("" if seed is not None else " (rollouts depend on the layout of the run)"),
    ]
    lines.append(f"weight_transport={host.transport[0]!r}: {host.transport[1]}")
    if share == GPU_SHARE_OF_TRAINING and not host.devices.shared_with_training and host.devices.per_engine[0]:
        lines.append(
            f"warning: vllm_gpu_memory_utilization={share} leaves most of a reserved GPU idle; unset, it is "
            f"{GPU_SHARE_OF_RESERVED}"
        )
    if host.settings.max_staleness:
        lines.append("max_staleness=1: completions are generated one round before the ranks train on them")
        if args.vllm_importance_sampling_mode == "sequence_mask":
            lines.append(
                "warning: vllm_importance_sampling_mode='sequence_mask' drops whole completions that older weights "
                "made; recommended: 'token_truncate' with vllm_importance_sampling_clip_max=2.0"
            )
    if host.settings.in_flight:
        lines.append(
            f"weight_update='in_flight': {host.settings.open_rounds} rounds are open while the ranks train; a round "
            f"waits for groups that were begun {host.settings.oldest_rounds} rounds before"
        )
    for line in lines:
        report(line)


class StepReport:
    """Metrics for `Trainer.log` (seconds of phases and syncs, staleness, busy shares), and advice on the GPU split.

    Args:
        host ([`NodeHost`]), accelerator (`Accelerator`), meter ([`StalenessMeter`]), generation ([`NodeGeneration`]):
            Objects of the calling rank.
    """

    def __init__(self, host: Any, accelerator: Any, meter: StalenessMeter, generation: NodeGeneration):
        self._host = host
        self._accelerator = accelerator
        self._meter = meter
        self._generation = generation
        self._logged_step = 0
        self._intervals: list[dict[str, float]] | None = []  # slowest rank's seconds per step; `None` after the advice

    def metrics(self, sync: SyncTimings) -> dict[str, float]:
        """Return the metrics since the last log. A collective of all training ranks: one gather of a few numbers."""
        rounds = self._meter.take(self._generation.take_seconds_ahead(), self._host.engine_clocks)
        mine = self._host.phases.take_sums() + sync.stages() + rounds
        per_rank = self._accelerator.gather(torch.tensor([mine], device=self._accelerator.device)).tolist()
        rounds_from = len(PHASES) + len(STAGES)
        phases = [row[: len(PHASES)] for row in per_rank]
        stages = [row[len(PHASES) : rounds_from] for row in per_rank]
        sums = [row[rounds_from:] for row in per_rank]
        self._advise(phases, [RoundSums(*row) for row in sums])
        idle = [row[PHASES.index("generate")] + row[PHASES.index("wait")] for row in phases]
        per_node = self._host.topology.ranks_per_node
        return summarize(phases, per_node) | summarize_rounds(sums, idle) | sync_metrics(sync, stages, per_node)

    def _advise(self, phases: list[list[float]], sums: list[RoundSums]) -> None:
        """Print the advice once. Skip the first interval, because it includes the warm-up."""
        if self._intervals is None:
            return
        host, per_engine = self._host, self._host.devices.per_engine
        steps, self._logged_step = max(1, host.step() - self._logged_step), host.step()
        seconds = {name: max(row[i] for row in phases) / steps for i, name in enumerate(PHASES)}
        overlapped = bool(host.settings.max_staleness) or host.settings.in_flight
        if overlapped:  # a rank measures only its waits; the engines' clocks measure all generation
            seconds["generate"] = max(row.engine_busy_s for row in sums) / len(per_engine) / steps
        self._intervals.append(seconds)
        if host.step() < ADVICE_AT_STEP or len(self._intervals) < 2 or host.devices.shared_with_training:
            return
        rows, self._intervals = self._intervals[1:], None
        generate_s, train_s = (sum(row[name] for row in rows) / len(rows) for name in ("generate", "train"))
        reserved = sum(map(len, per_engine)) or len(per_engine)  # on a CPU, an engine counts as one device
        if host.topology.rank == 0:
            advice = split_advice(generate_s, train_s, host.topology.ranks_per_node, reserved, overlapped)
            report(advice)
