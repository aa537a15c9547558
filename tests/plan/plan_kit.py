"""Configs and short cuts of the tests of `trl-multinode plan`."""

from functools import cache
from pathlib import Path

from trl_multinode.tools.plan.command_line import own_parser, task_of
from trl_multinode.tools.plan.layouts import Layout, colocated_layouts, split_layouts
from trl_multinode.tools.plan.model_size import ModelSize, model_size
from trl_multinode.tools.plan.task import Task

CONFIGS = Path(__file__).parent / "configs"
# Billions of parameters of the public models with these configs (Qwen2.5, Qwen3, Llama 3)
PARAMETERS = {
    "0.5B": 0.494,
    "7B": 7.616,
    "8B": 8.191,
    "14B": 14.768,
    "32B": 32.762,
    "70B": 70.554,
    "235B": 235.094,
}


@cache
def size(name: str) -> ModelSize:
    return model_size(str(CONFIGS / f"{name}.json"))


def task(name: str, flags: str = "--nodes 4x8 --completion 4096 --rows 256") -> Task:
    return task_of(own_parser().parse_args([str(CONFIGS / f"{name}.json"), *flags.split()]))[0]


def layouts(plan: Task) -> dict[tuple[str, int], Layout]:
    """Layouts of all splits and of colocation, by name and tensor-parallel degree."""
    gpus = plan.cluster.gpus
    every = [
        one
        for reserved in (1, 2, 4)
        for one in split_layouts(plan, (gpus - reserved,) * plan.cluster.nodes)
    ]
    return {
        (one.name, one.engine.tensor_parallel): one for one in (*every, *colocated_layouts(plan))
    }
