"""`NodeSettings`: the settings of node mode as the library reads them, and all checks that need only a config."""

import json
import os
from dataclasses import dataclass, field, fields
from typing import Any

from .engine_keys import check_keys
from .errors import ConfigurationError
from .settings import Settings, check_values

# settings of TRL's server and of colocation, left over in a script that now runs in node mode
IGNORED_IN_NODE_MODE = (
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_group_port",
    "vllm_enable_sleep_mode",
)
GPU_SHARE_OF_RESERVED = 0.9  # nothing else runs there; also vLLM's default
GPU_SHARE_OF_TRAINING = 0.3  # TRL's default for colocation


@dataclass
class NodeSettings(Settings):
    """Settings of node mode, read from one of TRL's configs or of this library's.

    A plain TRL config lacks the fields of [`Settings`], and gets their defaults.

    ```python
    settings = NodeSettings.of(args)  # a later change of `args` has no effect on it
    ```
    """

    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # type: ignore[assignment]  # parsed, if it was JSON
    # `None` in this library's configs unless the user sets it
    vllm_gpu_memory_utilization: float | None = None
    # fields of TRL and transformers that the engines need
    vllm_tensor_parallel_size: int = 1
    seed: int = 42
    bf16: bool = False
    fp16: bool = False
    mixed_precision: str = "no"  # the launcher's, if the config sets neither

    @classmethod
    def of(cls, args: Any) -> "NodeSettings":
        """Read the settings from a config; a field that it lacks gets its default."""
        given = {
            one.name: getattr(args, one.name) for one in fields(cls) if hasattr(args, one.name)
        }
        if (devices := given.get("vllm_devices")) is not None:
            given["vllm_devices"] = list(devices)
        further = given.get("engine_kwargs") or {}
        given["engine_kwargs"] = _parsed(further) if isinstance(further, str) else dict(further)
        return cls(**given)

    @property
    def in_flight(self) -> bool:
        """Return whether completions continue across weight updates."""
        return self.max_staleness > 1

    @property
    def oldest_rounds(self) -> int:
        """Age, in generation rounds, at which a step waits for a group that is still open."""
        if not self.in_flight:
            return self.max_staleness
        return 3 * self.max_staleness if self.max_age is None else self.max_age

    @property
    def scores_groups(self) -> bool:
        """Return whether the rewards of a group are computed as soon as it is complete."""
        return self.score_groups is not None


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        found = error
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"`engine_kwargs` must be a dict, or JSON of one, got {text!r} ({found}).",
            setting="engine_kwargs",
            got=text,
            expected="a dict, or JSON of one",
        )
    return found


def is_node_mode(args: Any) -> bool:
    """Return whether a config selects node mode, in which this library runs the engines."""
    return args.use_vllm and args.vllm_mode == "node"


def uses_fsdp() -> bool:
    """Return whether a launch shards by FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def zero_stage(args: Any) -> int:
    """Return the ZeRO stage in a config, or in an accelerator's state; 0 without DeepSpeed."""
    plugin = getattr(args, "deepspeed_plugin", None)
    return 0 if plugin is None else plugin.zero_stage


def ignored_settings(args: Any) -> list[str]:
    """Return the settings of a config that have no effect in node mode and differ from their default."""
    return [
        one.name
        for one in fields(args)
        if one.name in IGNORED_IN_NODE_MODE and getattr(args, one.name) != one.default
    ]


