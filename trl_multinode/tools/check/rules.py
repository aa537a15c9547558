"""Rules for the launch itself; each yields the problems of one kind."""

import os
from collections.abc import Iterator

from ...errors import ConfigurationError
from ...node_settings import NodeSettings
from ...run.endings.ending import RESUMING
from ...run.gpu_variables import CUDA, gpu_variable
from ...run.preemption import grace_note
from ...wire.secret import pool_secret
from ...wire.stop_signals import check_preempt_signal
from .launch import Launch, Problem, problem_of
from .reading import PREPARE

# Flags of `accelerate launch` that replace the strategy of a file
STRATEGIES = {
    "multi_gpu": "MULTI_GPU",
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
    "tpu": "XLA",
    "cpu": "NO",
}


def replaced_strategy(launch: Launch) -> str | None:
    """Return the flag of the command line that replaces the strategy for which the file has a section, if any."""
    kind = launch.file["distributed_type"]
    flags = [
        name
        for name, strategy in STRATEGIES.items()
        if name in launch.args.nondefault and strategy != kind
    ]
    return flags[0] if flags and kind in ("DEEPSPEED", "FSDP") else None


def launcher_problems(launch: Launch) -> Iterator[Problem]:
    """Yield the reasons why a launch is not one torchrun per node, or why node mode cannot run under it."""
    args, kind = launch.args, launch.file["distributed_type"]
    if (flag := replaced_strategy(launch)) is not None:
        what = f"`--{flag}` replaces `distributed_type: {kind}` of the file, and nothing reads its section (got "
        what += f"{STRATEGIES[flag]}, expected {kind})"
        more = "; without a GPU write `use_cpu: true` in the file" if flag == "cpu" else ""
        yield Problem(what, f"leave `--{flag}` out{more}")
        return
    if launch.own_launcher:
        yield Problem(
            f"DeepSpeed's own launcher would start the ranks, through ssh (got {launch.own_launcher}, expected"
            " standard); accelerate also appends this environment, tokens included, to `.deepspeed_env`",
            "write `deepspeed_multinode_launcher: standard` under `deepspeed_config:`",
        )
    if launch.launcher == "simple_launcher" and (args.num_processes or 1) > 1:
        cause = "--cpu" if args.cpu else f"distributed_type: {kind}"
        yield Problem(
            f"`{cause}` starts one process per node without a warning (got 1, expected {launch.ranks_per_node})",
            "write `distributed_type: DEEPSPEED`; without a GPU add `use_cpu: true` and leave `--cpu` out",
        )
    if launch.launcher not in {*PREPARE, "simple_launcher"} or args.use_megatron_lm:
        yield Problem(
            f"the trainer cannot run under this launch (got {kind}, expected DEEPSPEED, FSDP or MULTI_GPU)",
            "write `distributed_type: DEEPSPEED`",
        )


def strategy_problems(launch: Launch) -> Iterator[Problem]:
    """Yield the settings of FSDP and of parallelism that node mode does not have."""
    args = launch.args
    if replaced_strategy(launch) is not None:
        return
    if args.use_fsdp and str(args.fsdp_version) == "1":
        yield Problem(
            "node mode has no weights of FSDP1, accelerate's default (got fsdp_version 1, expected 2)",
            "write `fsdp_version: 2` under `fsdp_config:`",
        )
    for name in ("tp_size", "cp_size", "sp_size"):
        if (
            args.use_parallelism_config
            and (size := getattr(args, f"parallelism_config_{name}")) > 1
        ):
            yield Problem(
                f"in node mode ranks share no rows (got `parallelism_config_{name}` {size}, expected 1)",
                f"delete `parallelism_config_{name}`; FSDP2 shards the model over all ranks",
            )


def count_problems(launch: Launch) -> Iterator[Problem]:
    """Yield a problem if `num_processes`, the total, is one node's share or is not divisible by the nodes."""
    if launch.table:  # which has each node's share
        return
    total, nodes, gpus = launch.args.num_processes or 1, launch.num_nodes, launch.gpus_per_node
    each, rest = divmod(total, nodes)
    most = max(1, gpus - 1) if launch.visible is not None else total
    # 8 processes on 4 nodes of 8 GPUs; 8 on 2 nodes are the split 4 + 4
    is_share = launch.visible is not None and total in (most, most + 1) and 2 * each < gpus
    if nodes > 1 and is_share and (rest or not launch.script.engines.chosen):
        what = f"`num_processes` is the total, not one node's share: {each} of {gpus} GPUs a node would train (got"
        what += f" {total}, expected {most * nodes} for {most} on each of {nodes} nodes)"
        cure = f"write `num_processes: {most * nodes}`"
        if not rest:
            cure += f"; if {each} a node are meant, set `num_engines` in the script's arguments"
        yield Problem(what, cure)
    elif rest:
        yield _indivisible(total, nodes, most)


