"""Build DeepSpeed's config with accelerate's own plugin, as every rank does, and find out why it would stop."""

import argparse
import json
import warnings
from typing import Any

from accelerate.utils import DeepSpeedPlugin, patch_environment

from .launch import DeepSpeed, Problem

FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"  # keys of accelerate's file, which its plugin compares with the JSON file


def read_deepspeed(
    args: argparse.Namespace, environment: dict[str, str]
) -> tuple[DeepSpeed | None, list[Problem]]:
    """Read DeepSpeed's config from the environment that accelerate would give to the ranks.

    Args:
        args (`argparse.Namespace`):
            Arguments of `accelerate launch`, merged with the file.
        environment (`dict[str, str]`):
            Environment of the ranks.

    Returns:
        `tuple[DeepSpeed | None, list[Problem]]`: the config, `None` if it cannot be read, and the problems.
    """
    path, problems = args.deepspeed_config_file, []
    environment = {
        name: value for name, value in environment.items() if name.startswith("ACCELERATE_")
    }
    if path and (problem := _unreadable(path)):
        return None, [problem]
    if path and (
        twice := [key for key in environment[FIELDS].split(",") if not _accepts(key, environment)]
    ):
        what = f"every rank stops, because `{path}` must hold these keys instead (got {', '.join(twice)} in the file"
        problems = [
            Problem(f"{what} of accelerate)", f"delete them there, and set them in `{path}`")
        ]
    try:
        with (
            patch_environment(**{**environment, FIELDS: ""}),
            warnings.catch_warnings(action="ignore"),
        ):
            plugin = DeepSpeedPlugin()
    except Exception as error:  # ValueError, KeyError and others, by the fault
        return None, [
            *problems,
            Problem(
                f"every rank stops at DeepSpeed's config ({type(error).__name__}: {error})",
                f"correct `{path or 'deepspeed_config:'}`",
            ),
        ]
    return DeepSpeed(plugin.deepspeed_config, path), problems


def _unreadable(path: str) -> Problem | None:
    cure = "correct `deepspeed_config_file`, a path from the folder in which you launch"
    try:
        with open(path, encoding="utf-8") as stream:
            config: Any = json.load(stream)
    except (OSError, ValueError) as error:
        return Problem(f"cannot read `deepspeed_config_file` `{path}` ({error})", cure)
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        return Problem(
            f"`{path}` is not a DeepSpeed config (got no section `zero_optimization`, expected one with `stage`)",
            'write `"zero_optimization": {"stage": 3}`',
        )
    return None


def _accepts(key: str, environment: dict[str, str]) -> bool:
    """Return whether accelerate accepts a key of its own file beside a JSON file."""
    try:
        with patch_environment(**{**environment, FIELDS: key}):
            DeepSpeedPlugin()
    except ValueError as error:
        return "will be ignored" not in str(error)
    return True
