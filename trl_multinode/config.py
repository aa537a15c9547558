"""`NodeFields`: the settings of node mode as users set them, a mixin for TRL's configs."""

from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar

from trl import GRPOConfig

from .errors import ConfigurationError
from .node_settings import NodeSettings, check_settings

if TYPE_CHECKING:
    from transformers import TrainingArguments as _Arguments
else:
    _Arguments = object  # at run time, a TRL config follows the mixin in the list of bases

GRPO_ONLY = {
    "max_staleness": "only GRPO corrects for completions that older weights made. Leave it out, or use GRPO.",
    "weight_update": "only GRPO corrects for completions that older weights made. Leave it out, or use GRPO.",
    "micro_batch_tokens": "only GRPO's micro-batches can be regrouped. Leave it out, or use GRPO.",
    "rehearse_longest": "only GRPO's batches can be made up. Leave it out, or use GRPO.",
    "score_groups": "only GRPO's rollouts are made group by group. Leave it out, or use GRPO.",
    "dynamic_sampling": "only GRPO's rollouts are made group by group. Leave it out, or use GRPO.",
}
NO_LOGPROBS = {
    "logprob_divergence_limit": "this trainer never scores what it sampled, so there is nothing to compare. Leave it "
    "out: the probe after the first weight sync and the version check of every row work without it."
}


