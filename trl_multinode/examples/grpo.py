"""GRPO on many nodes, with model, dataset and rewards from the command line. Run this on every node, K = 0 to 3:

    trl-multinode grpo --accelerate_config 4node --machine_rank K --main_process_ip HOST0 \
        --model_name_or_path Qwen/Qwen3-4B --dataset_name trl-lib/DeepMath-103K \
        --reward_funcs accuracy_reward think_format_reward --output_dir outputs/qwen3-4b-math --push_to_hub

Model, dataset and reward default to those of the example in the docstring of TRL's `GRPOTrainer`. Launched again
unchanged, the script resumes from the last complete checkpoint in `output_dir`. It accepts every field of TRL's
`ScriptArguments`, `GRPOConfig` and `ModelConfig`, on the command line or in a YAML file (`--config FILE`).
`accelerate launch ... examples/grpo.py` runs the same script from a clone of the repository.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from datasets import DatasetDict, load_dataset, load_from_disk
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError
from trl.rewards import accuracy_reward, reasoning_accuracy_reward, think_format_reward

from trl_multinode import GRPOConfig, ModelConfig, ScriptArguments, TrlParser
from trl_multinode.errors import ConfigurationError
from trl_multinode.former_arguments import did_you_mean, nearest

# TRL's own examples have this small model
DEFAULTS: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "dataset_name": "trl-lib/DeepMath-103K",
    "reward_funcs": ["accuracy_reward"],
}
REWARDS = {
    reward.__name__: reward
    for reward in (accuracy_reward, reasoning_accuracy_reward, think_format_reward)
}
FILE_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass(kw_only=True)
class GRPOScriptArguments(ScriptArguments):
    """Arguments of the script beside those of [`GRPOConfig`] and TRL's `ModelConfig`."""

    dataset_name: str = field(
        default=DEFAULTS["dataset_name"],
        metadata={
            "help": "Name on the Hub, a .json, .jsonl or .parquet file, or the folder of a saved dataset."
        },
    )
    reward_funcs: list[str] = field(
        default_factory=lambda: [*DEFAULTS["reward_funcs"]],
        metadata={
            "help": f"Any of {', '.join(REWARDS)}, and `module.path:function` for one of your own."
        },
    )
    prompt_column: str | None = field(
        default=None,
        metadata={
            "help": "Column whose text becomes the user's message. Default: `prompt`, taken as it is."
        },
    )

    def __post_init__(self) -> None:
        # here, and not before the trainer, so that the check finds it too
        for name in self.reward_funcs:
            check_reward(name)


@dataclass
class GRPOModelArguments(ModelConfig):
    """TRL's `ModelConfig` with a default model."""

    model_name_or_path: str = field(
        default=DEFAULTS["model_name_or_path"],
        metadata={"help": "Name on the Hub, or the folder of a saved model."},
    )


