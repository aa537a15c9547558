"""Pre-flight checks of a trainer's arguments, before any weights file is opened."""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch.nn import Module
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, TrainingArguments

from .deepspeed_values import check_deepspeed_values
from .errors import ConfigurationError
from .images import has_index, image_flags, may_have_images, shards_weights
from .node_settings import NodeSettings, check_settings, ignored_settings, uses_fsdp, zero_stage
from .rollouts.scoring import COSINE, NEED_MAIN_THREAD, is_of_trl
from .rollouts.scoring_pool import without_partial
from .run.reporter import warn
from .saving.hub import check_push

# All arguments of a trainer, by name
Call = dict[str, Any]
# Arguments with which TRL calls a reward function, beside the columns of the dataset that it passes on
OF_EVERY_REWARD = {
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
}
NOT_PASSED_ON = {"prompt", "completion", "completion_ids"}
# with `remove_unused_columns`, as TRL's trainers set them
KEPT_COLUMNS = {
    "prompt",
    "image",
    "images",
}
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# PEFT's methods whose layers a sync sends; `weights/peft_source.py` checks their variants
SENT_ADAPTERS = {"LORA"}


def check_call(host: Any, args: TrainingArguments, call: Call) -> None:
    """
    Check that node mode supports a trainer's arguments.

    Args:
        host ([`NodeHost`]):
            Host of this rank.
        args ([`~transformers.TrainingArguments`]):
            Training arguments of the trainer.
        call (`Call`):
            All arguments of the trainer, by name. If `model` is a name, only its config is loaded.

    Raises:
        `ConfigurationError`: if an argument is not supported; the message names the cure.
    """
    check_settings(args)
    check_deepspeed_values(args, host.topology)
    check_parallelism(args, call["model"])
    check_dataset(call.get("train_dataset"), args)
    check_evaluation(args, call)
    check_rewards(call, args.remove_unused_columns)
    check_in_flight(args, call.get("train_dataset"))
    check_dynamic_sampling(args, call)
    check_fsdp_version()
    check_own_folders(args, call, host.topology.num_nodes)
    check_push(args, call)
    config = config_of(call["model"], args)
    check_model(config, args, call)
    if call.get("tools") or call.get("environment_factory"):
        check_context(args, getattr(config.get_text_config(), "max_position_embeddings", 0))
    if host.topology.rank == 0:
        for text in uneven_evaluations(args, call):
            warn(text)
    if ignored := ignored_settings(args):
        reason = "engines belong to their node's local main process, and any rank may send a request at any time"
        warn(f"{', '.join(ignored)}: no effect in node mode, because {reason}.")


def check_context(args: Any, max_positions: int) -> None:
    """Check that the engine's context is not smaller than the model's, to which TRL lets tool loops grow.

    Raises:
        `ConfigurationError`: if it is smaller; the message names both.
    """
    limit = args.vllm_max_model_length
    if limit is not None and limit < max_positions:
        raise ConfigurationError(
            f"With tools, `vllm_max_model_length` ({limit}) must be at least the model's own context "
            f"({max_positions}): TRL lets conversations grow to it.",
            setting="vllm_max_model_length",
            got=limit,
            expected=max_positions,
            cure="Leave it unset, or raise it.",
        )


def check_fsdp_version() -> None:
    """Reject FSDP1, accelerate's default: its flat parameters lack the names and shapes that an engine loads."""
    if uses_fsdp() and os.environ.get("FSDP_VERSION", "1") == "1":
        raise ConfigurationError(
            "Node mode sends weights of FSDP2, not of FSDP1.",
            setting="fsdp_version",
            got=1,
            expected=2,
            cure="Write `fsdp_version: 2` under `fsdp_config` in the accelerate config.",
        )  # fmt: skip


