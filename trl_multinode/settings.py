"""Every setting of node mode, declared once: type, unit, range, default and meaning.

[`NodeFields`] adds these fields to TRL's configs, [`NodeSettings`] is what the library reads of any config, and
`docs/write_api.py` writes docs/use/settings.md and docs/api/ from them. This module loads neither TRL nor
transformers.
"""

import numbers
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from .errors import ConfigurationError

WEIGHT_TRANSPORTS = ("auto", "host", "ipc", "nccl")
MOST_STALENESS = 8
PROBE_LENGTH = 16  # tokens of the prompt that proves the first weights; enough to involve every layer and the head


MOST = 1e9  # of a number without a limit of its own


@dataclass(frozen=True)
class Number:
    """Range of a number, with its unit. NaN and infinity are never in it."""

    unit: str = ""
    least: float = -inf
    above: float = -inf
    most: float = MOST

    def contains(self, value: float) -> bool:
        """Return whether a value is in the range."""
        return self.least <= value <= self.most and self.above < value < inf

    def __str__(self) -> str:
        words = f"above {self.above:g}" if self.above > -inf else f"at least {self.least:g}"
        if self.most != MOST:
            most = f"{self.most:g}".replace("e+0", "e").replace("e+", "e")
            words += f" and at most {most}"
        return f"{words} {self.unit}".rstrip()


@dataclass(frozen=True)
class OneOf:
    """Values of a setting that is a choice."""

    values: tuple[str, ...]

    def contains(self, value: str) -> bool:
        """Return whether a value is one of the choices."""
        return value in self.values

    def __str__(self) -> str:
        return ", ".join(f'`"{value}"`' for value in self.values)


@dataclass(frozen=True)
class Rule:
    """Annotation of a setting, in parts."""

    kinds: tuple[Any, ...]  # alternatives, `None` among them
    limit: Number | OneOf | None
    default: str  # meaning of `None`

    @classmethod
    def of(cls, hint: Any) -> "Rule":
        """Read an annotation, with or without notes: a limit, and a text with the meaning of the default `None`."""
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        kinds = get_args(kind) if get_origin(kind) is types.UnionType else (kind,)
        limit, default = None, "none"
        for note in notes:
            if isinstance(note, str):
                default = note
            else:
                limit = note
        return cls(kinds, limit, default)


SECONDS = Number("s", above=0, most=1e7)
SECONDS_OR_OFF = Number("s", least=0, most=1e7)
COUNT = Number(least=1, most=1024)


def setting(default: Any, text: str) -> Any:
    """Return a field with a default and its meaning, which `--help` and the pages show."""
    return field(default=default, metadata={"help": text})


