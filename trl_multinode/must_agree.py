"""Ranks compare what they were given before a model loads: arguments, model, tokenizer, data, script, libraries.

`accelerate launch` is typed on every node, so a node may have an old file, and a script may draw something anew in
each of its processes. Neither TRL nor a collective notices: gradients of different losses are averaged, and groups of
different datasets are mixed.
"""

import json
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import cached_file

from .call_checks import Call, adapters_of, config_of, datasets_of, name_of
from .errors import ConfigurationError
from .host import NodeHost
from .node_settings import NodeSettings
from .run.facts import Disagreement, Facts
from .run.reporter import warn
from .run.topology import NodeShape
from .run.values import digest_of, flat, text_of
from .run.versions import MUST_AGREE, local_versions, major_minor

# packages whose fields must agree; a user's own may differ
OURS = (
    "trl",
    "transformers",
    "trl_multinode",
)

# fields that may differ between ranks
MAY_DIFFER = {
    # the rank's own
    "local_rank",
    # scripts name a tracker on rank 0 only, which alone reads the rest, and put a time into the name of a run
    "report_to",
    "run_name",
    "project",
    "trackio_space_id",
    "trackio_bucket_id",
    "trackio_static_space_id",
    # about this rank's own lines
    "disable_tqdm",
    "log_level",
    "log_level_replica",
    "debug",
    "num_completions_to_print",
    # secret, and only rank 0 pushes
    "hub_token",
    # about this rank's own memory, cores and processes; the order of the rows is the same
    "skip_memory_metrics",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context",
    # node mode has no server
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_group_port",
}

# fields that may differ between nodes, but not between the ranks of a node
MAY_DIFFER_BY_NODE = {
    # a node may have other GPUs
    "vllm_devices",
    "num_engines",
    "engine_kwargs",
    "vllm_gpu_memory_utilization",
    # with paths of the node; what was read of the last two is compared
    "model_init_kwargs",
    "deepspeed",
    "fsdp_config",
}

# fact that differs between nodes of other shapes, which is no error
NODE = "shape of the node"
# variables that accelerate makes of its config file
LAUNCH_VARIABLES = (
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_",
    "ACCELERATE_DYNAMO_",
    "FSDP_",
    "PARALLELISM_CONFIG_",
)
PATHS = ("_path", "_file", "_dir", "_folder")  # ends of names whose values belong to a node