def check_own_folders(args: TrainingArguments, call: Call, num_nodes: int) -> None:
    """Reject `save_on_each_node` where transformers writes the weights on rank 0 only: no run could resume.

    Under ZeRO every rank writes its own part, and PEFT saves an adapter on every process that calls it. Under FSDP2
    the whole state is gathered on rank 0.
    """
    if (
        not args.save_on_each_node
        or num_nodes == 1
        or args.save_strategy == "no"
        or args.deepspeed_plugin is not None
    ):
        return
    fsdp = uses_fsdp()
    if fsdp or (hasattr(PreTrainedModel, "should_save_on_this_rank") and not adapters_of(call)):
        raise ConfigurationError(
            f"With `save_on_each_node=True` under {'FSDP2' if fsdp else 'DDP'} the checkpoints of the other "
            f"nodes have no weights, because transformers {transformers.__version__} writes them on rank 0 "
            "only.",
            setting="save_on_each_node",
            got=True,
            cure="Leave it out and use an `output_dir` that all nodes share, or train under ZeRO, where "
            "every rank writes its own part (`accelerate_configs/`).",
        )


def check_parallelism(args: TrainingArguments, model: str | PreTrainedModel) -> None:
    """Reject tensor, context and sequence parallelism: all ranks of a group train the same rows, and in node mode each
    rank would generate other completions for them. Reject expert parallelism, with which no vLLM can be installed."""
    given = args.model_init_kwargs or {}
    loading = [
        f"`{name}` in `model_init_kwargs`" for name in ("tp_plan", "tp_size") if name in given
    ]
    if found := [*group_sizes(args, model), *loading]:
        raise ConfigurationError(
            f"In node mode every rank has rows of its own, and with {found[0]} ranks would share rows but not "
            "their completions.",
            setting=found[0],
            cure="Leave it out: ZeRO-3 or FSDP2 shards the model over all ranks, and "
            "`vllm_tensor_parallel_size` splits it over an engine's GPUs.",
        )
    if "distributed_config" in given or is_distributed(model):
        raise ConfigurationError(
            "With `distributed_config` transformers shards the model itself. Its expert parallelism (`ep_size`) needs "
            "transformers 5.22 or later, and vLLM up to 0.33 takes versions below 5.21 only.",
            setting="distributed_config",
            cure="Leave it out: accelerate's ZeRO-3 or FSDP2 shards experts over all ranks.",
        )


def is_distributed(model: str | PreTrainedModel) -> bool:
    """Return whether transformers sharded a loaded model itself, or its experts are on a mesh of their own."""
    if isinstance(model, str):
        return False
    meshes = [one.device_mesh for one in model.parameters() if hasattr(one, "device_mesh")]
    return getattr(model.config, "distributed_config", None) is not None or any(
        "ep" in (mesh.mesh_dim_names or ()) for mesh in meshes
    )


def group_sizes(args: TrainingArguments, model: str | PreTrainedModel) -> Iterator[str]:
    """Yield the settings, with their values, that make groups of ranks train the same rows."""
    config = args.parallelism_config
    launched = (
        config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true"
    )
    deepspeed = getattr(args.deepspeed_plugin, "deepspeed_config", None) or {}
    sizes = {
        "tensor_parallel.autotp_size": deepspeed.get("tensor_parallel", {}).get("autotp_size"),
        "model.tp_size": getattr(model, "tp_size", None),
    }
    for name in ("tp_size", "cp_size", "sp_size"):
        of_launch = os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1") if launched else "1"
        sizes[f"parallelism_config.{name}"] = getattr(config, name, None) or int(of_launch)
    return (f"`{name}={size}`" for name, size in sizes.items() if (size or 1) > 1)


