"""Rules for DeepSpeed's config; each yields the problems of one kind."""

from collections.abc import Iterator

from ...deepspeed_values import check_zero_groups, differences
from ...errors import ConfigurationError
from .launch import Launch, Problem, problem_of


def zero_problems(launch: Launch) -> Iterator[Problem]:
    """Yield the keys without which ZeRO-3 saves no weights or is not built in shards."""
    deepspeed = launch.deepspeed
    if deepspeed is None or deepspeed.stage != 3:
        return
    if not deepspeed.zero.get("stage3_gather_16bit_weights_on_model_save"):
        key = "zero3_save_16bit_model: true"
        if deepspeed.path:
            key = '"stage3_gather_16bit_weights_on_model_save": true'
        yield Problem(
            "a saved model would hold empty shards, which `from_pretrained` cannot read (got no"
            f" `{key.split(':')[0]}`, expected true)",
            f"write `{key}` {deepspeed.where}",
        )
    flag = launch.args.zero3_init_flag
    if flag is not None and str(flag).lower() != "true":
        yield Problem(
            f"accelerate would not gather the shards that transformers builds (got `zero3_init_flag` {flag},"
            f" expected true)",
            "write `zero3_init_flag: true` under `deepspeed_config:`",
        )


def offload_problems(launch: Launch) -> Iterator[Problem]:
    """Yield a problem if something is offloaded to a disk without a folder."""
    deepspeed = launch.deepspeed
    if deepspeed is None:
        return
    for name in ("offload_optimizer", "offload_param"):
        offload = deepspeed.zero.get(name) or {}
        if offload.get("device") == "nvme" and str(offload.get("nvme_path") or "none") == "none":
            key = "nvme_path" if deepspeed.path else f"{name}_nvme_path"
            yield Problem(
                f"`{name}` to `nvme` has no path (got None, expected a folder on the node's NVMe disk)",
                f"write `{key}: /local_nvme` {deepspeed.where}, with the node's own folder",
            )


def group_problems(launch: Launch) -> Iterator[Problem]:
    """Yield a problem if groups of ranks under ZeRO-3 do not fit a node, with the message of the run itself."""
    if launch.deepspeed is None:
        return
    gpus = len(launch.visible or ())
    try:
        for node in range(launch.num_nodes):
            check_zero_groups(launch.deepspeed.config, launch.topology(node), gpus)
    except ConfigurationError as error:
        yield problem_of(error)


def value_problems(launch: Launch) -> Iterator[Problem]:
    """Yield the values that differ between DeepSpeed's config and the script's arguments."""
    deepspeed, script = launch.deepspeed, launch.script
    if deepspeed is None:
        return
    config = deepspeed.config
    if not deepspeed.path:  # accelerate fills it from the launch, and the ranks from the script
        config = {key: value for key, value in config.items() if key not in ("bf16", "fp16")}
    batch = vars(script.batch) if script.batch is not None else {}
    for one in differences(config, batch | script.values, launch.num_ranks):
        what = f"every rank would raise: `{one.key}` is not the script's `{one.argument}`"
        cure = "delete it from the file, the trainer fills it in"
        if deepspeed.path:
            cure = f'write `"{one.key.rpartition(".")[2]}": "auto"` in `{deepspeed.path}`'
            if one.key == "gradient_accumulation_steps":
                cure += "; accelerate takes 1 if it is missing"
        yield Problem(f"{what} (got {one.value}, expected {one.expected})", cure)


def zero_notes(launch: Launch) -> Iterator[str]:
    """Yield a note if accelerate takes its default for the construction of the model in shards."""
    deepspeed = launch.deepspeed
    if deepspeed and deepspeed.stage == 3 and launch.args.zero3_init_flag is None:
        yield "`zero3_init_flag` is missing: accelerate takes true, so each rank builds only its shard of the model"