@dataclass
class Settings:
    """Fields that node mode adds to a config."""

    vllm_devices: Annotated[
        list[int] | None, Number(least=0, most=4096), "GPUs that no local rank uses"
    ] = setting(
        None,
        "GPUs of each node for its engines, as indices among the visible GPUs. The list may name a training GPU, so "
        "that one GPU is enough.",
    )
    num_engines: Annotated[
        int | None,
        Number(least=0, most=1024),
        "GPUs for engines / `vllm_tensor_parallel_size`; 1 on a CPU",
    ] = setting(
        None,
        "Engines of each node. A node with 0, or whose ranks train on all of its GPUs, uses the engines of the other "
        "nodes, which needs a secret (docs/operate/security.md): token ids and images of its prompts and completions "
        "then cross the network, not encrypted.",
    )
    min_engines: Annotated[int | None, Number(least=0, most=4096), "no engines of agents"] = (
        setting(
            None,
            "Engines, those of the nodes included, that must serve before each round. If it is set, engines of agents "
            "(`trl-multinode engines --join`) may join and leave while the run trains. Each node opens a port for "
            "them, which needs a secret; token ids and images of prompts and completions, config, tokenizer and "
            "weights then cross the network, not encrypted. See docs/operate/beyond.md.",
        )
    )
    engine_kwargs: dict[str, Any] | str | None = setting(
        None,
        "Further keywords of vLLM's `EngineArgs`, as a dict or JSON. Unless they are in here, `max_num_seqs` is the "
        "node's rows of one round (from `max_staleness=2` on: of `max_staleness` + 1 rounds), divided by its engines "
        "and at most 1024; `max_num_batched_tokens` is vLLM's own for offline inference, at least 8192 and twice "
        "`max_num_seqs`, and `dtype` is bfloat16 or float16 if the trainer uses it, else the model's own.",
    )
    engine_start_timeout: Annotated[float, SECONDS] = setting(
        900.0,
        "Time in which all engines of a node must be ready, and all ranks must have imported this library.",
    )
    engine_stall_timeout: Annotated[float, SECONDS] = setting(
        300.0,
        "Time without a token after which an engine that has work counts as stalled. The total time of a generation "
        "has no limit.",
    )
    heartbeat_timeout: Annotated[float, SECONDS_OR_OFF] = setting(
        30.0,
        "Silence of a rank or a node after which the run ends on all nodes, from the first weight sync on; before "
        "it, `engine_start_timeout` is the limit. A rank that uses the CPU but holds Python's interpreter lock is "
        "only named, and ends the run after `stuck_timeout`. 0: no limit. See docs/start/running.md.",
    )
    stuck_timeout: Annotated[float, SECONDS_OR_OFF] = setting(
        600.0,
        "Time without progress of any rank after which the run ends, although all send heartbeats. Generation, "
        "rewards, pushes, and a script's own work outside of the trainer are left out. 0: no limit.",
    )
    engine_restarts: Annotated[int, Number(least=0, most=1e6)] = setting(
        2,
        "How often each engine is started again when its processes die or stall. The ranks then send it the current "
        "weights, and its rows are generated again. 0: the end of an engine ends the run. See docs/start/running.md.",
    )
    sync_bucket_mb: Annotated[float, Number("MiB", above=0, most=65536)] = setting(
        512.0,
        "Largest bucket in which weights are gathered and sent; a larger tensor (an embedding, fused experts) is "
        "sent in ranges. The node reserves room for two of them in `/dev/shm` while its engines start, with "
        "`max_staleness` for the whole model if there is room. Peak extra memory is three buckets on a training rank, "
        "and two (on a GPU three), the largest layer and the worker's part of it in each worker of an engine. Only a "
        "tensor into which an adapter is merged is sent in one piece. See docs/inside/weight-sync.md.",
    )
    weight_transport: Annotated[str, OneOf(WEIGHT_TRANSPORTS)] = setting(
        "auto",
        "Memory through which weights reach the engines of a node: 'host' (shared, page-locked with GPUs), 'ipc' "
        "(the local main process's GPU, opened by the engines), 'nccl' (broadcast to the engines' GPUs). 'auto' "
        "selects one that has been executed on such a machine, so far always 'host', and logs the reason. See "
        "docs/inside/weight-sync.md.",
    )
    lora_sync: Annotated[str, OneOf(("auto", "adapter", "merged"))] = setting(
        "auto",
        "Weights that a sync sends for a model with LoRA adapters. 'adapter': the frozen weights once, then only the "
        "adapter, which vLLM applies to them. 'merged': all weights every time, with the adapter merged bucket by "
        "bucket. 'auto': 'adapter' if vLLM can serve it, else 'merged' with the reason logged. See "
        "docs/inside/weight-sync.md.",
    )
    rollout_seed: Annotated[int | None, Number(least=0, most=1e18)] = setting(
        None,
        "Base seed of the rollouts. Every row then samples with its own seed, so that a run does not depend on how "
        "its rows are spread over ranks and nodes (bitwise on a CPU in fp32; on a GPU, batch-dependent rounding can "
        "change a token). The later turns of tools and environments are included.",
    )
    max_staleness: Annotated[int, Number("generation rounds", least=0, most=MOST_STALENESS)] = (
        setting(
            0,
            "Generation rounds that are begun while a round trains. 0: the engines generate every"
            " round with the newest weights, while the ranks wait. 1: while a round trains, they "
            "generate the next one with the older weights; a sync waits for all its completions, "
            "and prompts, their order and the number of optimizer steps stay the same. From 2 on "
            "completions stay in flight: they continue across a sync, and engines never run "
            "empty, which pays off when the lengths of completions differ much. Every step then "
            "trains on the groups that are complete, so their order differs from that of the "
            "dataset; every group is trained exactly once, and `max_age` bounds how long it stays"
            " open. From 1 on TRL's importance-sampling correction is required, which becomes the"
            " off-policy correction. See docs/use/ahead.md.",
        )
    )
    max_age: Annotated[int | None, Number("generation rounds", least=1), "3 x `max_staleness`"] = (
        setting(
            None,
            "From `max_staleness=2` on: rounds after which a step waits for a group that was begun. `max_staleness` "
            "bounds how many rounds are open, this how old a trained token can be. The same number for both keeps the "
            "order of the dataset.",
        )
    )
    recompute_kv: bool = setting(
        False,
        "From `max_staleness=2` on: compute the cached keys and values of completions under way again with the new "
        "weights. Otherwise their later tokens attend to those of the older weights, and the recorded log-probs are "
        "those of this mixed computation.",
    )
    logprob_divergence_limit: Annotated[
        float | None, Number(least=0), "0.02 if both sides compute in float32, else 0.3"
    ] = setting(
        None,
        "Limit for the mean |engine log-prob - trainer log-prob| per token of a rank's batch. Above it the run "
        "stops, because some weights of the engine must be stale. 0 turns this check and the probe off; NaN in more "
        "than one of a hundred trained tokens always stops the run.",
    )
    micro_batch_tokens: Annotated[int | None, Number("slots", least=1), "TRL's micro-batches"] = (
        setting(
            None,
            "Largest rows x padded length of a micro-batch. The rows of every optimizer step are regrouped into "
            "micro-batches of similar cost. Every row, its prompt included, must fit. See docs/use/balance.md.",
        )
    )
    balance_across: Annotated[str, OneOf(("world", "node"))] = setting(
        "world",
        "Ranks between which this regrouping may move rows. 'world' deals them to the ranks of all nodes; about 25 "
        "bytes a token cross the network. 'node' keeps every row on its node, and in each micro-step all nodes wait "
        "for the one with the longest rows.",
    )
    rehearse_longest: bool = setting(
        False,
        "Before step 1, run the longest rows that the settings allow through forward and backward, and a round of "
        "them through the engines, so that a lack of memory shows in the first minutes. Weights, optimizer, random "
        "states and later completions are the same with and without. See docs/use/checkpoints.md.",
    )
    save_minutes: Annotated[float | None, Number("min", above=0, most=1e6)] = setting(
        None,
        "Save a checkpoint whenever so many minutes have passed since the last one, at the "
        "end of an optimizer step, in addition to those of `save_strategy`. See "
        "docs/use/checkpoints.md.",
    )
    preemption_grace: Annotated[float, SECONDS] = setting(
        600.0,
        "Longest time for the end of the optimizer step and a checkpoint after a SIGTERM or SIGHUP, or the signal "
        "named in `TRL_MULTINODE_PREEMPT_SIGNAL`. torchrun leaves 30 s after these two, unless "
        "`TORCH_ELASTIC_SHUTDOWN_TIMEOUT` is set before the launch. The default is what the job files of "
        "`trl-multinode render` leave. See docs/use/checkpoints.md.",
    )
    call_timeout: Annotated[float | None, SECONDS] = setting(
        None,
        "Time after which a call of a reward function, of a tool, or of the `reset` of an environment that has not "
        "returned ends the run, with a line that has its name, the rank, the place in its code and the row. It must "
        "let other threads run: a call into C that holds the interpreter's lock is not seen. Set it above the longest "
        "round of rewards. It also holds for async functions, not for reward models. See docs/use/rewards.md and "
        "docs/use/agents.md.",
    )
    tool_errors: Annotated[str, OneOf(("answer", "raise"))] = setting(
        "answer",
        "'answer': an exception in a tool is its answer to the model, as in TRL. 'raise': it ends the run, with a "
        "line that has the tool's name, the rank and the row.",
    )
    score_groups: Annotated[
        int | None, Number("processes", least=0, most=4096), "TRL scores the whole round"
    ] = setting(
        None,
        "Compute the rewards of a group as soon as its completions are made, beside the generation of other groups "
        "and, with rounds ahead, beside training. The number is that of each rank's processes for sync reward "
        "functions that hold the interpreter. With 0 they run in the group's thread, except for TRL's "
        "`accuracy_reward` and `reasoning_accuracy_reward`, which need a main thread. Needs groups that do not "
        "straddle ranks. See docs/use/rewards.md.",
    )
    score_with_batch: list[str] | None = setting(
        None,
        "With `score_groups`: names of reward functions that look at all rows of a rank, or call collectives. TRL "
        "calls them when the round is used, as it calls reward models.",
    )
    dynamic_sampling: Annotated[int, Number("prompts", least=0, most=1e6)] = setting(
        0,
        "Further prompts that a place in the round tries while all completions of its group get the same reward, "
        "which teaches nothing: 8 is a good value, 0 trains such groups. If all fail, the last group is kept, and if "
        "that happens to all groups of all ranks in one round, the run ends. Needs `score_groups`. Steps, epochs "
        "and rows per rank stay the same. See docs/use/rewards.md.",
    )
    hub_push_must_succeed: bool = setting(
        False,
        "End the run if a push to the Hub still fails after retries. Otherwise the run reports the failure with the "
        "command that repeats the push. See docs/use/checkpoints.md.",
    )


