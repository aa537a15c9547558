"""Model and dataset of the script: whether they are in the cache of this node, and the sizes that follow from them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_token, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from .case import Case
from .facts import Fact, Finding, size

INDEX = "model.safetensors.index.json"
DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Model:
    """Files of a model on this node."""

    folder: Path
    revision: str  # commit of a snapshot, or "local"
    config: dict[str, Any]
    files: tuple[Path, ...]  # of the weights that are here
    missing: tuple[str, ...]  # files that the index names and that are not here

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def parameters(self) -> int:
        """Return the number of parameters from the sizes of the files; 0 if some are missing."""
        return 0 if self.missing else self.num_bytes // DTYPES.get(self._dtype, 2)

    @property
    def _dtype(self) -> str:
        return str(self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16")


def find_model(case: Case) -> Model | None:
    """Return the model of the script, or `None` if the script names none or this node does not have it."""
    name = case.launch.script.model
    return None if name is None else _model(name, case.launch.script.revision)


@cache
def _model(name: str, revision: str | None) -> Model | None:
    folder = _snapshot(name, "model", revision)
    if folder is None or not (folder / "config.json").is_file():
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        index = folder / INDEX
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    except (OSError, ValueError, KeyError):
        return None
    files = [*folder.glob("*.safetensors")] or [*folder.glob("pytorch_model*.bin")]
    here = {file.name: file for file in files if file.exists()}
    missing = sorted(names - here.keys()) if names else ([] if here else ["model.safetensors"])
    commit = "local" if Path(name).is_dir() else folder.name
    return Model(folder, commit, config, tuple(here.values()), tuple(missing))


def _snapshot(name: str, kind: str, revision: str | None) -> Path | None:
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, repo_type=kind, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def examine_model(case: Case) -> Iterator[Fact | Finding]:
    """Yield the place of the model, and a finding if it must be downloaded or is incomplete."""
    name, model = case.launch.script.model, find_model(case)
    if name is None:
        yield Fact("model", "not known: name the script and its arguments")
    elif model is None:
        yield Fact("model", f"{name}: not here", same=True)
        yield _absent(case, "model", name, f"hf download {name}")
    else:
        yield Fact("model", f"{name}, {size(model.num_bytes)} ({_short(model.revision)})", same=True)
        if model.missing:
            severity = "error" if model.revision == "local" or _offline(case) else "warning"
            yield Finding(
                severity,
                "model",
                f"{name} is incomplete on this node: {len(model.missing)} file(s) missing, as {model.missing[0]}",
                f"run `hf download {name}` once on this node",
            )


def _short(revision: str) -> str:
    return revision if revision == "local" else f"revision {revision[:8]}"


def examine_dataset(case: Case) -> Iterator[Fact | Finding]:
    """Yield the place of the dataset, and a finding if it must be downloaded."""
    name = case.value("dataset_name")
    if name is None:
        yield Fact("dataset", "not known: the script's arguments name none")
    elif Path(name).exists():
        yield Fact("dataset", f"{name} (local)", same=True)
    elif _prepared(name) or _snapshot(name, "dataset", None) is not None:
        yield Fact("dataset", f"{name}, in the cache", same=True)
    else:
        yield Fact("dataset", f"{name}: not here", same=True)
        yield _absent(case, "dataset", name, f"hf download --repo-type dataset {name}")


def _prepared(name: str) -> bool:
    """Return whether the library datasets has prepared this dataset on this node."""
    from datasets import config

    return (Path(config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir()


def _absent(case: Case, kind: str, name: str, download: str) -> Finding:
    if _offline(case):
        return Finding(
            "error",
            kind,
            f"the {kind} {name} is not on this node, and HF_HUB_OFFLINE forbids its download",
            f"run `{download}` without HF_HUB_OFFLINE, or correct the name",
        )
    return Finding(
        "warning",
        kind,
        f"the {kind} {name} is not in the cache of this node, so its first rank downloads it",
        f"run `{download}` once per node, or share HF_HOME",
    )


def _offline(case: Case) -> bool:
    return case.environ.get("HF_HUB_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES


def examine_hub(case: Case) -> Iterator[Fact | Finding]:
    """Yield whether the Hub can be used with a token. The token itself is never part of a report."""
    token = "a token is set" if get_token() else "no token"
    yield Fact("Hub", f"{token}{', offline' if _offline(case) else ''}", same=True)
    if case.value("push_to_hub") and not get_token():
        yield Finding(
            "error" if case.rank == 0 else "warning",
            "Hub",
            "`push_to_hub` is set, without a token",
            "run `hf auth login` on node 0, or set HF_TOKEN",
        )