class StrictParser(TrlParser):
    """Parser that rejects unknown arguments, from command line or config file, and names the nearest known one.

    It leaves arguments in `others` alone: `trl-multinode grpo` passes those on to `accelerate launch`.
    """

    others: Collection[str] = ()

    def __init__(self, *args: Any, **kwargs: Any):
        # argparse would take `--learning_rat` as an abbreviation, and a new field could change what `--num_gen` means
        super().__init__(*args, **kwargs, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, unknown = super().parse_known_args(args, namespace)
        self._refuse(unknown)
        return namespace, unknown

    def set_defaults_with_config(self, **config: Any) -> list[str]:
        unknown = super().set_defaults_with_config(**config)
        self._refuse(unknown)
        return unknown

    def error(self, message: str) -> NoReturn:
        # argparse's own method would also print the usage, hundreds of lines
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        sys.exit(2)

    def _refuse(self, unknown: list[str]) -> None:
        known = [f"--{each.name}" for kind in self.dataclass_types for each in fields(kind)]
        for name in [text.split("=")[0] for text in unknown if text.startswith("-")] or unknown:
            # accelerate takes `--machine-rank` too
            if re.sub(r"(?<=\w)-", "_", name) not in self.others:
                hint = did_you_mean(name, [*known, *self.others])
                self.error(f"{name} is unknown{hint or ', --help lists all arguments'}")


def check_reward(name: str) -> None:
    """Refuse a reward with an unknown name, or without the package that it imports in its first call."""
    if name not in REWARDS and ":" not in name:
        expected = f", expected {', '.join(REWARDS)} or `module.path:function`"
        raise ValueError(f"The reward {name!r} is unknown{nearest(name, REWARDS) or expected}")
    if (
        name in ("accuracy_reward", "reasoning_accuracy_reward")
        and importlib.util.find_spec("math_verify") is None
    ):
        raise ValueError(
            f"The reward {name!r} needs a package that is not installed: `pip install math-verify`."
        )


def load_reward(name: str) -> Callable[..., Any]:
    """Return a function of `REWARDS`, or import your own from the working directory or `PYTHONPATH`."""
    if name in REWARDS:
        return REWARDS[name]
    module, _, function = name.partition(":")
    sys.path.append(os.getcwd())
    found = import_module(module)
    if not hasattr(found, function):
        raise ValueError(f"{module} has no reward {function!r}{nearest(function, vars(found))}")
    return getattr(found, function)


def report_defaults(*configs: Any) -> None:
    """Print the default model, dataset and reward that a run uses. Only rank 0 prints."""
    used = []
    for config in configs:
        for name, default in DEFAULTS.items():
            if getattr(config, name, None) == default:
                words = default if isinstance(default, str) else " ".join(default)
                used.append(f"--{name} {words}")
    if used and os.environ.get("RANK", "0") == "0":
        print(f"[trl_multinode] no other value was given: {' '.join(used)}", flush=True)


def check_model(name: str, revision: str | None) -> None:
    """Refuse a model that has to come from the Hub if the Hub cannot be reached."""
    if Path(name).exists():
        return
    try:
        hf_hub_download(name, "config.json", revision=revision)
    except LocalEntryNotFoundError:
        raise unreachable("model", name, "model_name_or_path") from None


def unreachable(kind: str, name: str, setting: str) -> ConfigurationError:
    """Return the error for a model or a dataset that is on the Hub only."""
    command = f"hf download --repo-type {kind} {name} --local-dir FOLDER"
    return ConfigurationError(
        f"The {kind} {name!r} is not on this machine, and the Hub cannot be reached.",
        setting=setting,
        got=name,
        expected="a local folder",
        cure=f"Give a local folder: `{command}` where the Hub can be reached, then `--{setting} FOLDER`.",
    )


def load_splits(args: GRPOScriptArguments) -> DatasetDict:
    """Load all splits. A file, or a dataset that was saved without splits, becomes the training split."""
    path = Path(args.dataset_name)
    if path.suffix in FILE_FORMATS:
        files = {args.dataset_train_split: args.dataset_name}
        return load_dataset(
            FILE_FORMATS[path.suffix], data_files=files, streaming=args.dataset_streaming
        )
    if (path / "dataset_dict.json").is_file():
        return load_from_disk(path)
    if (path / "state.json").is_file():
        return DatasetDict({args.dataset_train_split: load_from_disk(path)})
    try:
        return load_dataset(
            args.dataset_name, name=args.dataset_config, streaming=args.dataset_streaming
        )
    except ConnectionError:
        raise unreachable("dataset", args.dataset_name, "dataset_name") from None


def split_of(splits: DatasetDict, name: str, flag: str) -> Any:
    """Return a split; `flag` is the argument that chooses it."""
    if name not in splits:
        choice = f"choose one with `{flag}`{nearest(name, splits)}"
        raise ValueError(f"The dataset has no split {name!r} but {list(splits)}: {choice}")
    return splits[name]


def with_prompts(dataset: Any, column: str | None) -> Any:
    """Return the dataset with a column `prompt`. Text of `column` becomes a conversation, as TRL's rewards expect."""
    needed, columns = column or "prompt", dataset.column_names
    if columns and needed not in columns:
        raise ValueError(
            f"The dataset has no column {needed!r} but {columns}: choose one with `--prompt_column`."
        )
    if column is None:
        return dataset
    return dataset.map(lambda row: {"prompt": [{"role": "user", "content": row[column]}]})


def make_parser(prog: str | None = None, arguments: type = GRPOScriptArguments) -> StrictParser:
    """Return the parser of the script's arguments."""
    return StrictParser((arguments, GRPOConfig, GRPOModelArguments), prog=prog)


def main() -> None:
    """Train with the arguments of the command line. Every rank calls it."""
    parser = make_parser()
    train(*parser.parse_args_and_config())


def train(
    script_args: GRPOScriptArguments,
    training_args: Any,
    model_args: Any,
    build: Callable[..., Any] | None = None,
) -> None:
    """Build the trainer, train from the last checkpoint if there is one, and save the model. Every rank calls it.

    Args:
        script_args ([`GRPOScriptArguments`]):
            Arguments of the script.
        training_args ([`GRPOConfig`]):
            Training arguments.
        model_args ([`GRPOModelArguments`]):
            Model and adapter.
        build (`Callable`, *optional*):
            Function that returns the trainer from the script's arguments and the keywords of [`GRPOTrainer`]. The
            scripts in `examples/recipes/` add a callback or a `rollout_func` there.
    """
    report_defaults(model_args, script_args)
    # 5 s: a mistyped argument is an error before that
    from trl_multinode import GRPOTrainer, get_peft_config, get_quantization_config

    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    rewards = [load_reward(name) for name in script_args.reward_funcs]
    splits, column = load_splits(script_args), script_args.prompt_column
    train = split_of(splits, script_args.dataset_train_split, "--dataset_train_split")
    test = None
    if training_args.eval_strategy != "no":
        test = split_of(splits, script_args.dataset_test_split, "--dataset_test_split")
    keywords = {
        "model": model_args.model_name_or_path,
        "reward_funcs": rewards,
        "args": training_args,
        "train_dataset": with_prompts(train, column),
        "eval_dataset": with_prompts(test, column) if test is not None else None,
        "quantization_config": get_quantization_config(model_args),
        "peft_config": get_peft_config(model_args),
    }
    check_model(model_args.model_name_or_path, model_args.model_revision)
    trainer = build(script_args, **keywords) if build else GRPOTrainer(**keywords)
    trainer.train(
        resume_from_checkpoint=training_args.resume_from_checkpoint or trainer.last_checkpoint()
    )
    trainer.save_model()  # on every rank, because ZeRO-3 gathers the weights
    if training_args.push_to_hub:
        # a local path is of no use in a model card
        is_local = Path(script_args.dataset_name).exists()
        trainer.push_to_hub(dataset_name=None if is_local else script_args.dataset_name)


if __name__ == "__main__":
    main()
