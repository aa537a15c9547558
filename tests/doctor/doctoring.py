"""A launch and a model for the tests of the doctor, and its facts and findings."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import yaml
from safetensors.numpy import save_file

from trl_multinode.tools.check.launch import Engines, Launch, Script
from trl_multinode.tools.doctor.case import Case
from trl_multinode.tools.doctor.facts import Fact, Finding


def case(environ: dict[str, str] | None = None, **changes: Any) -> Case:
    """Two nodes of 7 training GPUs and one engine; `changes` are arguments of the script, or known fields."""
    nodes, gpus = changes.pop("nodes", 2), changes.pop("gpus", 8)
    script = Script(
        name="train.py",
        engines=changes.pop("engines", Engines()),
        model=changes.pop("model", None),
        values=changes.pop("values", {}),
    )
    args = argparse.Namespace(
        num_machines=nodes,
        machine_rank=changes.pop("rank", 0),
        main_process_ip=changes.pop("address", "127.0.0.1"),
        main_process_port=29500,
        use_deepspeed=True,
        nondefault=[],
    )
    ranks, table = changes.pop("ranks", 7), changes.pop("table", ())
    launch = Launch(
        args=args,
        file={"distributed_type": "DEEPSPEED"},
        launcher="deepspeed_launcher",
        ranks_per_node=ranks,
        visible=[str(gpu) for gpu in range(gpus)] if gpus else None,
        gpus_per_node=gpus,
        port=29500,
        script=script,
        table=table,
    )
    assert not changes, changes
    return Case(launch, environ or {})


def results(examination: Callable, of: Case) -> tuple[dict[str, str], list[Finding]]:
    """Facts by name, and findings."""
    found = list(examination(of))
    facts = {one.name: one.value for one in found if isinstance(one, Fact)}
    return facts, [one for one in found if isinstance(one, Finding)]


def model_in(folder: Path, megabytes: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    save_file({"weight": numpy.zeros(megabytes << 20, numpy.uint8)}, folder / "model.safetensors")
    return folder


def config_in(folder: Path, **changes) -> str:
    """One node without a GPU, which has no problem."""
    path = folder / "config.yaml"
    zero = {
        "deepspeed_multinode_launcher": "standard",
        "zero_stage": 3,
        "zero3_save_16bit_model": True,
    }
    keys = {"num_machines": 1, "num_processes": 1, "distributed_type": "DEEPSPEED", "use_cpu": True}
    path.write_text(
        yaml.safe_dump(keys | {"mixed_precision": "no", "deepspeed_config": zero} | changes)
    )
    return str(path)
