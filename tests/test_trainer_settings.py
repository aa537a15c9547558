"""Settings of all trainers in node mode: names, defaults that are TRL's, and what is refused with a way out."""

import inspect
import os
import subprocess
import sys

import pytest
from refusals import refused
from test_contract import KEYWORDS, VERSION, parameters
from trl.generation.vllm_generation import VLLMGeneration
from waiting import HANG_S

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import trl_multinode
from trl_multinode.call_checks import check_dataset
from trl_multinode.config import NodeFields
from trl_multinode.node_settings import is_node_mode
from trl_multinode.node_trainer import NodeTrainer
from trl_multinode.rollouts.generation import NodeGeneration
from trl_multinode.trainer import MultiNodeGRPOTrainer

TRAINERS = ["RLOO", "Distillation", "SDFT", "SDPO", "GOLD", "IWOPD", "GMPO", "ServerDistillation"]
# here, because vLLM sets variables
CLASSES = {name: getattr(trl_multinode, f"{name}Trainer") for name in TRAINERS}
# without a default
REQUIRED = {"ServerDistillation": {"teacher_model_server_url": "http://teacher:8000"}}
OTHER_MODES = {
    "server_base_url",
    "server_host",
    "server_port",
    "group_port",
    "server_timeout",
    "enable_sleep_mode",
}
# NodeHost reads the fields, which checks need earlier
FROM_ARGS = {
    "tensor_parallel_size",
    "gpu_memory_utilization",
}
FOR_THE_HOST = {"max_model_length", "max_num_seqs", "model_impl", "trust_remote_code"}


def ours(name: str) -> type:
    return CLASSES[name]


def config(name: str, tmp_path, **fields):
    kind = getattr(trl_multinode, f"{name}Config")
    return kind(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        **REQUIRED.get(name, {}),
        **fields,
    )


def test_every_keyword_is_read_here_or_left_out_on_purpose():
    ours = parameters(NodeGeneration.__init__)
    assert ours["engine_keywords"].kind is inspect.Parameter.VAR_KEYWORD
    read = set(ours) - {"host", "engine_keywords"} | {"mode"}  # _build_generation takes `mode`
    assert "mode" in inspect.signature(MultiNodeGRPOTrainer._build_generation).parameters
    assert read | FOR_THE_HOST | OTHER_MODES | FROM_ARGS == KEYWORDS
    assert not read & (FOR_THE_HOST | OTHER_MODES | FROM_ARGS)


def test_settings_have_trls_defaults():
    ours, theirs = parameters(NodeGeneration.__init__), parameters(VLLMGeneration.__init__)
    pairs = {name: (ours[name].default, theirs[name].default) for name in set(ours) & KEYWORDS}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    assert pairs and not differing, f"{VERSION} has other defaults; see generation.py"


@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer_has_trls_name_and_node_modes_defaults(name, tmp_path):
    assert ours(name) is getattr(trl_multinode, f"MultiNode{name}Trainer") and issubclass(
        ours(name), NodeTrainer
    )
    assert ours(name)._tag_names == [*ours(name)._trl._tag_names, "trl-multinode"]
    args = config(name, tmp_path)
    assert (
        isinstance(args, NodeFields)
        and is_node_mode(args)
        and args.vllm_gpu_memory_utilization is None
    )
    theirs = ours(name)._config.__mro__
    theirs = next(kind for kind in theirs if kind.__module__.startswith("trl."))
    given = config(name, tmp_path, vllm_mode="colocate").vllm_gpu_memory_utilization
    # GOLD has 0.9
    assert given == theirs.__dataclass_fields__["vllm_gpu_memory_utilization"].default


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRAINERS)
def test_engine_kwargs_may_be_json_and_trls_own_dicts_too(name, tmp_path):
    args = config(
        name,
        tmp_path,
        engine_kwargs='{"max_num_seqs": 1}',
        model_init_kwargs='{"dtype": "float32"}',
    )
    assert args.engine_kwargs == {"max_num_seqs": 1} and args.model_init_kwargs == {
        "dtype": "float32"
    }


REFUSED = {
    "max_staleness": 1, "micro_batch_tokens": 4096, "logprob_divergence_limit": 0.5,
}  # fmt: skip
WORKS = {
    "RLOO": ["logprob_divergence_limit"],
    "GMPO": ["logprob_divergence_limit", "micro_batch_tokens"],
}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_setting_without_a_meaning_for_the_trainer_is_refused_with_a_way_out(name, tmp_path):
    for field, value in [*REFUSED.items(), ("max_staleness", 2)]:
        if field in WORKS.get(name, ()):
            assert getattr(config(name, tmp_path, **{field: value}), field) == value
            continue
        with refused(field, got=value):
            config(name, tmp_path, **{field: value})


@pytest.mark.parametrize("name", ["SDFT", "SDPO"])
def test_a_teacher_on_trls_server_is_refused_in_node_mode(name, tmp_path):
    with refused("use_teacher_server", "`vllm_mode='server'`"):
        config(name, tmp_path, use_teacher_server=True)
    assert config(name, tmp_path, use_teacher_server=True, vllm_mode="server").use_teacher_server


@pytest.mark.parametrize(
    ("name", "prompts"), [("RLOO", 4), ("Distillation", 16), ("SDFT", 4), ("GOLD", 16)]
)
def test_a_dataset_smaller_than_one_round_is_refused_by_the_rows_that_the_trainer_takes(
    name, prompts, tmp_path
):
    fields = {"num_generations": 4} if name in ("RLOO", "SDFT") else {}
    args = config(
        name, tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=2, **fields
    )
    check_dataset([0] * prompts, args)
    with refused("train_dataset", got=prompts - 1, expected=prompts):
        check_dataset([0] * (prompts - 1), args)


@pytest.mark.nightly
@pytest.mark.real
def test_the_stable_trainers_import_no_experimental_one():
    """`trl.experimental.utils` is imported by TRL itself."""
    code = (
        "import sys, trl_multinode; from trl_multinode import RLOOTrainer, GRPOTrainer, DistillationTrainer;"
        "print(sorted({m.split('.')[2] for m in sys.modules if m.startswith('trl.experimental.')} - {'utils'}),"
        "'SDFTTrainer' in dir(trl_multinode), 'trl_multinode.experimental' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S
    )
    assert run.stdout.split("\n")[-2] == "[] True False", run.stdout + run.stderr
