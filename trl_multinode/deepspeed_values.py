"""Values that DeepSpeed's config and the trainer's arguments both have, compared by transformers' own code.

transformers raises for a difference when the model is loaded and the engines have started, because it cannot replace a
value of the file. `trl-multinode check` and the trainer compare them before.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from .errors import ConfigurationError

# Sections and values of the config that transformers compares
COMPARED = (
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping",
    "optimizer", "scheduler", "fp16", "bf16",
)  # fmt: skip
# Those that transformers compares only when it knows the number of steps
OF_SCHEDULER = {
    "scheduler.params.total_num_steps": "max_steps",
    "scheduler.params.warmup_num_steps": "warmup_steps",
}

# Sizes of groups of ranks that lie within a node, ZeRO++'s and MiCS's
GROUP_SIZES = ("zero_hpz_partition_size", "mics_shard_size")


@dataclass(frozen=True)
class Difference:
    """One value that differs."""

    key: str  # of DeepSpeed's config, such as `optimizer.params.lr`
    value: Any
    argument: str
    expected: Any


class Unknown:
    """An argument that is not known: it differs from nothing, and neither does what is calculated with it."""

    def __eq__(self, other: object) -> bool:
        return True

    def __mul__(self, other: object) -> "Unknown":
        return self

    __rmul__ = __mul__


class Arguments(SimpleNamespace):
    """Arguments of a trainer, as far as they are known."""

    def __getattr__(self, name: str) -> Unknown:
        return Unknown()


def differences(
    config: Mapping[str, Any], arguments: Mapping[str, Any], world_size: int
) -> list[Difference]:
    """Return the values that differ between DeepSpeed's config and the arguments of a trainer.

    Args:
        config (`Mapping[str, Any]`):
            Config of DeepSpeed; values that are "auto" are the trainer's.
        arguments (`Mapping[str, Any]`):
            Arguments by name, as far as they are known.
        world_size (`int`):
            Number of training ranks.
    """
    if all(config.get(key, "auto") == "auto" for key in COMPARED):
        return []
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, HfTrainerDeepSpeedConfig

    found: list[Difference] = []

    class Compared(HfTrainerDeepSpeedConfig):
        def __init__(self, config: dict[str, Any]):
            # not transformers' own `__init__`, which would make this the config under which models are loaded
            super(HfDeepSpeedConfig, self).__init__(config)
            self._dtype: Any = None
            self.mismatches: list[str] = []

        def fill_match(
            self, ds_key_long: str, hf_val: Any, hf_key: str | None = None, must_match: bool = True
        ) -> None:
            before = len(self.mismatches)
            super().fill_match(ds_key_long, hf_val, hf_key, must_match)
            if len(self.mismatches) > before:
                found.append(
                    Difference(ds_key_long, self.get_value(ds_key_long), hf_key or "", hf_val)
                )

    compared = Compared(copy.deepcopy(dict(config)))
    given = Arguments(**{**arguments, "world_size": world_size})
    if given.bf16 is None:  # TRL's default: unless float16 is chosen
        given.bf16 = not given.fp16
    compared.trainer_config_process(given)
    for key, name in OF_SCHEDULER.items():
        value = getattr(given, name)
        # else a share of the steps, or the length of the dataset
        if not isinstance(value, Unknown) and value >= 1:
            compared.fill_match(key, int(value), name)
    return found


def check_zero_groups(config: Mapping[str, Any], topology: Any, gpus: int) -> None:
    """Check that groups of ranks within a node, as DeepSpeed forms them under ZeRO-3, fit this node.

    Args:
        config (`Mapping[str, Any]`):
            Config of DeepSpeed.
        topology ([`Topology`]):
            Topology of a rank of this node.
        gpus (`int`):
            Number of GPUs that the ranks of this node see; 0 on a CPU machine.

    Raises:
        `ConfigurationError`: if they do not fit; the message names the key of the config.
    """
    zero = config.get("zero_optimization") or {}
    if zero.get("stage") != 3:
        return
    own, world, nodes = topology.local_world_size, topology.world_size, topology.num_nodes
    for name in GROUP_SIZES:
        # beyond all ranks it is one group (`deepspeed/utils/groups.py: _create_zero_param_parallel_group`)
        size = min(int(zero.get(name) or 1), world)
        if size > 1 and own % size:
            raise ConfigurationError(
                f"With `{name}` {size}, ranks of two nodes would share a group, because it does not divide the {own} "
                "ranks of this one.",
                setting=name,
                got=size,
                expected=f"a divisor of {own}",
                node=topology.node,
                cure="Write a number that divides the ranks of every node, or leave it out.",
            )
    # DeepSpeed 0.19 takes the GPUs that a rank sees for the ranks of a node: `utils/groups.py:
    # _get_local_all_to_all_group`, `runtime/comm/coalesced_collectives.py: all_to_all_quant_reduce`. It quantizes
    # nothing on a single node (`runtime/zero/stage3.py: __avg_scatter_grads`).
    if zero.get("zero_quantized_gradients") and nodes > 1 and gpus and world != gpus * nodes:
        raise ConfigurationError(
            f"`zero_quantized_gradients` needs a rank on each of the {gpus} GPUs that a node sees, because DeepSpeed "
            f"takes them for the ranks of a node (got {world} ranks on {nodes} nodes, expected {gpus * nodes}).",
            setting="zero_quantized_gradients",
            got=world,
            expected=gpus * nodes,
            node=topology.node,
            cure="Leave it out, or train on all of them and name those that engines share in `vllm_devices`.",
        )


def check_deepspeed_values(args: Any, topology: Any) -> None:
    """Raise `ConfigurationError` if DeepSpeed's config of this launch differs from a trainer's arguments.

    Args:
        args (`~transformers.TrainingArguments`):
            Training arguments.
        topology ([`Topology`]):
            Topology of this rank, which the groups of ranks in the config must fit.
    """
    if args.deepspeed_plugin is None:
        return
    config = args.deepspeed_plugin.hf_ds_config.config
    check_zero_groups(config, topology, 0 if args.use_cpu else torch.cuda.device_count())
    found = differences(config, vars(args), args.world_size)
    if found:
        each = ", ".join(
            f"`{one.key}` {one.value} (`{one.argument}` {one.expected})" for one in found
        )
        raise ConfigurationError(
            f"DeepSpeed's config and the training arguments both set values, and differ: {each}.",
            setting="deepspeed",
            got=each,
            cure="Write `auto` in the config, or delete the key there, and the trainer fills it in.",
        )
