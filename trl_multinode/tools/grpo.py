"""`trl-multinode grpo`: `accelerate launch` of the script of `examples/grpo.py`, in the form of `trl grpo`.

The command line may mix arguments of the script and flags of `accelerate launch`; a name of both is the script's. A
mistyped one is an error before any process starts.
"""

import tempfile
import textwrap
from collections import defaultdict
from contextlib import ExitStack
from copy import copy
from dataclasses import fields, make_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from ..settings import DESCRIBED
from .text import FileError, Parser, read_keys

CONFIGS = Path(__file__).parents[1] / "accelerate_configs"
MODULE = "trl_multinode.examples.grpo"
PROG = "trl-multinode grpo"
# A list of its own, because the parsers of TRL and accelerate take 8 s to load. A test compares it with them.
MORE = "--help-all lists every argument, `accelerate launch --help` the launcher's own."
HELP = {
    "model": {
        "--model_name_or_path NAME": "on the Hub, or a folder (default: a small model)",
        "--dtype {auto,bfloat16,float16,float32}": "of the weights that are trained",
        "--attn_implementation NAME": "such as flash_attention_2",
        "--use_peft BOOL": "train a LoRA adapter, with --lora_r and --lora_alpha",
    },
    "data and rewards": {
        "--dataset_name NAME": "on the Hub, a .json, .jsonl or .parquet file, or a folder",
        "--dataset_train_split NAME": "split to train on",
        "--prompt_column NAME": "column with the user's message, unless there is `prompt`",
        "--reward_funcs NAME ...": "accuracy_reward, reasoning_accuracy_reward, "
        "think_format_reward, or module.path:function",
    },
    "launch, the same on every node but for --machine_rank": {
        "--accelerate_config NAME": "a shipped config, as 4node, or the file of `trl-multinode config`",
        "--machine_rank K": "number of this node, from 0",
        "--main_process_ip HOST0": "address of node 0",
        "--main_process_port PORT": "a free port of node 0",
        "--num_processes N": "training processes of all nodes; other GPUs generate",
    },
    "TRL": {
        "--output_dir FOLDER": "checkpoints, logs, model; a second launch resumes from it",
        "--num_generations N": "completions of a prompt",
        "--per_device_train_batch_size N": "completions of a rank in one micro-step",
        "--gradient_accumulation_steps N": "micro-steps of an optimizer step",
        "--max_completion_length N": "tokens of a completion",
        "--learning_rate X": "at the first step",
        "--max_steps N": "optimizer steps",
        "--save_steps N": "optimizer steps from one checkpoint to the next",
        "--vllm_tensor_parallel_size N": "GPUs of an engine",
        "--vllm_gpu_memory_utilization X": "share of a GPU that its engine takes",
        "--report_to NAME ...": "wandb, tensorboard, trackio, none",
        "--push_to_hub BOOL": "push checkpoints and model",
    },
}


USAGE = f"{PROG} [--config FILE.yaml] ARGUMENTS"
FIELDS = "__dataclass_fields__"
# Class or library that has an argument first -> title of its group
ORIGINS = {
    "ScriptArguments": "data",
    "GRPOScriptArguments": "data and rewards of this script",
    "ModelConfig": "model",
    "trl_multinode": "node mode (docs/use/settings.md)",
    "trl": "TRL",
    "transformers": "training (transformers)",
}


def main(argv: list[str]) -> int:
    """Launch this node's share of a run.

    Raises:
        `SystemExit`: with status 2 for an invalid command line, and with the launcher's if a rank fails.
    """
    if {"-h", "--help"}.intersection(argv):
        print_help()
        return 0
    if "--help-all" in argv:
        print_all_help()
        return 0
    from accelerate.commands.launch import launch_command, launch_command_parser

    launcher = launch_command_parser()
    with ExitStack() as stack:
        script, launch = split(argv, launcher, stack)
        launch_command(launcher.parse_args([*launch, "--module", MODULE, *script]))
    return 0


def print_help() -> None:
    """Print by group the arguments that most runs set, with all settings of node mode."""
    node_mode = {}
    for one in DESCRIBED:
        is_choice = one.range.startswith("`")
        choices = "{" + one.range.replace('`"', "").replace('"`', "").replace(", ", ",") + "}"
        value = choices if is_choice else one.kind.partition("[")[0].upper()
        node_mode[f"--{one.name} {value}"] = one.text.partition(". ")[0].rstrip(".")
    print(f"usage: {USAGE}\n\nGRPO on this node of a launch. {MORE}")
    for group, arguments in {**HELP, "node mode (docs/use/settings.md)": node_mode}.items():
        print(f"\n{group}:")
        for argument, text in arguments.items():
            indent = " " * 40
            # as in argparse, a long argument has a line of its own
            head = f"  {argument:<37} " if len(argument) < 38 else f"  {argument}\n{indent}"
            lines = textwrap.wrap(text, 118, initial_indent=indent, subsequent_indent=indent)
            print(head + "\n".join(lines).lstrip())


