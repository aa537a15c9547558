"""Rules for the file's keys; they yield the keys that neither accelerate nor the trainer reads."""

from collections.abc import Iterator
from typing import Any

from ...former_arguments import did_you_mean
from .flags import flag_names
from .launch import Launch, Problem
from .rules import replaced_strategy

# Accelerate merges these keys separately, so the merged value may differ from the file's.
MERGED_APART = {
    "compute_environment",
    "distributed_type",
    "mixed_precision",
    "debug",
    "fp16",
    "dynamo_backend",
    "main_process_port",
    "machine_rank",
}
TPU_KEYS = {
    "tpu_name",
    "tpu_zone",
    "command_file",
    "commands",
    "tpu_vm",
    "tpu_env",
    "main_training_function",
}


def key_problems(launch: Launch) -> Iterator[Problem]:
    """Yield the keys of the file that accelerate loads but nothing reads."""
    unread_for_a_flag = {"deepspeed_config", "fsdp_config"} if replaced_strategy(launch) else set()
    for key, value in launch.file.items():
        if key in unread_for_a_flag:
            continue  # a problem of the flag, not of the file
        if (
            not value
            or key in launch.args.nondefault
            or (key, value) == ("main_training_function", "main")
        ):
            continue
        effective = getattr(launch.args, key, None)
        if not _is_read(key, launch):
            yield Problem(
                f"nothing reads `{key}` in this launch (got {value!r})", "delete it from the file"
            )
        elif isinstance(value, dict):
            yield from _section_problems(key, value)
        elif key not in MERGED_APART and _plain(effective) != _plain(value):
            yield Problem(
                f"accelerate ignores `{key}` in a file (got {value!r}, but {effective!r} would run)",
                f"delete it from the file, or pass `--{key}` on the command line",
            )


def _is_read(key: str, launch: Launch) -> bool:
    args = launch.args
    readers = {
        "deepspeed_config": args.use_deepspeed,
        "fsdp_config": args.use_fsdp,
        "megatron_lm_config": args.use_megatron_lm,
        "mpirun_config": launch.launcher == "simple_launcher",
        "fp8_config": args.mixed_precision == "fp8",
        # `prepare_deepspeed_cmd_env` sets no ACCELERATE_DYNAMO_* variable; the other launchers do.
        "dynamo_config": not args.use_deepspeed,
        "dynamo_backend": not args.use_deepspeed or launch.file[key] == "NO",
    }
    return bool(readers.get(key, key not in TPU_KEYS or args.tpu))


def _section_problems(section: str, values: dict[str, Any]) -> Iterator[Problem]:
    """Yield the keys of a section that nothing reads.

    Accelerate sets every key of a section on its arguments, but reads only those that are also flags.
    """
    prefix = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}.get(
        section, ""
    )
    known = {*flag_names(), "fsdp_ignored_modules"}
    for key in values:
        if prefix + str(key).removeprefix(prefix) not in known:
            yield Problem(
                f"nothing reads `{key}` under `{section}` (got {values[key]!r})",
                "delete it" + did_you_mean(key, known),
            )


def _plain(value: Any) -> str:
    """Normalize a value for comparison: to accelerate, `downcast_bf16: 'no'` and `False` are the same."""
    return {"no": "false", "yes": "true"}.get(str(value).lower(), str(value).lower())