def check_in_flight(args: TrainingArguments, dataset: Any) -> None:
    """Raise `ConfigurationError` if rounds in flight or dynamic sampling cannot work with the training dataset."""
    settings = NodeSettings.of(args)
    if dataset is None or not (settings.in_flight or settings.dynamic_sampling):
        return
    setting, reason = "dynamic_sampling", "it draws other rows of it"
    if settings.in_flight:
        setting, reason = (
            "max_staleness",
            "a resumed run must find the rows of its open groups again",
        )
    value = getattr(settings, setting)
    if not has_index(dataset):
        raise ConfigurationError(
            f"`{setting}={value}` needs a dataset with an index, got a stream ({type(dataset).__name__}): {reason}.",
            setting=setting,
            got=type(dataset).__name__,
            cure="Use a `Dataset`, or `max_staleness=1` without `dynamic_sampling`.",
        )
    if shards_weights(args) and len(set(image_flags(dataset))) > 1:
        raise ConfigurationError(
            f"Only some rows of the dataset have images. With `{setting}={value}`, it is not known before which rank "
            "trains such a row, and with sharded weights every rank must run the vision tower.",
            setting=setting,
            got=value,
            cure="Use `max_staleness=1` without `dynamic_sampling`, ZeRO-2 or DDP, or give every row an image, such "
            "as a blank one.",
        )


def check_harness(host: Any, args: Any, call: Call) -> None:
    """Raise `ConfigurationError` if an agent that owns its loop cannot be trained with these arguments."""
    positions = getattr(
        config_of(call["model"], args).get_text_config(), "max_position_embeddings", 0
    )
    context = args.vllm_max_model_length or positions
    if context > args.micro_batch_tokens:
        raise ConfigurationError(
            f"A row of a session may fill the context of the engines, {context} tokens, and a micro-batch has "
            f"`micro_batch_tokens` ({args.micro_batch_tokens}).",
            setting="micro_batch_tokens",
            got=args.micro_batch_tokens,
            expected=context,
            cure="Raise it, or set `vllm_max_model_length` to it.",
        )
    if not host.rank.has_engines:
        raise ConfigurationError(
            "A `harness` calls an engine over the loopback address, and this node has no engines.",
            setting="harness",
            got=0,
            node=host.topology.node,
            cure="Reserve a device for an engine on every node (docs/operate/sizing.md).",
        )
    if may_have_images(call.get("train_dataset"), True):
        raise ConfigurationError(
            "The dataset has images, and sessions of a `harness` are trained on text only.",
            setting="train_dataset",
            cure="Drop the columns `image` and `images`, or use an `environment_factory`.",
        )


def check_dynamic_sampling(args: TrainingArguments, call: Call) -> None:
    """Raise `ConfigurationError` if `dynamic_sampling` cannot work with one of the rewards."""
    rewards = rewards_of(call) if NodeSettings.of(args).dynamic_sampling else []
    for reward in rewards:
        name = name_of(reward)
        # TRL runs a module, or a name from which it loads one, on all ranks
        if isinstance(reward, str | Module):
            reason = f"the forward of a reward model ({name}) is a collective of all ranks"
            cure = "Use reward functions, for example one that asks a server with that model"
        elif name_in_trl(reward) == COSINE:
            reason = f"TRL's `{COSINE}` can only be called in the main thread, with the whole batch: its time limit "
            reason += "is a signal"
            cure = "Use a function of your own around `math_verify`"
        else:
            continue
        raise ConfigurationError(
            f"`dynamic_sampling` needs all rewards of a group before its round is chosen, and {reason}.",
            setting="dynamic_sampling",
            got=name,
            cure=f"{cure}, or leave `dynamic_sampling` out.",
        )


def check_dataset(dataset: Any, args: TrainingArguments) -> None:
    """Raise `ConfigurationError` if the dataset is empty or has fewer prompts than a generation batch takes."""
    if dataset is None or not hasattr(dataset, "__len__"):
        return
    per_prompt = getattr(args, "num_generations", 1)
    # TRL's other trainers take one batch for each optimizer step
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    how, lower = "rows of an optimizer step", "gradient_accumulation_steps"
    if hasattr(args, "steps_per_generation"):
        rows, how, lower = (
            args.generation_batch_size,
            "generation_batch_size",
            "steps_per_generation",
        )
    if len(dataset) < rows // per_prompt:
        raise ConfigurationError(
            f"The training dataset has {len(dataset)} rows, one generation batch takes {rows // per_prompt} "
            f"prompts ({how} {rows} / num_generations {per_prompt}).",
            setting="train_dataset",
            got=len(dataset),
            expected=rows // per_prompt,
            cure=f"Use more data, or lower `per_device_train_batch_size` or `{lower}`.",
        )


