"""What a run says of itself: how it was set up, where its seconds go, which split of the GPUs would be better."""

import torch

from .config import field_or_default
from .phases import PHASES, split_advice, summarize
from .weight_sync import SyncTimings

ADVICE_AT_STEP = 5


def announce(args, host) -> None:
    """What node mode does with this run, the changed defaults included; called on rank 0."""
    topology, share = host.topology, args.vllm_gpu_memory_utilization
    where = "CPU" if not host.devices.per_engine[0] else f"GPUs {list(host.devices.per_engine)}"
    seed = field_or_default(args, "rollout_seed")
    lines = [
        f"{topology.num_nodes} node(s) x {topology.ranks_per_node} training ranks, "
        f"{len(host.devices.per_engine)} engine(s) per node on {where}",
        f"defaults that differ from TRL's: use_vllm={args.use_vllm}, vllm_mode={args.vllm_mode!r}, "
        f"vllm_gpu_memory_utilization={share if share is not None else '0.9 on a reserved GPU, else 0.3'}",
        f"rollout_seed={seed}" + ("" if seed is not None else " (rollouts depend on the layout of the run)"),
    ]
    if share == 0.3 and not host.devices.shared_with_training and host.devices.per_engine[0]:
        lines.append("warning: vllm_gpu_memory_utilization=0.3 leaves most of a reserved GPU idle; unset, it is 0.9")
    for line in lines:
        print(f"[trl_multinode] {line}", flush=True)


class StepReport:
    """Phase and sync seconds for `Trainer.log`, and once the better split from this run's own seconds.

    Args:
        host ([`NodeHost`]), accelerator (`Accelerator`):
            Of the calling rank.
    """

    def __init__(self, host, accelerator):
        self._host = host
        self._accelerator = accelerator
        self._logged_step = 0
        self._intervals: list[list[float]] | None = []  # seconds a step by phase, of the slowest rank; then `None`

    def metrics(self, sync: SyncTimings) -> dict[str, float]:
        """A collective of all training ranks: one gather of five numbers per log."""
        mine = torch.tensor(self._host.phases.take_sums(), device=self._accelerator.device).unsqueeze(0)
        per_rank = self._accelerator.gather(mine).tolist()
        self._advise(per_rank)
        return summarize(per_rank, self._host.topology.ranks_per_node) | {
            "sync/mib": sync.num_bytes / 2**20,
            "sync/buckets": sync.num_buckets,
            "sync/gather_s": sync.gather_s,
            "sync/copy_s": sync.copy_s,
            "sync/load_s": sync.load_s,
            "sync/commit_s": sync.commit_s,
        }

    def _advise(self, per_rank: list[list[float]]) -> None:
        """Once; the first interval is left out, because the warm-up is in it."""
        if self._intervals is None:
            return
        steps, self._logged_step = self._host.step() - self._logged_step, self._host.step()
        self._intervals.append([max(column) / max(1, steps) for column in zip(*per_rank, strict=True)])
        if self._host.step() < ADVICE_AT_STEP or len(self._intervals) < 2 or self._host.devices.shared_with_training:
            return
        rows, self._intervals = self._intervals[1:], None
        mean = {name: sum(row[i] for row in rows) / len(rows) for i, name in enumerate(PHASES)}
        topology, per_engine = self._host.topology, self._host.devices.per_engine
        reserved = sum(map(len, per_engine)) or len(per_engine)  # on a CPU an engine counts as one device
        if topology.rank == 0:
            advice = split_advice(mean["generate"], mean["train"], topology.ranks_per_node, reserved)
            print(f"[trl_multinode] {advice}", flush=True)