# entries of a config that name the copy, and the program that wrote it
OF_A_COPY = {
    "_name_or_path",
    "base_model_name_or_path",
    "name_or_path",
    "transformers_version",
    "peft_version",
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
ROWS = 1024  # of a dataset, compared if the fingerprints differ
CURE = (
    "Start the same script with the same arguments, files and versions on every node, and let it draw nothing that "
    "differs per process: shuffle with a seed, sort lists of files, take a time from one place."
)


def check_agreement(host: NodeHost, args: Any, call: Call) -> None:
    """
    Compare what the ranks were given, and learn the shapes of nodes that differ. All ranks take part, through the
    store of the run.

    Args:
        host ([`NodeHost`]):
            Host of this rank.
        args ([`~transformers.TrainingArguments`]):
            Training arguments.
        call (`Call`):
            All arguments of the trainer, by name.

    Raises:
        `ConfigurationError`: on every rank, with the first things that differ, their values and the ranks.
    """
    facts = Facts(host.topology)
    add_arguments(facts, args)
    add_launch(facts, args)
    add_model(facts, args, call)
    add_functions(facts, call)
    for name, dataset in datasets_of(call).items():
        # no row is read, because a stream would lose it
        rows = len(dataset) if hasattr(dataset, "__len__") else None
        columns = getattr(dataset, "column_names", None)
        sizes = {"type": type(dataset).__name__, "rows": rows, "columns": columns}
        facts.add(f"`{name}`", sizes)
    versions = local_versions()
    for library in MUST_AGREE:
        facts.add(f"version of {library}", ".".join(major_minor(versions[library])))
    facts.add(
        "`dtype` in `engine_kwargs`", NodeSettings.of(args).engine_kwargs.get("dtype", "auto")
    )
    topology = host.topology
    facts.add(NODE, topology.nodes[topology.node])
    found = {one.name: one for one in host.agreement.compare(facts)}
    if (of_nodes := found.pop(NODE, None)) is not None:
        topology.learn(
            {
                rank: NodeShape(**json.loads(text))
                for text, ranks in of_nodes.values.items()
                for rank in ranks
            }
        )
    refuse(list(found.values()))
    host.rank.check_engines()
    warn_of(host, args)
    check_rows(host, args, call)


def check_training(host: NodeHost, args: Any, resume_from_checkpoint: str | bool | None) -> None:
    """Compare the arguments again, which a script may have changed since, and the checkpoint. All ranks take part.

    Raises:
        `ConfigurationError`: as [`check_agreement`].
    """
    facts = Facts(host.topology)
    add_arguments(facts, args)
    facts.add(
        "`resume_from_checkpoint` of `train`",
        resume_from_checkpoint,
        by_node=args.save_on_each_node,
    )
    refuse(host.agreement.compare(facts))


def refuse(found: Sequence[Disagreement]) -> None:
    """Raise `ConfigurationError` if there are disagreements; the same on every rank."""
    if found:
        raise ConfigurationError(
            f"The ranks disagree on {'; '.join(map(str, found))}.",
            setting=", ".join(one.name.strip("`") for one in found),
            got=found,
            cure=CURE,
        )


def warn_of(host: NodeHost, args: Any) -> None:
    """Warn, on rank 0, of what may differ but rarely should: versions of libraries, fields of the user's own class."""
    facts = Facts(host.topology)
    facts.add_all(
        {f"version of {library}": version for library, version in local_versions().items()}
    )
    for one in fields(args):
        if not is_ours(args, one.name):
            facts.add(f"`{one.name}`", getattr(args, one.name))
    found = host.agreement.compare(facts)
    if found and host.topology.rank == 0:
        warn(f"the ranks differ in {'; '.join(map(str, found))}. The run goes on.")


# ---- arguments ------------------------------------------------------------------------------------------------------


def add_arguments(facts: Facts, args: Any) -> None:
    """Add the fields that TRL, transformers and this library define, except those that may differ."""
    for one in fields(args):
        if one.name in MAY_DIFFER or one.name == "output_dir" or not is_ours(args, one.name):
            continue
        value = getattr(args, one.name, None)
        if one.name == "model_init_kwargs" and value:  # `device_map` names the rank's own device
            value = {name: part for name, part in value.items() if name != "device_map"}
        facts.add(f"`{one.name}`", value, by_node=one.name in MAY_DIFFER_BY_NODE)
    facts.add("`output_dir`", os.path.abspath(args.output_dir), by_node=args.save_on_each_node)


def is_ours(args: Any, name: str) -> bool:
    """Return whether the first class that defines a field is one of the libraries'."""
    owner = next(
        kind
        for kind in reversed(type(args).__mro__)
        if name in vars(kind).get("__annotations__", {})
    )
    return owner.__module__.split(".")[0] in OURS


def add_launch(facts: Facts, args: Any) -> None:
    """Add what the config file of `accelerate launch` says, and the text of the script."""
    deepspeed = getattr(args.deepspeed_plugin, "deepspeed_config", None) or {}
    for name, text in flat("DeepSpeed's `", deepspeed):
        facts.add(f"{name.replace('`.', '`')}`", text, by_node=name.endswith(PATHS))
    for name, value in os.environ.items():
        if name.startswith(LAUNCH_VARIABLES):
            facts.add(f"variable {name}", value, by_node=name.lower().endswith(PATHS))
    script = Path(sys.argv[0])
    if script.is_file():
        content = script.read_bytes()
        facts.add(f"script {script.name}", f"{len(content)} bytes, digest {digest_of(content)[:8]}")


# ---- model, tokenizer, functions ------------------------------------------------------------------------------------


def add_model(facts: Facts, args: Any, call: Call) -> None:
    """Add the configs of model and adapter, and the contents of tokenizer and chat template."""
    model = call["model"]
    facts.add("model config", without_copies(config_of(model, args).to_dict()))
    for name, adapter in adapters_of(call).items():
        facts.add(f"adapter {name}", without_copies(adapter.to_dict()))
    tokenizer = call.get("processing_class")
    facts.add_all(tokenizer_files(model) if tokenizer is None else tokenizer_parts(tokenizer))


def without_copies(value: Any) -> Any:
    """Return a config without the entries that name a copy of the model, in nested configs too."""
    if not isinstance(value, Mapping):
        return value
    return {name: without_copies(part) for name, part in value.items() if name not in OF_A_COPY}


def tokenizer_files(model: str | PreTrainedModel) -> dict[str, str]:
    """Return a digest of each file of the tokenizer that TRL will load for a model."""
    name = model if isinstance(model, str) else model.config._name_or_path
    found = {}
    for file in TOKENIZER_FILES if name else ():
        # `None` if the model has no such file
        path = cached_file(
            name,
            file,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if path is not None:
            found[f"tokenizer file {file}"] = digest_of(Path(path).read_bytes())
    return found


def tokenizer_parts(given: Any) -> dict[str, Any]:
    """Return the contents of a tokenizer, or of that in a processor."""
    tokenizer = getattr(given, "tokenizer", given)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        vocabulary = text_of(getattr(tokenizer, "get_vocab", dict)())
    else:  # the last call leaves its padding and truncation there, and only one rank may have tokenized the dataset
        state = json.loads(backend.to_str())
        vocabulary = text_of(
            {name: part for name, part in state.items() if name not in ("padding", "truncation")}
        )
    return {
        "chat template": getattr(given, "chat_template", None),
        "vocabulary of the tokenizer": digest_of(vocabulary),
        "special tokens": getattr(tokenizer, "special_tokens_map", None),
    }


def add_functions(facts: Facts, call: Call) -> None:
    """Add the names of rewards and tools in their order, which `reward_weights` and the prompts follow."""
    for argument in ("reward_funcs", "tools", "rollout_func", "environment_factory"):
        given = call.get(argument)
        one_by_one = given if isinstance(given, list | tuple) else [given]
        facts.add(f"`{argument}`", [name_of(one) for one in one_by_one])
    if (harness := getattr(call.get("rollout_func"), "harness", None)) is not None:
        limits = {one.name: getattr(harness, one.name) for one in fields(harness)}
        facts.add("limits and parsers of `harness`", {**limits, "run": harness.name})


# ---- data -----------------------------------------------------------------------------------------------------------


def check_rows(host: NodeHost, args: Any, call: Call) -> None:
    """Compare rows of the datasets whose fingerprints differ, as they are stored: without transforms, undecoded."""
    facts = Facts(host.topology)
    datasets = {f"`{name}`": dataset for name, dataset in datasets_of(call).items()}
    facts.add_all(
        {name: getattr(dataset, "_fingerprint", None) for name, dataset in datasets.items()}
    )
    differing = {one.name for one in host.agreement.compare(facts)}
    # a list has no fingerprint
    compared = [
        name for name, dataset in datasets.items() if name in differing or isinstance(dataset, list)
    ]
    if not compared:
        return
    rows = Facts(host.topology)
    for name in compared:
        for row, text in stored_rows(datasets[name], args.seed):
            rows.add(f"row {row} of {name}", text)
    refuse(host.agreement.compare(rows))


def stored_rows(dataset: Any, seed: int) -> Iterator[tuple[int, str]]:
    """Yield number and text of the first row, the last one, and others drawn by `seed`; they need no decoding."""
    count = len(dataset)
    drawn = random.Random(seed).sample(range(count), min(count, ROWS))
    numbers = sorted({*drawn[: ROWS - 2], 0, count - 1}) if count else []
    if hasattr(dataset, "with_format"):
        rows = dataset.with_format("arrow")[numbers].to_pylist()
    else:
        rows = [dataset[number] for number in numbers]
    for number, row in zip(numbers, rows, strict=True):
        yield number, text_of(without_paths(row))


def without_paths(value: Any) -> Any:
    """Return a stored row with the names of its files instead of their paths, which belong to a node."""
    if isinstance(value, Mapping):
        if value.keys() == {"bytes", "path"}:
            return value["bytes"] or os.path.basename(value["path"] or "")
        return {name: without_paths(part) for name, part in value.items()}
    return [without_paths(part) for part in value] if isinstance(value, list) else value