def check_evaluation(args: TrainingArguments, call: Call) -> None:
    """Raise `ConfigurationError` if evaluation has no dataset; transformers finds out once the model is loaded."""
    strategy = args.eval_strategy
    if strategy != "no" and call.get("eval_dataset") is None:
        raise ConfigurationError(
            f"`eval_strategy` {getattr(strategy, 'value', strategy)} needs an `eval_dataset`, got None.",
            setting="eval_dataset",
            cure="Pass one to the trainer, or set `eval_strategy='no'`.",
        )


def uneven_evaluations(args: TrainingArguments, call: Call) -> Iterator[str]:
    """Yield a warning for each dataset of an evaluation whose last batch is not full.

    TRL averages `eval_reward` and its other metrics over batches. With several ranks, accelerate fills the last batch
    up with copies of the first rows; with one rank it is short. Either way some rows count more than others.
    """
    if args.eval_strategy == "no" or not hasattr(args, "num_generations"):
        return
    per_prompt = getattr(args, "num_generations_eval", None) or args.num_generations
    batch = args.per_device_eval_batch_size * args.world_size
    for dataset in datasets_of(call, "eval_dataset").values():
        rows = len(dataset) * per_prompt if hasattr(dataset, "__len__") else 0
        if left := rows % batch:
            how = (
                f"is filled up with {batch - left} copies"
                if args.world_size > 1
                else f"has {left} rows"
            )
            yield (
                f"an evaluation has {rows} rows ({len(dataset)} prompts x {per_prompt}) in batches of {batch}: the "
                f"last batch {how}, and TRL's metrics, `eval_reward` included, are means over batches, so its rows "
                "weigh more or count twice. Choose `per_device_eval_batch_size`, or the prompts, so that all batches "
                "are full."
            )


def check_rewards(call: Call, removes_columns: bool = False) -> None:
    """Raise `ConfigurationError` if a reward function lacks a package or a column, or cannot be called as TRL does."""
    functions = [one for one in rewards_of(call) if callable(one)]
    check_math_verify(functions)
    names = set(OF_EVERY_REWARD)
    if call.get("environment_factory"):
        names.add("environments")
    for reward in functions:
        check_accepts(reward, names)
    # these two make prompts, or pass further arguments to the rewards
    if not functions or call.get("rollout_func") or call.get("environment_factory"):
        return
    for which, dataset in datasets_of(call).items():
        check_columns(which, dataset, functions, removes_columns)


def rewards_of(call: Call) -> list[Any]:
    """Return the rewards of a trainer: functions, modules and names."""
    rewards = call.get("reward_funcs") or []
    return rewards if isinstance(rewards, list) else [rewards]


def check_math_verify(functions: list[Callable]) -> None:
    """Raise `ConfigurationError` if a reward function of TRL lacks its package."""
    if find_spec("math_verify") is not None:
        return
    for name in (NEED_MAIN_THREAD | {COSINE}) & set(map(name_in_trl, functions)):
        raise ConfigurationError(
            f"The reward `{name}` needs the package math-verify, which is not installed here.",
            setting="reward_funcs",
            got=name,
            cure="Run `pip install math-verify` on every node.",
        )


def name_in_trl(reward: Any) -> str:
    """Return the name of a reward function of TRL; an empty text for another one."""
    return (
        str(getattr(without_partial(reward)[0], "__name__", ""))
        if callable(reward) and is_of_trl(reward)
        else ""
    )