def print_all_help() -> None:
    """Print every argument of the script, in a group for each library whose class has it first."""
    from transformers import HfArgumentParser

    from ..examples.grpo import make_parser

    groups: dict[str, list[Any]] = defaultdict(list)
    for kind in make_parser().dataclass_types:
        hints = get_type_hints(kind)
        for field in filter(attrgetter("init"), fields(kind)):
            bases = [base for base in kind.__mro__ if field.name in vars(base).get(FIELDS, ())]
            groups[_origin(bases[-1])].append((field.name, hints[field.name], copy(field)))
    kinds = [
        # transformers reads the title of a group there
        make_dataclass(
            "Arguments", members, kw_only=True, namespace={"_argument_group_name": title}
        )
        for title, members in groups.items()
    ]
    print(HfArgumentParser(kinds, prog=PROG, description=MORE, usage=USAGE).format_help())


def _origin(kind: type) -> str:
    if kind.__name__ in ORIGINS:
        return ORIGINS[kind.__name__]
    return ORIGINS[kind.__module__.partition(".")[0]]


def split(argv: list[str], launcher: Any, stack: ExitStack) -> tuple[list[str], list[str]]:
    """Divide a command line between the script and `accelerate launch`.

    The training config is not built here: outside the launch they would take the world for one rank, and refuse
    batches that all ranks together fill.

    Args:
        argv (`list[str]`):
            Arguments. `--config FILE` names a YAML file with arguments of both.
        launcher (`argparse.ArgumentParser`):
            Parser of `accelerate launch`.
        stack (`ExitStack`):
            Deletes the script's own config file at its end, if `FILE` has keys of `accelerate launch` too.

    Returns:
        `tuple[list[str], list[str]]`: arguments of the script, and flags of `accelerate launch`.
    """
    from ..examples.grpo import make_parser

    parser = make_parser(PROG)
    parser.others = {
        "--accelerate_config",
        "-q",
        *(f"--{name}" for name in vars(launcher.parse_args(["script"]))),
    }
    path, arguments = _taken(argv, "--config")
    try:
        config = {} if path is None else read_keys(path, "correct --config")
    except FileError as error:
        parser.error(str(error))
    in_config = parser.set_defaults_with_config(
        **{key: value for key, value in config.items() if key != "env"}
    )
    namespace, in_arguments = parser.parse_known_args(arguments)
    check_script_arguments(parser, namespace)
    script = without(arguments, in_arguments)
    if config:
        theirs = {flag.removeprefix("--") for flag in in_config[::2]}
        script += [
            "--config",
            _write({key: value for key, value in config.items() if key not in theirs}, stack),
        ]
    return script, resolved([*in_config, *in_arguments], parser)


def check_script_arguments(parser: Any, namespace: Any) -> None:
    """Build the script's own arguments: an unknown reward is an error before any process starts."""
    kind = parser.dataclass_types[0]
    try:
        kind(**{each.name: getattr(namespace, each.name) for each in fields(kind)})
    except ValueError as error:
        parser.error(str(error))


def without(words: list[str], taken: list[str]) -> list[str]:
    """Return `words` without those of `taken`, a part of them in the same order."""
    rest, left = [], list(taken)
    for word in words:
        if left and word == left[0]:
            left.pop(0)
        else:
            rest.append(word)
    return rest


def resolved(flags: list[str], parser: Any) -> list[str]:
    """Replace `--accelerate_config NAME`, a shipped config or a file, by accelerate's own `--config_file`."""
    name, others = _taken(flags, "--accelerate_config")
    if name is None:
        return flags
    path = Path(name) if Path(name).is_file() else CONFIGS / f"{name}.yaml"
    if not path.is_file():
        shipped = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
        parser.error(
            f"--accelerate_config is neither a file nor a shipped config (got {name}, expected one of {shipped})"
        )
    return ["--config_file", str(path), *others]


def _taken(words: list[str], flag: str) -> tuple[str | None, list[str]]:
    """Return the value of a flag, and the words without it."""
    parser = Parser(PROG, add_help=False)
    parser.add_argument(flag, dest="value")
    found, others = parser.parse_known_args(words)
    return found.value, others


def _write(config: dict[str, Any], stack: ExitStack) -> str:
    file = stack.enter_context(tempfile.NamedTemporaryFile("w", prefix="grpo-", suffix=".yaml"))
    yaml.safe_dump(config, file)
    file.flush()
    return file.name
