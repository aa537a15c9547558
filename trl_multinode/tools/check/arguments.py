"""Arguments of the training script, read by the script's own parser, and the problems that it finds."""

import ast
from contextlib import redirect_stderr
from dataclasses import fields, replace
from functools import partial
from io import StringIO
from typing import Any

from ...former_arguments import did_you_mean
from ...node_settings import ignored_settings, is_node_mode
from ..migrate import fresh_starts
from .command_line import batch_of, given_fields
from .launch import Batch, Engines, Launch, Problem, Script, safely
from .script import (
    ParserCall,
    as_launched,
    build_parser,
    find_call,
    literal_values,
    read_script,
    trainer_of_trl,
)

CURE = "correct the arguments of the script; its `--help` lists them"


class Refused(Exception):
    """A script's parser ended the program."""


def read_arguments(launch: Launch, given: Script) -> tuple[Script, list[Problem]]:
    """
    Pass the arguments of a script through its own parser, and build its configs without a device.

    Args:
        launch ([`Launch`]):
            Launch with script and arguments.
        given ([`Script`]):
            Arguments among the check's own flags, for a script without such a parser.

    Returns:
        `tuple[Script, list[Problem]]`: the arguments, and the problems that parser and data classes find.
    """
    args = launch.args
    name, words = args.training_script, args.training_script_args
    if args.no_python:
        return given, []
    script = replace(given, name=name)
    with as_launched(name, words, args.module):
        try:
            tree, path = read_script(name, args.module)
        except (OSError, SyntaxError, ImportError, ValueError) as error:
            return given, [
                Problem(
                    f"cannot read the script `{name}` ({error})",
                    "correct its path; a relative one begins in the folder in which you launch",
                )
            ]
        foreign = trainer_of_trl(tree)
        script = replace(script, trainer_of_trl=foreign, begins_anew=bool(fresh_starts(tree)))
        if (call := find_call(tree)) is None:
            script = replace(script, node_mode=foreign is None)
            return _without_parser(script, tree, words), []
        try:
            parser = build_parser(tree, call, path)
        except Exception as error:  # the script's own code
            note = f"the arguments of `{name}` are not checked, because its parser cannot be built alone"
            return replace(script, notes=(f"{note} ({type(error).__name__}: {error})",)), []
        try:
            values, unknown = _values(parser, call, words)
        except Refused as refused:
            if not refused.args:
                return replace(script, notes=(f"`{name}` would print its help",)), []
            return script, [_stop(name, refused)]
        except Exception as error:  # of the parser: an unreadable config file, an unknown key in it
            return script, [_stop(name, error)]
        return _read(replace(launch, script=script), parser.dataclass_types, values, unknown)


def _without_parser(script: Script, tree: ast.Module, words: list[str]) -> Script:
    """Read the batch of a script that has no parser: from its words, and from its config call."""
    literal = literal_values(tree, {one.name for one in fields(Batch)})
    known = script.batch or (None if literal is None else Batch(**literal))
    batch = batch_of(known, words)
    note = (
        f"`{script.name}` has no `TrlParser`: of its arguments only those of the batch are checked"
    )
    if literal is not None:
        note += ", as its config call has them"
    elif batch is None:
        note = f"`{script.name}` has no `TrlParser`, and no config call with its batch in numbers: its arguments are "
        note += "not checked; pass the batch before it, as in `--per_device_train_batch_size 8 --num_generations 8`"
    return replace(script, batch=batch, notes=(note,))


def _stop(name: str | None, error: Exception) -> Problem:
    return Problem(f"`{name}` stops: {error}", CURE)


def _read(
    launch: Launch, kinds: list[Any], values: dict[str, Any], unknown: list[str]
) -> tuple[Script, list[Problem]]:
    """Read the configs of a script from its parsed values."""
    script = launch.script
    flags = [f"--{one.name}" for kind in kinds for one in fields(kind)]
    problems = [
        Problem(f"`{script.name}` has no argument {word}{did_you_mean(word, flags)}", CURE)
        for word in unknown
    ]
    script = replace(script, notes=(f"`{script.name}` has no training config among its arguments",))
    for kind in kinds:
        names = {one.name for one in fields(kind) if one.init}
        given = {name: value for name, value in values.items() if name in names}
        if any(base.__name__ == "TrainingArguments" for base in kind.__mro__):
            config = object.__new__(kind)
            vars(config).update(given)
            script = _script(script, config, values)
            # here, because the script's parser has loaded TRL by now
            from .training_config import config_problems

            found = partial(config_problems, config)
            more, unchecked = safely(found, replace(launch, script=script), "the training config")
            problems += more
            script = replace(script, notes=(*script.notes, *unchecked))
            continue
        try:
            kind(**given)
        except Exception as error:  # the script's own code
            problems.append(_stop(script.name, error))
    return script, problems


def _values(parser: Any, call: ParserCall, words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the parsed values by name, and the arguments that the script does not have."""
    found: dict[str, Any] = {}

    def capture(
        args: list[str] | None = None, return_remaining_strings: bool = False, **_: Any
    ) -> tuple:
        namespace, rest = parser.parse_known_args(args)
        found.update(values=vars(namespace), unknown=[] if return_remaining_strings else rest)
        return (namespace, rest) if return_remaining_strings else (namespace,)

    parser.parse_args_into_dataclasses = capture  # it would build the configs
    parser.print_usage = parser.print_help = lambda *_: None  # hundreds of lines
    said = StringIO()
    try:
        with redirect_stderr(said):
            getattr(parser, call.method)(words, **call.keywords)
    except SystemExit as stop:
        raise Refused(
            *([said.getvalue().strip().rpartition("error: ")[2]] if stop.code else [])
        ) from stop
    flags = [word.split("=")[0] for word in found["unknown"] if word.startswith("-")]
    return found["values"], flags or found["unknown"]


def _script(script: Script, config: Any, values: dict[str, Any]) -> Script:
    batch = given_fields(Batch, config)
    node_mode = hasattr(config, "vllm_mode") and is_node_mode(config)
    node_mode = node_mode and script.trainer_of_trl is None
    return replace(
        script,
        batch=Batch(**batch) if "num_generations" in batch else None,
        engines=Engines(**given_fields(Engines, config)),
        model=values.get("model_name_or_path"),
        revision=values.get("model_revision"),
        node_mode=node_mode,
        use_cpu=bool(getattr(config, "use_cpu", False)),
        ignored=tuple(ignored_settings(config)) if node_mode else (),
        notes=(),
        values=values,
    )