def check_settings(args: Any) -> None:
    """Run the checks that need only a config. This library's configs call it; the trainer calls it for any config.

    Raises:
        `ConfigurationError`: if a value cannot work; the message names field, value and cure.
    """
    check_values(args, is_node_mode(args))
    settings = NodeSettings.of(args)
    check_supported(args, type(args), type(args).__name__)
    check_keys(getattr(args, "generation_kwargs", None), settings.engine_kwargs, is_node_mode(args))
    _check_staleness(args, settings)
    _check_scoring(args, settings)
    _check_dynamic_sampling(args, settings)
    _check_length(args, settings)
    if settings.save_minutes is not None and not is_node_mode(args):
        raise ConfigurationError(
            "`save_minutes` needs node mode, whose store tells all ranks when to save: `use_vllm=True`, "
            "`vllm_mode='node'`.",
            setting="save_minutes",
            got=settings.save_minutes,
            cure="Set it, or use `save_steps`.",
        )
    if settings.min_engines is not None and settings.weight_transport in ("ipc", "nccl"):
        raise ConfigurationError(
            f"`min_engines` needs the weights in host memory, from which agents pull them, and `weight_transport` "
            f"is {settings.weight_transport!r}.",
            setting="weight_transport",
            got=settings.weight_transport,
            expected="host",
            cure="Set it to 'host' or 'auto'.",
        )
    if is_node_mode(args) and getattr(args, "enable_jit_checkpoint", False):
        raise ConfigurationError(
            "`enable_jit_checkpoint` must stay False in node mode: transformers may save after the optimizer "
            "has changed the weights and before the step is counted, so that a resumed run repeats the step, "
            "and it saves only on ranks that got the signal.",
            setting="enable_jit_checkpoint",
            got=True,
            expected=False,
            cure="Leave it out: node mode saves a checkpoint at SIGTERM by itself.",
        )
    if args.use_vllm and args.vllm_mode not in ("node", "server", "colocate"):
        raise ConfigurationError(
            f"`vllm_mode` must be 'node', 'server' or 'colocate', got {args.vllm_mode!r}.",
            setting="vllm_mode",
            got=args.vllm_mode,
            expected=("node", "server", "colocate"),
        )


def check_supported(args: Any, kind: type, where: str) -> None:
    """Check that `args` has no setting that the config class `kind` refuses; `where` is a class for the message.

    A trainer calls it with its own config class, because it may be given another trainer's config.
    """
    settings = NodeSettings.of(args)
    for name, reason in getattr(kind, "_not_for", {}).items():
        if (value := getattr(settings, name)) != (default := getattr(NodeSettings(), name)):
            raise ConfigurationError(
                f"`{name}` must stay {default} with {where}, got {value}:",
                setting=name,
                got=value,
                expected=default,
                cure=reason,
            )


def _check_staleness(args: Any, settings: NodeSettings) -> None:
    dial = f"max_staleness={settings.max_staleness}"
    if settings.max_staleness:
        _check_node_mode(args, dial)
        if not args.vllm_importance_sampling_correction:
            raise ConfigurationError(
                f"`{dial}` needs `vllm_importance_sampling_correction=True` (TRL's default): it corrects for "
                "completions that older weights made.",
                setting="vllm_importance_sampling_correction",
                got=False,
                expected=True,
                cure="Set it, or `max_staleness=0`.",
            )
    if settings.in_flight:
        _check_in_flight(args, settings, dial)
        return
    for name in ("max_age", "recompute_kv"):
        if (value := getattr(settings, name)) != (default := getattr(NodeSettings, name)):
            raise ConfigurationError(
                f"`{name}` needs `max_staleness` of 2 at least, got {value} with `{dial}`.",
                setting=name,
                got=value,
                expected=default,
                cure=f"Set that, or leave it at {default}.",
            )


def _check_in_flight(args: Any, settings: NodeSettings, dial: str) -> None:
    if settings.oldest_rounds < settings.max_staleness:
        raise ConfigurationError(
            f"`max_age` must be at least `max_staleness` ({settings.max_staleness}), got {settings.max_age}: "
            "a group waits for so many rounds even in the dataset's order.",
            setting="max_age",
            got=settings.max_age,
            expected=settings.max_staleness,
        )
    if args.vllm_importance_sampling_mode.startswith("sequence_"):
        raise ConfigurationError(
            f"`{dial}` cannot use {args.vllm_importance_sampling_mode!r} as `vllm_importance_sampling_mode`: "
            "a long completion has many tokens of older weights, so it would drop or cut exactly the long "
            "ones.",
            setting="vllm_importance_sampling_mode",
            got=args.vllm_importance_sampling_mode,
            expected="token_truncate",
            cure="Set 'token_truncate' with `vllm_importance_sampling_clip_max=2.0`, or `max_staleness=1`.",
        )
    _check_whole_groups(args, dial)