@dataclass
class NodeFields(_Arguments):
    r"""
    Settings of node mode, as a mixin for one of TRL's configs. Three defaults differ from TRL's: `use_vllm=True`,
    `vllm_mode="node"` and `vllm_gpu_memory_utilization=None`.

    ```python
    @dataclass
    class MultiNodeRLOOConfig(NodeFields, RLOOConfig):
        _not_for = {"max_staleness": "RLOO has no ... Leave it at 0, or use GRPO."}  # refused field -> reason and cure
    ```

    Parameters:
        vllm_devices (`list[int]`, *optional*):
            GPUs of each node for its engines, as indices among the visible GPUs. Default: all GPUs that no rank of the
            node trains on. The list may name a training GPU, so that one GPU is enough.
        num_engines (`int`, *optional*):
            Number of engines per node. Default: GPUs for engines / `vllm_tensor_parallel_size`; 1 on a CPU.
        engine_kwargs (`dict[str, Any]`, *optional*):
            Additional arguments of vLLM's `EngineArgs`, for example `{"max_num_batched_tokens": 16384}`.
        engine_dtype (`str`, *optional*, defaults to `"auto"`):
            Dtype of the engine's weights. `"auto"`: bfloat16 or float16 if the trainer uses it, else the model's own.
        engine_start_timeout (`float`, *optional*, defaults to `900.0`):
            Seconds within which all engines of a node must be ready.
        engine_stall_timeout (`float`, *optional*, defaults to `300.0`):
            Seconds without a token after which an engine that has work counts as stalled. The total time of a
            generation has no limit.
        heartbeat_timeout (`float`, *optional*, defaults to `30.0`):
            Seconds of silence of a rank or a node after which the run ends on all nodes, from the first weight sync
            on; before it, `engine_start_timeout` is the limit. A rank that uses the CPU but holds Python's interpreter
            lock is only named, and ends the run after `stuck_timeout`. 0: no limit.
        stuck_timeout (`float`, *optional*, defaults to `600.0`):
            Seconds without progress of any rank after which the run ends, although all send heartbeats. Generation,
            rewards, pushes, and a script's own work outside of the trainer are left out. 0: no limit.
        engine_restarts (`int`, *optional*, defaults to `2`):
            How often each engine is started again when its processes die or stall. The ranks then send it the current
            weights, and its rows are generated again. With 0, the end of an engine ends the run. See docs/running.md.
        engine_restart_copy (`bool`, *optional*, defaults to `False`):
            Whether each local main process keeps a copy of the weights that it sent last, in host memory and in the
            engines' dtype. An engine that was started again gets its weights from it, and other nodes send nothing.
        sync_bucket_mb (`float`, *optional*, defaults to `512`):
            Size, in MiB, of the buckets in which weights are gathered and sent; a larger tensor (an embedding, fused
            experts) is sent in ranges. Peak extra memory is three buckets at most on a local main process, two slots
            of this size per node, and two buckets, the largest layer and the worker's part of it in each worker of an
            engine. Only a tensor into which an adapter is merged is sent in one piece.
        weight_transport (`str`, *optional*, defaults to `"auto"`):
            Memory through which weights reach the engines of a node: `"host"` (shared, page-locked with GPUs),
            `"ipc"` (the local main process's GPU, opened by the engines), `"nccl"` (broadcast to the engines' GPUs).
            `"auto"` selects one that has been executed on such a machine, so far always `"host"`, and logs the reason.
            See docs/weight-sync.md.
        lora_sync (`str`, *optional*, defaults to `"auto"`):
            Weights that a sync sends for a model with LoRA adapters. `"adapter"`: the frozen weights once, then only
            the adapter, which vLLM applies to them. `"merged"`: all weights every time, with the adapter merged bucket
            by bucket. `"auto"`: `"adapter"` if vLLM can serve it, else `"merged"` with the reason logged. See
            docs/lora.md.
        rollout_seed (`int`, *optional*):
            Base seed of the rollouts. Every row then samples with its own seed, so that a run does not depend on how
            its rows are spread over ranks and nodes (bitwise on a CPU in fp32; on a GPU, batch-dependent rounding can
            change a token). The later turns of tools and environments are included. See docs/settings.md.
        max_staleness (`int`, *optional*, defaults to `0`):
            Generation rounds by which completions may lag behind the weights they train. `0`: the engines generate
            every round with the newest weights, while the ranks wait. `1`: while a round trains, the engines generate
            the next round's completions with the older weights; prompts, their order and the number of optimizer steps
            stay the same. `1` requires TRL's importance-sampling correction, which becomes the off-policy correction.
        weight_update (`str`, *optional*, defaults to `"drain"`):
            Way in which new weights reach engines that generate ahead. `"drain"`: a sync waits for all completions
            under way. `"in_flight"`: completions continue across a sync, and engines never run empty, which pays off
            when the lengths of completions differ much. Every step trains on the groups that are complete, so their
            order differs from that of the dataset; every group is trained exactly once. See docs/long-tail.md.
        open_rounds (`int`, *optional*, defaults to `1`):
            With `weight_update="in_flight"`: generation rounds, 2 to 8, that are begun and not trained while a round
            trains.
        max_age (`int`, *optional*):
            With `weight_update="in_flight"`: generation rounds after which a step waits for a group that was begun.
            Default: 3 x `open_rounds`. `max_age=open_rounds` keeps the order of the dataset.
        recompute_kv (`bool`, *optional*, defaults to `False`):
            With `weight_update="in_flight"`: compute the cached keys and values of completions under way again with
            the new weights. Otherwise their later tokens attend to those of the older weights, and the recorded
            log-probs are those of this mixed computation.
        logprob_divergence_limit (`float`, *optional*):
            Limit for the mean |engine log-prob - trainer log-prob| per token of a rank's batch. Above it the run
            stops, because some weights of the engine must be stale. Default: 0.02 if both sides compute in float32,
            else 0.3. `0` turns the check off. More than 1 % of NaN among the trained tokens always stops the run.
        micro_batch_tokens (`int`, *optional*):
            Maximum number of slots (rows x padded length) of a micro-batch. The rows of every optimizer step are
            regrouped into micro-batches of similar cost. Every row, its prompt included, must fit. Default: TRL's
            micro-batches of `per_device_train_batch_size` rows. See docs/balance.md.
        balance_across (`str`, *optional*, defaults to `"world"`):
            Ranks between which this regrouping may move rows. `"world"` deals them to the ranks of all nodes; about 25
            bytes a token cross the network. `"node"` keeps every row on its node, and in each micro-step all nodes
            wait for the one with the longest rows.
        node_table_steps (`int`, *optional*, defaults to `10`):
            Optimizer steps between two tables of the nodes in the log of rank 0; `0` for none. See docs/log.md.
        device_tflops (`float`, *optional*):
            Peak TFLOPS of one training device, for `perf/mfu`. Default: the data sheet's dense bfloat16 rate if the
            device is known and training computes in bfloat16 or float16, else `perf/mfu` is not logged.
        rehearse_longest (`bool`, *optional*, defaults to `False`):
            Before step 1, run the longest rows that the settings allow through forward and backward, and a round of
            them through the engines, so that a lack of memory shows in the first minutes. Weights, optimizer, random
            states and later completions are the same with and without. See docs/rehearsal.md.
        save_minutes (`float`, *optional*):
            Save a checkpoint whenever so many minutes have passed since the last one, at the end of an optimizer step,
            in addition to those of `save_strategy`. See docs/rehearsal.md.
        preemption_grace (`float`, *optional*, defaults to `600.0`):
            Longest time, in seconds, for the end of the optimizer step and a checkpoint after a SIGTERM or SIGHUP, or
            the signal named in `TRL_MULTINODE_PREEMPT_SIGNAL`. torchrun leaves 30 s after these, unless
            `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` is set before the launch. See docs/running.md.
        reward_timeout (`float`, *optional*):
            Seconds after which a call of a reward function that has not returned ends the run, with a line that has
            its name, the rank and, if it loops over the rows, the row. It must let other threads run: a call into C
            that holds the interpreter's lock is not seen. By default there is no limit.
        tool_timeout (`float`, *optional*):
            Seconds after which a call of a tool that has not returned ends the run, with a line that has its name, the
            rank and the row. It also holds for the `reset` of an environment. By default there is no limit. See
            docs/agents.md.
        tool_errors (`str`, *optional*, defaults to `"answer"`):
            `"answer"`: an exception in a tool is its answer to the model, as in TRL. `"raise"`: it ends the run, with
            a line that has the tool's name, the rank and the row.
        score_groups (`bool`, *optional*, defaults to `False`):
            Compute the rewards of a group as soon as its completions are made, beside the generation of other groups
            and, with rounds ahead, beside training. Needs groups that do not straddle ranks. See docs/scoring.md.
        score_with_batch (`list[str]`, *optional*):
            With `score_groups`: names of reward functions that look at all rows of a rank, or call collectives. TRL
            calls them when the round is used, as it calls reward models.
        score_processes (`int`, *optional*, defaults to `0`):
            With `score_groups`: processes of each rank for sync reward functions that hold the interpreter. By default
            only TRL's `accuracy_reward` and `reasoning_accuracy_reward` get one, because they need a main thread.
        dynamic_sampling (`bool`, *optional*, defaults to `False`):
            Whether a group whose completions all get the same reward, which teaches nothing, is dropped, and another
            prompt of the training dataset takes its place in the round. Needs `score_groups=True`. Steps, epochs and
            rows per rank stay the same. See docs/dynamic-sampling.md.
        max_resample_rounds (`int`, *optional*, defaults to `8`):
            With `dynamic_sampling`: prompts that a place in the round tries after the first one. Then the last group
            is kept, and if that happens to all groups of all ranks in one round, the run ends.
        hub_push_must_succeed (`bool`, *optional*, defaults to `False`):
            End the run if a push to the Hub still fails after retries. Otherwise the run reports the failure with the
            command that repeats the push. See docs/hub.md.
        repeat_warnings (`bool`, *optional*, defaults to `False`):
            Show the warnings of Python and of libraries as often as they come, from every rank. By default each
            appears once per node in a launch; errors and a script's own log lines always appear.
    """

    _not_for: ClassVar[dict[str, str]] = {}  # fields that this trainer does not support -> reason and cure

    use_vllm: bool = field(
        default=True, metadata={"help": "Whether to generate with vLLM. Here the default is `True` (TRL: `False`)."}
    )
    vllm_mode: str = field(
        default="node",
        metadata={
            "help": "'node': every node hosts engines on its reserved GPUs (the default here). 'server' and "
            "'colocate' do what TRL does."
        },
    )
    vllm_gpu_memory_utilization: float | None = field(
        default=None,
        metadata={"help": "Share of a GPU's memory for vLLM. Default: 0.9; 0.3 if engines share a GPU with a rank."},
    )
    vllm_devices: list[int] | None = field(
        default=None,
        metadata={
            "help": "GPUs of each node for its engines. Default: all visible GPUs that no local rank trains on."
        },
    )
    num_engines: int | None = field(
        default=None, metadata={"help": "Engines per node. Default: GPUs for engines / vllm_tensor_parallel_size."}
    )
    engine_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further keywords of vLLM's EngineArgs, as a dict (JSON on a command line)."}
    )
    engine_dtype: str = field(
        default=NodeSettings.engine_dtype, metadata={"help": "Dtype of the engine's weights, or 'auto'."}
    )
    engine_start_timeout: float = field(
        default=NodeSettings.engine_start_timeout,
        metadata={"help": "Seconds within which all engines of a node must be ready."},
    )
    engine_stall_timeout: float = field(
        default=NodeSettings.engine_stall_timeout,
        metadata={"help": "Seconds without a token after which an engine that has work counts as stalled."},
    )
    heartbeat_timeout: float = field(
        default=NodeSettings.heartbeat_timeout,
        metadata={"help": "Seconds of silence of a rank or a node after which the run ends; 0 for no limit."},
    )
    stuck_timeout: float = field(
        default=NodeSettings.stuck_timeout,
        metadata={"help": "Seconds without progress of any rank after which the run ends; 0 for no limit."},
    )
    engine_restarts: int = field(
        default=NodeSettings.engine_restarts,
        metadata={"help": "How often each engine is started again when it dies or stalls; 0: its end ends the run."},
    )
    engine_restart_copy: bool = field(
        default=NodeSettings.engine_restart_copy,
        metadata={"help": "Whether each local main process keeps a copy of the weights for engines started again."},
    )
    sync_bucket_mb: float = field(
        default=NodeSettings.sync_bucket_mb,
        metadata={"help": "Size, in MiB, of the buckets in which weights are gathered and sent."},
    )
    weight_transport: str = field(
        default=NodeSettings.weight_transport,
        metadata={"help": "How weights reach a node's engines: 'auto', 'host', 'ipc' or 'nccl'."},
    )
    lora_sync: str = field(
        default=NodeSettings.lora_sync,
        metadata={
            "help": "Weights that a sync of a model with LoRA sends: the 'adapter', all weights 'merged', or "
            "'auto': the adapter if vLLM can serve it."
        },
    )
    rollout_seed: int | None = field(
        default=None,
        metadata={"help": "Base seed of rollouts; with it they do not depend on the layout of ranks and nodes."},
    )
    max_staleness: int = field(
        default=NodeSettings.max_staleness,
        metadata={
            "help": "Generation rounds by which completions may lag behind the weights they train: 0 or 1. With 1 the "
            "engines generate the next round while the ranks train."
        },
    )
    weight_update: str = field(
        default=NodeSettings.weight_update,
        metadata={
            "help": "'drain': a weight sync waits for completions under way. 'in_flight': they continue across it."
        },
    )
    open_rounds: int = field(
        default=NodeSettings.open_rounds,
        metadata={"help": "With weight_update='in_flight': rounds (2 to 8) begun and not trained."},
    )
    max_age: int | None = field(
        default=None,
        metadata={
            "help": "With weight_update='in_flight': rounds until a step waits for a group. Default: 3 x open_rounds."
        },
    )
    recompute_kv: bool = field(
        default=NodeSettings.recompute_kv,
        metadata={
            "help": "With weight_update='in_flight': whether a sync computes the caches of running completions again."
        },
    )
    logprob_divergence_limit: float | None = field(
        default=None,
        metadata={"help": "Mean |engine - trainer| log-prob per token above which the run stops; 0 turns it off."},
    )
    micro_batch_tokens: int | None = field(
        default=None,
        metadata={"help": "Maximum of rows x padded length per balanced micro-batch. Default: TRL's micro-batches."},
    )
    balance_across: str = field(
        default=NodeSettings.balance_across,
        metadata={"help": "Ranks between which rows may move: those of the 'world', or of a 'node'."},
    )
    node_table_steps: int = field(
        default=NodeSettings.node_table_steps,
        metadata={"help": "Optimizer steps between two tables of the nodes in the log; 0 for none."},
    )
    device_tflops: float | None = field(
        default=None,
        metadata={"help": "Peak TFLOPS of a training device, for the log's MFU. Default: by the device's name."},
    )
    rehearse_longest: bool = field(
        default=NodeSettings.rehearse_longest,
        metadata={"help": "Whether to run the longest rows that the settings allow through all stages before step 1."},
    )
    save_minutes: float | None = field(
        default=None,
        metadata={"help": "Minutes after which a checkpoint is saved, besides those of `save_strategy`."},
    )
    preemption_grace: float = field(
        default=NodeSettings.preemption_grace,
        metadata={"help": "Longest time, in seconds, for the end of the step and a checkpoint after a signal."},
    )
    reward_timeout: float | None = field(
        default=NodeSettings.reward_timeout,
        metadata={"help": "Seconds after which a reward function that has not returned ends the run."},
    )
    tool_timeout: float | None = field(
        default=NodeSettings.tool_timeout,
        metadata={"help": "Seconds after which a tool that has not returned ends the run."},
    )
    tool_errors: str = field(
        default=NodeSettings.tool_errors,
        metadata={"help": "'answer': an exception in a tool is its answer to the model. 'raise': it ends the run."},
    )
    score_groups: bool = field(
        default=NodeSettings.score_groups,
        metadata={"help": "Whether a group's rewards are computed as soon as its completions are made."},
    )
    score_with_batch: list[str] | None = field(
        default=NodeSettings.score_with_batch,
        metadata={"help": "With score_groups: reward functions that need all rows of a rank at once."},
    )
    score_processes: int = field(
        default=NodeSettings.score_processes,
        metadata={"help": "With score_groups: processes of each rank for its sync reward functions."},
    )
    dynamic_sampling: bool = field(
        default=NodeSettings.dynamic_sampling,
        metadata={"help": "Whether groups with equal rewards are dropped and sampled again with another prompt."},
    )
    max_resample_rounds: int = field(
        default=NodeSettings.max_resample_rounds,
        metadata={"help": "With dynamic_sampling: prompts that a place in the round tries after the first one."},
    )
    hub_push_must_succeed: bool = field(
        default=NodeSettings.hub_push_must_succeed,
        metadata={"help": "Whether a failed push to the Hub ends the run. Otherwise it is only reported."},
    )
    repeat_warnings: bool = field(
        default=NodeSettings.repeat_warnings,
        metadata={"help": "Whether to show a library's warning every time and on every rank, not once per node."},
    )

    def __post_init__(self) -> None:
        self._VALID_DICT_FIELDS: list[str] = [*super()._VALID_DICT_FIELDS, "engine_kwargs"]
        if self.vllm_mode != "node" and self.vllm_gpu_memory_utilization is None:
            self.vllm_gpu_memory_utilization = trls_default(type(self), "vllm_gpu_memory_utilization")
        try:
            super().__post_init__()
        except ValueError as error:
            if "divisible by num_generations" in str(error):
                raise ConfigurationError(f"{error} {self._batches_that_work()}") from error
            raise
        check_settings(self)

    def _batches_that_work(self) -> str:
        """List batch sizes that hold whole groups; with 7 ranks per node there are few."""
        step = self.num_generations // gcd(self.num_generations, self.world_size)
        return (
            f"With {self.world_size} training ranks, per_device_train_batch_size x steps_per_generation must be a "
            f"multiple of {step}: {step}, {2 * step} or {4 * step}, for example."
        )


@dataclass
class MultiNodeGRPOConfig(NodeFields, GRPOConfig):
    """TRL's [`~trl.GRPOConfig`] with the settings of [`NodeFields`] and its three changed defaults."""


def trls_default(config: type, name: str) -> Any:
    """Return the default of a field in the TRL config that `config` extends."""
    order = config.__mro__
    return order[order.index(NodeFields) + 1].__dataclass_fields__[name].default  # type: ignore[attr-defined]
