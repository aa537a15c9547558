"""Model and dataset of the script: whether they are in the cache of this node, and the sizes that follow from them."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from huggingface_hub import constants, get_token, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from .case import Case
from .facts import Fact, Finding, Results, size

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Model:
    """Files of a model on this node."""

    revision: str  # commit of a snapshot, or "local"
    num_bytes: int  # of the weights that are here
    element_bytes: int
    missing: tuple[str, ...]  # files that the index names and that are not here

    @property
    def parameters(self) -> int:
        """Return the number of parameters from the sizes of the files; 0 if some are missing."""
        return 0 if self.missing else self.num_bytes // self.element_bytes


def find_model(case: Case) -> Model | None:
    """Return the model of the script, or `None` if the script names none or this node does not have it."""
    name = case.launch.script.model
    return None if name is None else _model(name, case.launch.script.revision)


def all_slots_bytes(case: Case) -> int:
    """Return the bytes of a slot for each bucket: those of the model in the engines' dtype.

    They are 0 if the run has two slots, or if this node does not have the whole model.
    """
    model = find_model(case) if case.wants_all_slots else None
    in_half = case.value("bf16", True) or case.value("fp16")
    return 0 if model is None else (2 if in_half else 4) * model.parameters


@cache
def _model(name: str, revision: str | None) -> Model | None:
    folder = _snapshot(name, "model", revision)
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        index = folder / INDEX
        weights = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    except (OSError, ValueError, KeyError):
        return None
    files = [*folder.glob("*.safetensors")] or [*folder.glob("pytorch_model*.bin")]
    here = {file.name: file.stat().st_size for file in files if file.exists()}
    # a model of one file has no index
    missing = {*weights.values()} - here.keys() if here or weights else {"model.safetensors"}
    dtype = config.get("dtype") or config.get("torch_dtype")
    return Model(
        revision="local" if Path(name).is_dir() else folder.name,
        num_bytes=sum(here.values()),
        element_bytes=4 if dtype == "float32" else 2,
        missing=tuple(sorted(missing)),
    )


def _snapshot(name: str, kind: str, revision: str | None) -> Path | None:
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(
            snapshot_download(name, repo_type=kind, revision=revision, local_files_only=True)
        )
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def examine_model(case: Case) -> Results:
    """Yield the place of the model, and a finding if it must be downloaded or is incomplete."""
    name, model = case.launch.script.model, find_model(case)
    if name is None:
        yield Fact("model", "not known: name the script and its arguments")
    elif model is None:
        yield Fact("model", f"{name}: not here", same=True)
        yield _absent(case, "model", name, f"hf download {name}")
    else:
        revision = model.revision if model.revision == "local" else f"revision {model.revision[:8]}"
        yield Fact("model", f"{name}, {size(model.num_bytes)} ({revision})", same=True)
        if model.missing:
            yield Finding(
                "error" if model.revision == "local" or _offline(case) else "warning",
                "model",
                f"{name} is incomplete on this node: {len(model.missing)} file(s) missing, as {model.missing[0]}",
                f"run `hf download {name}` once on this node",
            )


def examine_dataset(case: Case) -> Results:
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


def examine_hub(case: Case) -> Results:
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
