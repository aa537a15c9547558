"""Options that all kinds of job files have, and the values of the placeholders that all templates may use."""

import argparse
import re
import shlex
from itertools import zip_longest

from ...wire.secret_names import has_secret_form, is_secret_name
from .job import Job

Parser = argparse.ArgumentParser
Options = argparse.Namespace


def add_options(parser: Parser) -> None:
    """Add the options of all kinds."""
    parser.add_argument("file", help="config file of `accelerate launch`, as `trl-multinode config 4x8` writes it")
    parser.add_argument(
        "--script",
        required=True,
        type=_script,
        help="training script and its arguments, as in --script 'train.py --max_steps 100'",
    )
    parser.add_argument("--out", metavar="FILE", help="file to write; it must not exist (default: standard output)")
    parser.add_argument("--name", default="grpo", type=_name, help="name of the job (default: grpo)")
    parser.add_argument(
        "--gpus_per_node", "--gpus-per-node", type=_number, help="GPUs of a node (default: 8, none with use_cpu)"
    )
    parser.add_argument(
        "--grace",
        type=_number,
        metavar="S",
        help="seconds for the end of the step and a checkpoint after a signal (default: the script's "
        "--preemption_grace, else 600)",
    )
    parser.add_argument(
        "--timeout", type=_number, default=600, metavar="S", help="longest wait of the roll-call (default: 600)"
    )
    parser.add_argument(
        "--env", action="append", default=[], type=_variable, metavar="NAME=VALUE", help="variable of every node"
    )
    parser.add_argument(
        "--setup",
        default="",
        metavar="COMMAND",
        help="shell command that every node runs first, as in --setup 'source .venv/bin/activate'",
    )


def common_values(job: Job, options: Options, command: str) -> dict[str, str]:
    """Return the placeholders that every template may use.

    Args:
        job ([`Job`]):
            Launch.
        options (`argparse.Namespace`):
            Options of the command line.
        command (`str`):
            Command line that writes the file, for its first lines.
    """
    exports = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.launcher_s), **dict(options.env)}
    return {
        "command": command.replace("\n", " "),
        "name": options.name,
        "summary": job.summary(),
        "nodes": str(job.nodes),
        "ranks": str(job.ranks),  # of a node
        "gpus": str(job.gpus),  # of a node
        "port": str(job.port),
        "config": shlex.quote(str(job.config)),
        "config_name": job.config.name,
        "script": job.script,
        "timeout": str(job.timeout_s),  # of the roll-call
        "grace": str(job.grace_s),  # for a checkpoint after a signal
        "launcher_s": str(job.launcher_s),  # after which torchrun kills the ranks
        "kill_s": str(job.kill_s),  # after which the scheduler may kill
        "setup": options.setup,
        "exports": "\n".join(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
        "launch": job.launch,  # roll-call and `accelerate launch`, both with the shell variable `$flags`
    }


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected up to 40 of a-z, 0-9 and '-', a letter first")
    return text


def _number(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number")
    return int(text)


def _script(text: str) -> str:
    """Refuse arguments with a secret: the file has them for all who may read it, and so has `ps` on every node."""
    try:
        words = shlex.split(text)
    except ValueError:
        return text  # which the check of the launch refuses
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and is_secret_name(flag) and (value if equals else not following.startswith("-")):
            raise argparse.ArgumentTypeError(f"`{flag}` would put a secret into the file. {_IN_PRIVATE}")
        if has_secret_form(word):
            raise argparse.ArgumentTypeError(f"an argument has the form of a token. {_IN_PRIVATE}")
    return text


_IN_PRIVATE = (
    "Keep it in a file on the nodes that only you may read, as in `export HF_TOKEN=...`, and use "
    "`--setup 'source ~/secrets.env'`."
)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\n" in value:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected NAME=VALUE in one line")
    if value and (is_secret_name(name) or has_secret_form(value)):
        raise argparse.ArgumentTypeError(f"`{name}` would put a secret into the file. {_IN_PRIVATE}")
    return name, value