def _indivisible(total: int, nodes: int, most: int) -> Problem:
    """Return the problem of a total that leaves a rest, with the totals below and above it that leave none."""
    each = total // nodes
    shares = sorted({min(max(1, share), most) for share in (each, each + 1)})
    fits = " or ".join(f"{share * nodes} ({share} a node)" for share in shares)
    return Problem(
        f"`num_processes`, the total, is not divisible by {nodes} nodes: accelerate runs {each} on each"
        f" (got {total}, expected {fits})",
        f"write `num_processes:` {fits}",
    )


def _no_gpu_left(launch: Launch) -> Problem:
    if launch.started == 1:
        return Problem(
            "the only GPU of a node trains, and the engine has none (got no `vllm_devices`, expected 0)",
            "pass `--vllm_devices 0`, in a script `vllm_devices=[0]`: then the GPU trains and generates",
        )
    most = max(1, launch.gpus_per_node - 1)
    return Problem(
        f"no GPU is left over for the engine (got {launch.started} processes a node, expected {most} or less)",
        f"write {launch.setting(most)}, or name a training GPU in the trainer's `vllm_devices`, to share it",
    )


def secret_problems(launch: Launch) -> Iterator[Problem]:
    """Yield a problem if engines serve ranks of other nodes, and this node lacks the secret for that."""
    needed = launch.gpus_per_node
    shares = launch.visible is not None and min(launch.ranks) < needed <= max(launch.ranks)
    if not shares and launch.script.values.get("min_engines") is None:
        return
    try:
        pool_secret()
    except ConfigurationError as error:
        yield problem_of(error)


def device_problems(launch: Launch) -> Iterator[Problem]:
    """Yield a problem if the node's processes train on every GPU that they see; the engine needs one of its own."""
    if launch.visible is None or launch.started < len(launch.visible):
        return
    if launch.visible and (launch.script.engines.vllm_devices or not launch.script.node_mode):
        return
    needed = launch.gpus_per_node
    if launch.started >= needed:
        # the engines of a node with fewer ranks, or of agents, serve this one too
        if min(launch.ranks) >= needed and not launch.script.values.get("min_engines"):
            yield _no_gpu_left(launch)
    else:
        yield _hidden_gpus(launch)


def _hidden_gpus(launch: Launch) -> Problem:
    """Return the problem of a node whose processes do not see all its GPUs."""
    variable = gpu_variable(os.environ)
    by_ids = launch.args.gpu_ids != "all" and variable == CUDA
    setting = f"`gpu_ids` {launch.args.gpu_ids}" if by_ids else f"{variable} of this shell"
    hides = "the reserved GPU from the engine too"
    if not launch.visible:
        setting += "" if by_ids else f" (`{os.environ.get(variable, '')}`)"
        hides = "every GPU of the node"
    cure = "write `gpu_ids: all`, and no `--gpu_ids`: a rank takes the GPU of its own number and leaves the rest"
    return Problem(
        f"{setting} hides {hides} (got {len(launch.visible or ())} visible GPUs for"
        f" {launch.started} processes, expected {launch.gpus_per_node})",
        cure if by_ids else f"unset {variable}",
    )


def preemption_problems(launch: Launch) -> Iterator[Problem]:
    """Yield a problem if the environment names a signal that cannot pre-empt a run."""
    try:
        check_preempt_signal()
    except ConfigurationError as error:
        yield problem_of(error)


def preemption_notes(launch: Launch) -> Iterator[str]:
    """Yield how long the end of a step and a checkpoint may take, and whether the next launch continues from it."""
    if launch.script.node_mode and launch.endpoint:
        yield grace_note(
            float(launch.script.values.get("preemption_grace", NodeSettings.preemption_grace))
        )
        if launch.script.begins_anew:
            yield (
                f"`{launch.script.name}` never resumes: a job that the scheduler starts again, as the job files of "
                f"`trl-multinode render` are, would begin at step 1. It continues with {RESUMING}"
            )
