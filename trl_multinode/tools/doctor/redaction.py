"""Removal of secrets from a report, and of names from a block that is meant for an issue."""

import getpass
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...wire.secret_names import HIDDEN, is_secret_name, without_forms

SHORTEST = 6  # characters of a variable that is hidden wherever it occurs; "true" is no secret
WANDB_KEY = re.compile(r"\b[0-9a-f]{40}\b")  # a commit has this form too
VALUE = r"((?![(-])[^\s`'\",;]{4,})"
NAMED = (re.compile(r"([\w-]+=)" + VALUE), re.compile(r"(--[\w-]+\s)" + VALUE))  # in a command line
IPV4 = re.compile(r"(?<![\d.])(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)")


def hide_secrets(text: str, environ: Mapping[str, str]) -> str:
    """Return a text without tokens: neither values of secret variables, nor what looks or is named like one."""
    values = {
        value for name, value in environ.items() if is_secret_name(name) and len(value) >= SHORTEST
    }
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = WANDB_KEY.sub(HIDDEN, without_forms(text))
    for named in NAMED:
        text = named.sub(
            lambda found: f"{found[1]}{HIDDEN}" if is_secret_name(found[1]) else found[0], text
        )
    return text


def hide_secrets_in(value: Any, environ: Mapping[str, str]) -> Any:
    """Return a document of lists and dictionaries without tokens in its texts."""
    if isinstance(value, dict):
        return {key: hide_secrets_in(one, environ) for key, one in value.items()}
    if isinstance(value, list):
        return [hide_secrets_in(one, environ) for one in value]
    return hide_secrets(value, environ) if isinstance(value, str) else value


def hide_names(text: str, hosts: Iterable[str]) -> str:
    """Return a text in which hosts, addresses, the home folder and the user have other names, each always the same."""
    addresses: dict[str, str] = {}
    text = IPV4.sub(lambda found: addresses.setdefault(found[0], f"address{len(addresses)}"), text)
    for number, host in enumerate(dict.fromkeys(filter(None, hosts))):
        text = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", f"host{number}", text)
    if (home := str(Path.home())) != "/":
        text = text.replace(home, "~")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return text
    return re.sub(rf"(?<![\w-]){re.escape(user)}(?![\w-])", "user", text)
