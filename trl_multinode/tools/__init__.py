"""The command `trl-multinode`, also `python -m trl_multinode.tools`. A sub-command loads only what it needs."""

import os
import signal
import sys
from difflib import get_close_matches
from importlib import import_module

USAGE = """\
usage: trl-multinode COMMAND ...

  migrate  print the changes that a script for TRL needs, as a diff
  config   write a config file of `accelerate launch` for a number of nodes and GPUs, as in `trl-multinode config 4x8`
  check    report what a config file would start on a node, and every problem with its cure; starts nothing
  launch   the same line on every node: check, meet the other nodes, name missing ones, then accelerate launch
  doctor   examine the launch, this node (--level node) or all nodes and the links between them (--level cluster)
  clean    remove what killed runs left on this machine: folders and shared memory
  plan     report from a model's config which split of a node's GPUs fits and is fastest; starts nothing
  engines  start engines on this node for a run on other nodes, and serve one run after the other
  grpo     train with GRPO: model, dataset and rewards from the command line, as `trl grpo`
  render   write a job file for SLURM, Kubernetes, ssh or SkyPilot; submits nothing
  timeline show what each rank and engine of a run did when: a table, a trace, a page

`trl-multinode COMMAND --help` lists the arguments, `trl-multinode --version` prints the version."""


# Command -> module of this folder whose `main(argv)` returns the exit code
COMMANDS = {
    "config": "config",
    "check": "check.report",
    "launch": "launch.command",
    "clean": "clean",
    "doctor": "doctor.report",
    "plan": "plan.command_line",
    "engines": "engines",
    "grpo": "grpo",
    "render": "render.command",
    "timeline": "timeline.command",
    "migrate": "migrate",
}


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command.

    Args:
        argv (`list[str]`, *optional*):
            Arguments without the command's own name; by default those of the process.

    Returns:
        `int`: exit status of the sub-command, 2 for an unknown one, 141 if the reader of its output has ended.
    """
    try:
        try:
            return _run((sys.argv[1:] if argv is None else argv) or ["--help"])
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        # Python flushes the rest when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(argv: list[str]) -> int:
    name, *rest = argv
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    if name == "--version":
        from .. import __version__

        print(f"trl-multinode {__version__}")
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(COMMANDS)}"
        print(f"trl-multinode: there is no command {name!r}, {hint}", file=sys.stderr)
        return 2
    return import_module(f".{COMMANDS[name]}", __name__).main(rest)