# Settings of TRL that reach the engines, and the log-probs that are compared with theirs
OF_TRL: dict[str, Any] = {
    "temperature": Annotated[float, Number(above=0, most=100)],
    "top_p": Annotated[float, Number(above=0, most=1)],
    "top_k": Annotated[int | None, Number(least=-1)],
    "min_p": Annotated[float | None, Number(least=0, most=1)],
    "repetition_penalty": Annotated[float, Number(above=0, most=100)],
    "max_completion_length": Annotated[int | None, Number("tokens", least=1)],
    "num_generations": Annotated[int, Number(least=1)],
    "num_generations_eval": Annotated[int | None, Number(least=1)],
    "vllm_max_model_length": Annotated[int | None, Number("tokens", least=PROBE_LENGTH + 1)],
    "vllm_tensor_parallel_size": Annotated[int, COUNT],
    "vllm_gpu_memory_utilization": Annotated[float | None, Number(above=0, most=1)],
}
OF_SAMPLING: dict[str, Any] = OF_TRL | {
    "presence_penalty": Annotated[float, Number(least=-2, most=2)],
    "frequency_penalty": Annotated[float, Number(least=-2, most=2)],
    "min_tokens": Annotated[int, Number("tokens", least=0)],
    "ignore_eos": bool,
}
GREEDY = (
    "TRL divides the trainer's logits by it, and completions of a group that are all the same have no advantages. Use "
    "a small one, such as 0.1, in an evaluation of your own"
)


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_values(args: Any, node_mode: bool) -> None:
    """Check the type and the range of each setting of a config by itself.

    Args:
        args (`~transformers.TrainingArguments`):
            Config of TRL or of this library.
        node_mode (`bool`):
            Whether the config selects node mode, in which TRL's settings of engines are checked too.

    Raises:
        `ConfigurationError`: with name, value and what is expected.
    """
    hints = get_type_hints(Settings, include_extras=True) | (OF_TRL if node_mode else {})
    for name, hint in hints.items():
        if hasattr(args, name):
            check_value(f"`{name}`", getattr(args, name), hint)
    keywords = getattr(args, "generation_kwargs", None)
    if not node_mode or not isinstance(keywords, Mapping):  # transformers has not parsed JSON yet
        return
    for name in OF_SAMPLING.keys() & keywords.keys():
        check_value(f"`{name}` in `generation_kwargs`", keywords[name], OF_SAMPLING[name])


