"""Text of a config file of `accelerate launch`: only keys that accelerate reads, each surprise with its reason."""

from .layout import Layout

SPLIT = "# Every GPU that no process trains on is for vLLM. The split is this line only."
NO_MULTI_CPU = """\
# Also without a GPU: MULTI_CPU (and `--cpu`) starts one process a node, silently, whatever `num_processes` says."""
NO_ADDRESS = """\
# `machine_rank` and `main_process_ip` are left to the command line: accelerate takes a missing rank as 0 on every
# node, and nodes of rank 0 wait for each other up to 600 s. With no rank in here, the check sees a forgotten one."""
NO_RANK = """\
# `machine_rank` is left to the command line: accelerate takes a missing one as 0, and nodes of rank 0 never meet."""
ON_A_CPU = """\
# Quoted: a bare no is YAML's false, which accelerate cannot read. CPUs without AVX-512 are slow in bf16.
mixed_precision: "no"
# The DeepSpeed launcher does not hand this on to the ranks: the script needs its own `--use_cpu true`.
use_cpu: true
"""
LAUNCHER_OF_ONE = """\
  # Means nothing on one node; here so that only the counts change for more of them (the default, pdsh, needs ssh)."""
LAUNCHER = """\
  # Without it accelerate hands over to pdsh, which starts the ranks through ssh from one node and appends its whole
  # environment, tokens included, to `.deepspeed_env`."""
STAGE3 = """\
  # Build the model already sharded, not whole on every rank first.
  zero3_init_flag: true
  # Without it a checkpoint holds shards only, and `from_pretrained` cannot read it.
  zero3_save_16bit_model: true
"""
REST = """\
  # No `gradient_accumulation_steps` here: the trainer refuses to start when it differs from the script's.
  offload_optimizer_device: none
  offload_param_device: none
"""


def render(layout: Layout, path: str) -> str:
    """Return the text of a layout's config file.

    Args:
        layout ([`Layout`]):
            Nodes and devices.
        path (`str`):
            Name of the file, for the commands in its comments.
    """
    return _header(layout, path) + _counts(layout) + _address(layout) + _devices(layout) + _deepspeed(layout)


def _header(layout: Layout, path: str) -> str:
    return (
        f"# {layout.summary()}.\n#\n# {layout.where()}\n#   {layout.launch_line(path)}\n#\n"
        f"# See what that runs, starting nothing:\n#   {layout.check_line(path)}\n\n"
    )


def _counts(layout: Layout) -> str:
    kind = f"{NO_MULTI_CPU}\n" if layout.cpu else ""
    text = f"compute_environment: LOCAL_MACHINE\n{kind}distributed_type: DEEPSPEED\nnum_machines: {layout.nodes}\n"
    if layout.nodes > 1:
        total = f"{layout.nodes} x {layout.ranks}"
        text += f"# The total, {total}, not a node's share; accelerate floors what does not divide.\n"
    if not layout.cpu and not layout.shared:
        text += f"{SPLIT}\n"
    return f"{text}num_processes: {layout.nodes * layout.ranks}\n"


def _address(layout: Layout) -> str:
    port = "main_process_port: 29500\n"
    if layout.nodes == 1:
        return f"machine_rank: 0\n{port}"
    if layout.cpu:
        return f"{NO_RANK}\nmain_process_ip: 127.0.0.1\n{port}"
    return f"{NO_ADDRESS}\n{port}"


def _devices(layout: Layout) -> str:
    if layout.cpu:
        return ON_A_CPU
    training = ",".join(map(str, range(layout.ranks)))
    last = "the last GPU" if layout.engine_gpus == 1 else f"the last {layout.engine_gpus} GPUs"
    hidden = f'# Not "{training}": that becomes CUDA_VISIBLE_DEVICES and hides {last} from vLLM too.\n'
    return f"{'' if layout.shared else hidden}gpu_ids: all\nmixed_precision: bf16\nuse_cpu: false\n"


def _deepspeed(layout: Layout) -> str:
    launcher = f"{LAUNCHER_OF_ONE if layout.nodes == 1 else LAUNCHER}\n  deepspeed_multinode_launcher: standard\n"
    stage = STAGE3 if layout.zero == 3 else "  zero3_init_flag: false\n"
    return f"deepspeed_config:\n{launcher}  zero_stage: {layout.zero}\n{stage}{REST}"
