"""Lines at the start of a run: its set-up and the choices that its author may not expect."""

from typing import Any

from ..node_settings import GPU_SHARE_OF_RESERVED, GPU_SHARE_OF_TRAINING, NodeSettings, is_node_mode
from ..run.preemption import grace_note
from ..run.reporter import report


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
        whose, instead = f"a plain trl.{name} has", f"use trl_multinode.{name}"
        if type(args) not in ours.__mro__:
            whose = f"{type(args).__name__} is derived from trl.{name} and has"
            instead = f"derive it from trl_multinode.{name}"
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


def report_start(args: Any, host: Any, untested: str) -> None:
    """Print the set-up of node mode, including the changed defaults, and a warning about an untested version. Rank 0
    calls it."""
    topology, settings = host.topology, host.settings
    per_engine, share = host.devices.per_engine, settings.vllm_gpu_memory_utilization
    where = f"GPUs {list(per_engine)}" if host.devices.sender else "CPU"
    by_kind = f"{GPU_SHARE_OF_RESERVED} on a reserved GPU, else {GPU_SHARE_OF_TRAINING}"
    depends = " (rollouts depend on the layout of the run)" if settings.rollout_seed is None else ""
    lines = [
        f"{topology.num_nodes} node(s) x {topology.ranks_per_node} training ranks, "
        f"{topology.engines_per_node} engine(s) per node on {where}",
        f"defaults that differ from TRL's: use_vllm={args.use_vllm}, vllm_mode={args.vllm_mode!r}, "
        f"vllm_gpu_memory_utilization={share if share is not None else by_kind}",
        f"rollout_seed={settings.rollout_seed}{depends}",
        f"weight_transport={host.rank.transport[0]!r}: {host.rank.transport[1]}",
    ]
    if (
        share == GPU_SHARE_OF_TRAINING
        and not host.devices.shared_with_training
        and host.devices.sender
    ):
        lines.append(
            f"warning: vllm_gpu_memory_utilization={share} leaves most of a reserved GPU idle; unset, it is "
            f"{GPU_SHARE_OF_RESERVED}"
        )
    if topology.launched:
        lines.append(grace_note(settings.preemption_grace))
    lines += _lines_ahead(args, settings)
    if untested:
        lines.append(f"warning: {untested}")
    for line in lines:
        report(line)


def _lines_ahead(args: Any, settings: NodeSettings) -> list[str]:
    """Return the lines about rounds ahead; none without them."""
    if not settings.max_staleness:
        return []
    mode = args.vllm_importance_sampling_mode
    if settings.in_flight:
        return [
            f"max_staleness={settings.max_staleness}: so many rounds are open while the ranks train, and their "
            f"completions continue across weight updates; max_age={settings.oldest_rounds}: a round waits for "
            "groups that were begun so many rounds before",
            f"vllm_importance_sampling_mode={mode!r}, "
            f"vllm_importance_sampling_clip_max={args.vllm_importance_sampling_clip_max}: tokens of older weights are "
            "corrected one by one (TRL's default, 'sequence_mask', would drop whole completions)",
        ]
    lines = ["max_staleness=1: completions are generated one round before the ranks train on them"]
    if mode == "sequence_mask":
        lines.append(
            "warning: vllm_importance_sampling_mode='sequence_mask' drops whole completions that older weights "
            "made; recommended: 'token_truncate' with vllm_importance_sampling_clip_max=2.0"
        )
    return lines