def check_value(name: str, value: Any, hint: Any) -> None:
    """Check one value against its annotation.

    Raises:
        `ConfigurationError`: if it has another type, or is not in the range.
    """
    rule = Rule.of(hint)
    if not any(_is_of(value, kind) for kind in rule.kinds):
        raise _refusal(
            name, value, " or ".join(map(_name, rule.kinds)), f" ({type(value).__name__})"
        )
    if value is None:
        return
    is_list = isinstance(value, list | tuple)
    if rule.limit is not None:
        for one in value if is_list else [value]:
            _check_limit(name, one, rule.limit)
    if is_list and (not value or len(set(value)) < len(value)):
        raise _refusal(name, value, "a list that names one at least, and each once")


def _check_limit(name: str, value: Any, limit: Number | OneOf) -> None:
    if limit.contains(value):
        return
    expected = f"one of {limit}" if isinstance(limit, OneOf) else str(limit)
    is_greedy = name.startswith("`temperature`") and value == 0
    raise _refusal(name, value, expected, f": {GREEDY}" if is_greedy else "")


def _refusal(name: str, got: Any, expected: str, why: str = "") -> ConfigurationError:
    """Return the error for a value; `name` has the setting in backticks, and may say which dictionary it is in."""
    return ConfigurationError(
        f"{name} must be {expected}, got {got!r}{why}.",
        setting=name.split("`")[1],
        got=got,
        expected=expected,
    )