def _check_scoring(args: Any, settings: NodeSettings) -> None:
    if settings.scores_groups:
        setting = f"score_groups={settings.score_groups}"
        _check_node_mode(args, setting)
        _check_whole_groups(args, setting)
    elif settings.score_with_batch:
        raise ConfigurationError(
            f"`score_with_batch` needs `score_groups`, got {settings.score_with_batch}.",
            setting="score_with_batch",
            got=settings.score_with_batch,
            cure="Set that, or leave it out.",
        )


def _check_node_mode(args: Any, setting: str) -> None:
    if not is_node_mode(args):
        raise ConfigurationError(
            f"`{setting}` needs node mode.",
            setting=setting.split("=")[0],
            expected="node",
            got=args.vllm_mode if args.use_vllm else None,
            cure="Set `use_vllm=True` and `vllm_mode='node'`.",
        )


def _check_dynamic_sampling(args: Any, settings: NodeSettings) -> None:
    if not settings.dynamic_sampling:
        return
    # whose own checks are node mode and groups that do not straddle ranks
    if not settings.scores_groups:
        raise ConfigurationError(
            "`dynamic_sampling` needs `score_groups`, got None: whether a group is used depends on its "
            "rewards, which TRL computes once the round is chosen.",
            setting="score_groups",
            cure="Set `score_groups=0`, or a number of processes for them.",
        )
    if settings.score_with_batch:
        raise ConfigurationError(
            "`dynamic_sampling` needs all rewards of a group before its round is chosen, got "
            f"{settings.score_with_batch} in `score_with_batch`, which TRL calls with the whole batch.",
            setting="score_with_batch",
            got=settings.score_with_batch,
            cure="Leave them out, or `dynamic_sampling`.",
        )


def _check_whole_groups(args: Any, setting: str) -> None:
    """Raise `ConfigurationError` if a group straddles ranks: each rank takes the groups that it completed itself."""
    steps = args.steps_per_generation
    # `trl-multinode check` reads a config that has not computed it, as TRL does when it is built
    if steps is None and args.generation_batch_size is not None:
        return
    steps = steps or args.gradient_accumulation_steps
    rows, size = args.per_device_train_batch_size * steps, args.num_generations
    if rows % size == 0:
        return
    below, above = rows - rows % size, rows - rows % size + size
    nearest = f"{below} or {above}" if below else f"{above}"
    raise ConfigurationError(
        f"With `{setting}` a group may not straddle ranks: `per_device_train_batch_size` x "
        f"`steps_per_generation` must be a multiple of `num_generations` ({size}), got "
        f"{args.per_device_train_batch_size} x {steps} = {rows}.",
        setting="per_device_train_batch_size",
        got=rows,
        cure=f"The nearest is {nearest}: "
        f"`steps_per_generation={-(-above // args.per_device_train_batch_size)}` or "
        f"`per_device_train_batch_size={above}` with `steps_per_generation=1`, for example.",
    )


def _check_length(args: Any, settings: NodeSettings) -> None:
    cap, longest = settings.micro_batch_tokens, args.max_completion_length
    if longest is None and is_node_mode(args) and getattr(args, "loss_type", None) == "dr_grpo":
        raise ConfigurationError(
            "`loss_type='dr_grpo'` divides the loss by `max_completion_length`, got None.",
            setting="max_completion_length",
            cure="Give a number.",
        )
    if cap is not None and cap < (longest or 0) + 1:
        raise ConfigurationError(
            f"`micro_batch_tokens` must hold the longest row: a prompt and `max_completion_length` {longest} "
            f"tokens, got {cap}.",
            setting="micro_batch_tokens",
            got=cap,
            cure=f"Raise it to {longest} + the longest prompt at least; 4 times that is a good start.",
        )
