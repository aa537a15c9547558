"""Rules for the launch itself; each yields the problems of one kind."""

from collections.abc import Iterator

from accelerate.utils.other import is_port_in_use

from .launch import Launch, Problem
from .reading import PREPARE


def launcher_problems(launch: Launch) -> Iterator[Problem]:
    """Yield the reasons why a launch is not one torchrun per node, or why node mode cannot run under it."""
    args, kind = launch.args, launch.file["distributed_type"]
    if launch.own_launcher:
        what = f"DeepSpeed's own launcher would start the ranks, through ssh (got {launch.own_launcher}, expected"
        what += " standard); accelerate also appends this environment, tokens included, to `.deepspeed_env`"
        yield Problem(what, "write `deepspeed_multinode_launcher: standard` under `deepspeed_config:`")
    if launch.launcher == "simple_launcher" and (args.num_processes or 1) > 1:
        cause = "--cpu" if args.cpu else f"distributed_type: {kind}"
        what = f"`{cause}` starts one process per node without a warning (got 1, expected {launch.ranks_per_node})"
        cure = "write `distributed_type: DEEPSPEED`; without a GPU add `use_cpu: true` and leave `--cpu` out"
        yield Problem(what, cure)
    if launch.launcher not in {*PREPARE, "simple_launcher"} or args.use_megatron_lm:
        what = f"the trainer cannot run under this launch (got {kind}, expected DEEPSPEED, FSDP or MULTI_GPU)"
        yield Problem(what, "write `distributed_type: DEEPSPEED`")
    if args.use_fsdp and str(args.fsdp_version) == "1":
        what = "node mode has no weights of FSDP1, accelerate's default (got fsdp_version 1, expected 2)"
        yield Problem(what, "write `fsdp_version: 2` under `fsdp_config:`")
    for name in ("tp_size", "cp_size", "sp_size"):
        if args.use_parallelism_config and (size := getattr(args, f"parallelism_config_{name}")) > 1:
            what = f"in node mode ranks share no rows (got `parallelism_config_{name}` {size}, expected 1)"
            yield Problem(what, f"delete `parallelism_config_{name}`; FSDP2 shards the model over all ranks")


def count_problems(launch: Launch, gpus_per_node: int) -> Iterator[Problem]:
    """Yield a problem if `num_processes`, the total, is not divisible by the nodes; accelerate rounds shares down."""
    total, nodes = launch.args.num_processes or 1, launch.num_nodes
    if total % nodes == 0:
        return
    most = total if launch.visible is None else max(1, gpus_per_node - 1)
    shares = sorted({min(max(1, share), most) for share in (total // nodes, total // nodes + 1)})
    fits = " or ".join(f"{share * nodes} ({share} a node)" for share in shares)
    what = f"`num_processes`, the total, is not divisible by {nodes} nodes: accelerate runs {total // nodes} on each"
    yield Problem(f"{what} (got {total}, expected {fits})", f"write `num_processes:` {fits}")


def rank_problems(launch: Launch) -> Iterator[Problem]:
    """Yield problems of `machine_rank`, address and port, which the nodes need to find each other."""
    rank, last = launch.args.machine_rank, launch.num_nodes - 1
    if not 0 <= rank <= last:
        what = f"`machine_rank` is out of range (got {rank}, expected 0 to {last})"
        yield Problem(what, f"pass `--machine_rank` 0 to {last}, another one on each node, or correct `num_machines`")
    if last == 0:
        return
    if not launch.rank_in_file and "machine_rank" not in launch.args.nondefault:
        what = f"`machine_rank` is missing, and accelerate takes 0 on every node (got None, expected 0 to {last})"
        yield Problem(what, "pass `--machine_rank K`, another K on each node (`$SLURM_NODEID` inside `srun`)")
    if launch.args.main_process_ip is None:
        what = "`main_process_ip` is missing, nodes would look for a host named None (got None, expected an address)"
        yield Problem(what, "pass `--main_process_ip HOST0`, the address of node 0, on every node")
    if launch.port == 0:
        what = "every node would choose a port of its own (`main_process_port` got 0, expected one number for all)"
        yield Problem(what, "write `main_process_port: 29500`")
    elif rank == 0 and is_port_in_use(launch.port):
        what = f"port {launch.port or 29500} is taken on this node, where rank 0 listens (expected a free one)"
        yield Problem(what, "pass another `--main_process_port`, the same on every node")


def device_problems(launch: Launch, gpus_per_node: int) -> Iterator[Problem]:
    """Yield a problem if the node's processes train on every GPU that they see; the engine needs one of its own."""
    if launch.visible is None or launch.started < len(launch.visible):
        return
    most = gpus_per_node - 1
    if "--vllm_devices" in launch.args.training_script_args:  # the engine shares these GPUs
        return
    if launch.started > most:
        what = f"no GPU is left over for the engine (got {launch.started} processes a node, expected {most} or less)"
        fewer = f"write `num_processes: {launch.num_nodes * most}`, the total, or " if most else ""
        yield Problem(what, f"{fewer}name a training GPU in the trainer's `vllm_devices`, to share it")
        return
    by_ids = launch.args.gpu_ids != "all"
    setting = f"`gpu_ids` {launch.args.gpu_ids}" if by_ids else "CUDA_VISIBLE_DEVICES of this shell"
    what = f"{setting} hides the reserved GPU from the engine too (got {len(launch.visible)} visible GPUs for"
    what += f" {launch.started} processes, expected {gpus_per_node})"
    cure = "write `gpu_ids: all`, and no `--gpu_ids`: a rank takes the GPU of its own number and leaves the rest"
    yield Problem(what, cure if by_ids else "unset CUDA_VISIBLE_DEVICES")