def _is_of(value: Any, kind: Any) -> bool:
    """Return whether a value has a type. A flag is no number, and an integer is a `float`."""
    if kind is type(None):
        return value is None
    if get_origin(kind) is list:
        return isinstance(value, list | tuple) and all(
            _is_of(one, get_args(kind)[0]) for one in value
        )
    if get_origin(kind) is dict:
        return isinstance(value, Mapping)
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, kind)


def _name(kind: Any) -> str:
    """Return a type as an error names it."""
    names = {
        type(None): "None",
        bool: "True or False",
        int: "an integer",
        float: "a number",
        str: "a text",
    }
    return names.get(kind) or f"a {_written(kind)}"


def _written(kind: Any) -> str:
    """Return a type as an annotation is written, such as `list[int]`."""
    return str(kind).replace("typing.", "") if get_args(kind) else kind.__name__


# ---- pages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Described:
    """One setting as pages show it."""

    name: str
    kind: str  # as an annotation is written, such as `float`
    default: str
    range: str
    text: str

    @property
    def help(self) -> str:
        """Meaning and range, as `--help` and a docstring show them."""
        return f"{self.text} Range: {self.range}." if self.range else self.text


def _described() -> Iterator[Described]:
    hints = get_type_hints(Settings, include_extras=True)
    for one in fields(Settings):
        rule = Rule.of(hints[one.name])
        kind = " or ".join(_written(each) for each in rule.kinds if each is not type(None))
        default = rule.default if one.default is None else f"`{one.default!r}`".replace("'", '"')
        limits = "" if rule.limit is None else str(rule.limit)
        yield Described(one.name, kind, default, limits, one.metadata["help"])


def docstring() -> str:
    """Return the settings as the section `Parameters` of a docstring."""
    lines = ["Parameters:"]
    for one in DESCRIBED:
        lines.append(f"    {one.name} (`{one.kind}`, *optional*, default: {one.default}):")
        lines += textwrap.wrap(one.help, 119, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


DESCRIBED = list(_described())
for _field, _one in zip(fields(Settings), DESCRIBED, strict=True):
    _field.metadata = types.MappingProxyType({"help": _one.help})