def datasets_of(call: Call, *arguments: str) -> dict[str, Any]:
    """Return the datasets of a trainer by name, those of all arguments by default; one that is missing is `None`."""
    found: dict[str, Any] = {}
    for argument in arguments or ("train_dataset", "eval_dataset"):
        given = call.get(argument)
        if isinstance(given, Mapping):
            found |= {f"{argument}[{name}]": dataset for name, dataset in given.items()}
        else:
            found[argument] = given
    return found


def check_columns(which: str, dataset: Any, rewards: list[Callable], removes_columns: bool) -> None:
    """Raise `ConfigurationError` if a dataset lacks the prompts or an argument of a reward, or has one too many."""
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list) or not columns:  # a stream may not know its columns
        return
    # one of several evaluation datasets has its name in brackets
    argument = which.partition("[")[0]
    if "prompt" not in columns:
        raise ConfigurationError(
            f"The `{which}` has no column 'prompt', got {columns}.",
            setting=argument,
            got=columns,
            cure="Rename or add the column.",
        )
    if taken := sorted((OF_EVERY_REWARD - NOT_PASSED_ON) & set(columns)):
        raise ConfigurationError(
            f"The `{which}` has the columns {taken}, and TRL gives other values to reward functions under "
            "these names.",
            setting=argument,
            got=taken,
            cure="Rename the columns.",
        )
    passed_on = set(columns) - NOT_PASSED_ON
    note = ""
    if removes_columns:
        passed_on &= KEPT_COLUMNS
        note = ", of which `remove_unused_columns` leaves the prompt only"
    for reward in rewards:
        lacking = [name for name in required(reward) if name not in OF_EVERY_REWARD | passed_on]
        if lacking:
            raise ConfigurationError(
                f"The reward `{name_of(reward)}` requires {lacking}, which the `{which}` does not have, got "
                f"the columns {columns}{note}.",
                setting="reward_funcs",
                got=columns,
                expected=lacking,
                cure="Add or rename a column, or give the argument a default.",
            )
        check_accepts(reward, passed_on)


def check_accepts(reward: Callable, names: set[str]) -> None:
    """Raise `ConfigurationError` if a reward function does not accept keywords with which TRL calls it."""
    signature = signature_of(reward)
    if signature is None:
        return
    try:
        signature.bind_partial(**dict.fromkeys(names))
    except TypeError:
        named = {one.name for one in signature.parameters.values() if one.kind in NAMED}
        refused = sorted(names - named) or [str(signature)]
        raise ConfigurationError(
            f"The reward `{name_of(reward)}` does not accept {refused}, and TRL gives them to every reward "
            "function by name, as it does with each column of the dataset.",
            setting="reward_funcs",
            got=refused,
            cure="Add `**kwargs` to its arguments.",
        ) from None


def name_of(reward: Any) -> str:
    """Return the name of a function, of an object's class, or of a reward model. An object may have its node's URL."""
    return reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)


