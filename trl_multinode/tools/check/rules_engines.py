"""Rules for the engines: GPUs that are left over, tensor parallelism and attention heads."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import try_to_load_from_cache

from ...errors import ConfigurationError
from ...run.gpu_variables import gpu_variable
from ...run.topology import EngineDevices, assign_engines, idle_gpus
from .launch import Launch, Problem, Script, problem_of
from .reading import rank_variables


def engine_problems(launch: Launch) -> Iterator[Problem]:
    """Yield a problem if a node's engines do not fit its GPUs, with the message of the run itself."""
    engines, gpus = launch.script.engines, launch.visible
    size, count = engines.size, engines.num_engines
    try:
        _assigned(launch)
    except ConfigurationError as error:
        assert gpus is not None
        problem = problem_of(error)
        left = [free for free in range(size * (count or 1), len(gpus)) if free % size == 0]
        if left and not engines.vllm_devices:
            ranks = len(gpus) - left[0]
            more = f" {launch.setting(ranks)} leaves {left[0]} GPUs."
            problem = Problem(problem.what, problem.cure + more)
        yield problem


def unused_problems(launch: Launch) -> Iterator[Problem]:
    """Yield a problem if a node reserves GPUs although the script starts no engines there."""
    script, reserved = launch.script, launch.reserved
    if script.node_mode or not reserved or _has_other_engines(script):
        return
    why, cure = "node mode is off", "set `--use_vllm true --vllm_mode node`"
    if trainer := script.trainer_of_trl:
        why = f"`{script.name}` imports `{trainer}` from TRL"
        cure = f"write `from trl_multinode import {trainer}`"
    yield Problem(
        f"GPU {', '.join(reserved)} would be idle: {why} (got {len(reserved)} idle, expected 0)",
        f"{cure}, or write {launch.setting(launch.started + len(reserved))}, to train there",
    )


def _has_other_engines(script: Script) -> bool:
    """Return whether engines that this library does not start may run on reserved GPUs, as TRL's server."""
    mode = script.values.get("vllm_mode")
    return bool(script.values.get("use_vllm")) and mode not in ("node", "colocate")


def engine_notes(launch: Launch) -> Iterator[str]:
    """Yield a note on GPUs of this node that would be idle."""
    if launch.reserved and _has_other_engines(launch.script):
        yield f"GPU {', '.join(launch.reserved)} would be idle, unless TRL's server for `vllm_mode` server runs there"
    try:
        devices = _assigned(launch)
    except ConfigurationError:  # `engine_problems` reports it
        return
    if devices is not None and (idle := idle_gpus(devices)):
        yield idle


def _assigned(launch: Launch) -> EngineDevices | None:
    """Return the GPUs of this node's engines as the run would assign them; `None` if it has none to assign.

    Without GPUs any number of engines runs, and `device_problems` reports that none is left.
    """
    engines, gpus = launch.script.engines, launch.visible
    if (
        not gpus
        or not launch.script.node_mode
        or not (engines.vllm_devices or launch.started < len(gpus))
    ):
        return None
    topology = launch.topology(launch.args.machine_rank)
    size, count = engines.size, engines.num_engines
    environment = {gpu_variable(rank_variables(launch.args.gpu_ids)): ",".join(gpus)}
    return assign_engines(topology, len(gpus), engines.vllm_devices, count, size, environment)


def head_problems(launch: Launch) -> Iterator[Problem]:
    """Yield a problem if an engine's GPUs cannot share the attention heads of the model evenly."""
    size = launch.script.engines.size
    heads = getattr(model_config(launch), "num_attention_heads", None)
    if launch.script.node_mode and heads and heads % size:
        fits = [str(n) for n in range(1, size + 1) if heads % n == 0 and n & (n - 1) == 0]
        yield Problem(
            f"`vllm_tensor_parallel_size` does not divide the attention heads of {launch.script.model} (got {size},"
            f" expected a divisor of {heads})",
            f"pass `--vllm_tensor_parallel_size` {' or '.join(fits)}",
        )


def model_config(launch: Launch) -> SimpleNamespace | None:
    """Return the config of the language model, if this machine has it; nothing is downloaded."""
    name = launch.script.model
    if name is None:
        return None
    path: Any = Path(name) / "config.json"
    try:
        if not path.is_file():
            path = try_to_load_from_cache(name, "config.json", revision=launch.script.revision)
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):  # not a name on the Hub, or not in the cache
        return None
    return SimpleNamespace(**(config.get("text_config") or config))
