"""`NodeFields`: the settings of node mode as users set them, a mixin for TRL's configs."""

import inspect
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar

from transformers.utils import is_torch_xla_available
from trl import GRPOConfig

from .errors import ConfigurationError
from .node_settings import check_settings, is_node_mode
from .run.gpu_variables import check_accelerator
from .settings import Settings, check_values, docstring, setting

if TYPE_CHECKING:
    from transformers import TrainingArguments as _Arguments
else:
    _Arguments = object  # at run time, a TRL config follows the mixin in the list of bases

BY_GROUPS = "only GRPO's rollouts are made group by group. Leave it out, or use GRPO."
GRPO_ONLY = {
    "max_staleness": "only GRPO corrects for completions that older weights made. Leave it out, or use GRPO.",
    "micro_batch_tokens": "only GRPO's micro-batches can be regrouped. Leave it out, or use GRPO.",
    "rehearse_longest": "only GRPO's batches can be made up. Leave it out, or use GRPO.",
    "score_groups": BY_GROUPS,
    "dynamic_sampling": BY_GROUPS,
}
NO_LOGPROBS = {
    "logprob_divergence_limit": "this trainer never scores what it sampled, so there is nothing to compare. Leave it "
    "out: the probe after the first weight sync and the version check of every row work without it."
}


@dataclass
class NodeFields(Settings, _Arguments):
    r"""
    Settings of node mode, as a mixin for one of TRL's configs. Three defaults differ from TRL's: `use_vllm=True`,
    `vllm_mode="node"` and `vllm_gpu_memory_utilization=None`. The other fields are those of [`Settings`].

    ```python
    @dataclass
    class MultiNodeRLOOConfig(NodeFields, RLOOConfig):
        # refused field -> reason and cure
        _not_for = {"max_staleness": "RLOO has no ... Leave it at 0, or use GRPO."}
    ```

    """

    # fields that this trainer does not support -> reason and cure
    _not_for: ClassVar[dict[str, str]] = {}

    use_vllm: bool = setting(
        True, "Whether to generate with vLLM. Here the default is `True` (TRL: `False`)."
    )
    vllm_mode: str = setting(
        "node",
        "'node': every node hosts engines on its reserved GPUs (the default here). 'server' and 'colocate' do what "
        "TRL does.",
    )
    vllm_gpu_memory_utilization: float | None = setting(
        None,
        "Share of a GPU's memory for vLLM. Default: 0.9; 0.3 if engines share a GPU with a rank.",
    )

    def __post_init__(self) -> None:
        check_values(self, is_node_mode(self))  # first, because TRL calculates with some of them
        self._VALID_DICT_FIELDS: list[str] = [*super()._VALID_DICT_FIELDS, "engine_kwargs"]
        if self.vllm_mode != "node" and self.vllm_gpu_memory_utilization is None:
            self.vllm_gpu_memory_utilization = trls_default(
                type(self), "vllm_gpu_memory_utilization"
            )
        self._correct_per_token()
        self._check_device()
        try:
            super().__post_init__()
        except ValueError as error:
            if "divisible by num_generations" not in str(error):
                raise
            raise ConfigurationError(
                str(error),
                setting="num_generations",
                got=self.num_generations,
                cure=self._batches_that_work(),
            ) from error
        check_settings(self)

    def _check_device(self) -> None:
        """Check that there is a device for half precision, for which transformers names another cause and cure.

        In full precision everything also runs on a CPU without `use_cpu`.
        """
        # TRL's default is bfloat16 unless float16 is chosen
        half = {
            "bf16": not self.fp16 if self.bf16 is None else self.bf16,
            "fp16": self.fp16,
            "bf16_full_eval": self.bf16_full_eval,
        }
        chosen = [name for name, is_on in half.items() if is_on]
        if chosen and not self.use_cpu and not is_torch_xla_available():
            check_accelerator(0, None, needs=chosen[0])

    def _correct_per_token(self) -> None:
        """Replace TRL's default correction where completions stay in flight: it is per sequence, and a completion with
        many tokens of older weights would be dropped. Only these tokens are to be corrected."""
        if self.max_staleness < 2 or not self._has_trls_default("vllm_importance_sampling_mode"):
            return
        self.vllm_importance_sampling_mode = "token_truncate"
        if self._has_trls_default("vllm_importance_sampling_clip_max"):
            self.vllm_importance_sampling_clip_max = 2.0

    def _has_trls_default(self, name: str) -> bool:
        return hasattr(self, name) and getattr(self, name) == trls_default(type(self), name)

    def _batches_that_work(self) -> str:
        """List batch sizes that hold whole groups; with 7 ranks per node there are few."""
        step = self.num_generations // gcd(self.num_generations, self.world_size)
        return (
            f"With {self.world_size} training ranks, per_device_train_batch_size x steps_per_generation must be a "
            f"multiple of {step}: {step}, {2 * step} or {4 * step}, for example."
        )


NodeFields.__doc__ = f"{inspect.cleandoc(NodeFields.__doc__ or '')}\n\n{docstring()}"


@dataclass
class MultiNodeGRPOConfig(NodeFields, GRPOConfig):
    """TRL's [`~trl.GRPOConfig`] with the settings of [`NodeFields`] and its three changed defaults."""


def trls_default(config: type, name: str) -> Any:
    """Return the default of a field in the TRL config that `config` extends."""
    order = config.__mro__
    return order[order.index(Settings) + 1].__dataclass_fields__[name].default  # type: ignore[attr-defined]