def signature_of(reward: Callable) -> inspect.Signature | None:
    """Return the signature of a reward function, of its decorator if it has one; `None` if Python finds none."""
    try:
        # a decorator may accept more, or give more
        return inspect.signature(reward, follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def required(reward: Callable) -> list[str]:
    """Return the arguments of a reward function that have no default."""
    signature = signature_of(reward)
    arguments = signature.parameters.values() if signature is not None else ()
    return [one.name for one in arguments if one.default is one.empty and one.kind in NAMED]


def check_model(config: PreTrainedConfig, args: TrainingArguments, call: Call) -> None:
    """Raise `ConfigurationError` if the weights cannot be sent or cannot be trained."""
    check_quantization(config, args, call)
    check_heads(config, args.vllm_tensor_parallel_size)
    check_adapters(call)
    check_dora(args, call)
    check_trained(call)


def check_trained(call: Call) -> None:
    """Reject a model without a trained parameter: every step would have a gradient of zero, or fail under ZeRO-3."""
    model = call["model"]
    if (
        isinstance(model, str)
        or call.get("peft_config") is not None
        or any(one.requires_grad for one in model.parameters())
    ):
        return
    cure = "Let some parameters have `requires_grad=True`, or pass a `peft_config`."
    if hasattr(model, "peft_config"):
        cure = (
            "Load the adapter with `PeftModel.from_pretrained(model, adapter, is_trainable=True)`."
        )
    raise ConfigurationError(
        f"No parameter of the model ({type(model).__name__}) is trained.",
        setting="model",
        cure=cure,
    )


def check_heads(config: PreTrainedConfig, size: int) -> None:
    """Reject a tensor parallel size that does not divide the attention heads: vLLM refuses it in each engine."""
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    if isinstance(heads, int) and heads % size:
        divisors = [number for number in range(1, size) if heads % number == 0]
        raise ConfigurationError(
            f"`vllm_tensor_parallel_size` must divide the attention heads of the model, got {size} for {heads} heads.",
            setting="vllm_tensor_parallel_size",
            got=size,
            expected=divisors,
            cure=f"Use one of {divisors}, and more engines.",
        )


def loaded_dtype(config: Any, args: TrainingArguments) -> torch.dtype:
    """Return the dtype in which TRL loads a model by its name; "auto" is that of the checkpoint."""
    name = str((args.model_init_kwargs or {}).get("dtype", "float32")).removeprefix("torch.")
    return getattr(torch, name, config.dtype)


def config_of(model: str | PreTrainedModel, args: TrainingArguments) -> PreTrainedConfig:
    """Return the model's config; for a model name, load it with the arguments that TRL would use."""
    if not isinstance(model, str):
        return model.config
    given = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    given.pop("dtype", None)  # the config keeps that of the checkpoint
    return AutoConfig.from_pretrained(model, return_unused_kwargs=True, **given)[0]


def check_quantization(
    config: PreTrainedConfig, args: TrainingArguments, call: dict[str, Any]
) -> None:
    """Reject a quantized base: an engine would load its packed weights as unpacked ones, or fail late."""
    wanted = [
        call.get("quantization_config"),
        (args.model_init_kwargs or {}).get("quantization_config"),
        getattr(config, "quantization_config", None),
    ]
    if found := next((one for one in wanted if one), None):
        name = found if isinstance(found, str) else type(found).__name__
        raise ConfigurationError(
            f"Node mode sends weights in the engine's dtype, and not quantized ones ({name}).",
            setting="quantization_config",
            got=name,
            cure="Leave `quantization_config` out: with LoRA the base is frozen, and ZeRO-3 shards it over all ranks.",
        )


def adapters_of(call: Call) -> dict[str, Any]:
    """Return the configs of the adapters that a trainer's model has or will get, by name."""
    added = call.get("peft_config")
    return {"default": added} if added else getattr(call["model"], "peft_config", {})


def check_adapters(call: Call) -> None:
    """Reject PEFT's methods besides LoRA: prompt tuning adds no layer, for example, and engines would not see it."""
    kinds = {
        str(getattr(one.peft_type, "value", one.peft_type)) for one in adapters_of(call).values()
    }
    if wrong := kinds - SENT_ADAPTERS:
        raise ConfigurationError(
            f"Node mode sends LoRA adapters (also rsLoRA and DoRA), got {', '.join(sorted(wrong))}: the "
            "engines would generate without it.",
            setting="peft_config",
            got=sorted(wrong),
            cure="Use LoRA, or vllm_mode='colocate' or 'server'.",
        )


def check_dora(args: TrainingArguments, call: Call) -> None:
    """Reject DoRA under ZeRO-3: PEFT 0.21 reads weights outside of their layer's forward, where they are sharded."""
    if zero_stage(args) == 3 and any(
        getattr(one, "use_dora", False) for one in adapters_of(call).values()
    ):
        raise ConfigurationError(
            "PEFT's DoRA cannot be trained under ZeRO-3 (`IndexError: tuple index out of range` in its forward).",
            setting="peft_config",
            got="DoRA",
            cure="Use ZeRO-2 (`zero_stage: 2` in the accelerate config), or rsLoRA (`use_rslora=True`).",
        )
