"""Tensor parallelism: parity on both workers, the planned cache, the lines of a start and of an end."""

import re

import pytest
from test_conformance import FEATURE, PROMPTS, SAMPLING, check_log_probs

from multinode_kit.engines import FORKED, TREE, SyncDriver, running_engines, worst_difference
from multinode_kit.models import tiny_qwen2
from trl_multinode.engine.settings import CPU_ENVIRONMENT
from trl_multinode.engine.start_log import STAGES
from trl_multinode.engine.stream import Request
from trl_multinode.errors import EngineStartError
from trl_multinode.tools.plan.engine_memory import BLOCK_TOKENS, cache_blocks
from trl_multinode.tools.plan.model_size import size_of
from trl_multinode.wire.messages import Await

pytestmark = pytest.mark.engine
ONLY_VLLM = [  # sampling settings that the fake engine refuses
    {"temperature": 0.7, "bad_words": [*"abcdefghijklmnopqrstuvwxyz"], "logit_bias": {70: 3.0}},
    {"temperature": 0.7, "structured_outputs": {"regex": "[0-9]{4}"}},
    {"temperature": 1.0, "structured_outputs": {"regex": "[0-9]{4}"}, "repetition_penalty": 1.3},
]


def kv_use(trainer, send: bool = True) -> float:
    """Return the greatest use of the cache between the last two updates."""
    if send:
        trainer.send()
    return trainer.engines[0].ask(Await(min_update=trainer.version.update)).kv_use


def check_planned_cache(model, log: str) -> None:
    """`trl-multinode plan` counts as many blocks of the cache as vLLM, which logs their tokens."""
    budget = int(CPU_ENVIRONMENT["VLLM_CPU_KVCACHE_SPACE"]) << 30  # of each worker
    (tokens,) = re.findall(r"CPU KV cache size: ([\d,]+) tokens", log)
    # the engine's float32
    planned = cache_blocks(size_of(model), budget, tensor_parallel=2, element_bytes=4)
    assert planned == pytest.approx(int(tokens.replace(",", "")) / BLOCK_TOKENS, rel=0.02)


def generate(engines, num_requests: int = 2):
    requests = [Request(PROMPTS[i % 2], 2, seed=i) for i in range(num_requests)]
    return engines.generate(requests, 8, SAMPLING, 0)


@FEATURE("Generation", "`bad_words`")
@FEATURE("Generation", "`vllm_structured_outputs_regex`")
@pytest.mark.parametrize(
    ("module", "tied"),
    [(TREE, True), pytest.param(FORKED, False, marks=pytest.mark.nightly)],
    ids=["tied", "untied"],
)
def test_two_workers_of_a_tensor_parallel_engine_hold_the_trainers_weights(
    module, tied, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # as `import trl` does in every rank
    model = tiny_qwen2(300, tied)
    with running_engines(model, tmp_path, module, tensor_parallel_size=2) as engines:
        trainer = SyncDriver(model, engines)
        for _ in range(2):
            trainer.perturb()
            trainer.send()
        assert worst_difference(trainer, generate(engines), PROMPTS) < 1e-3
        for settings in ONLY_VLLM:
            check_log_probs(trainer, settings)
        trainer.perturb()
        assert worst_difference(trainer, generate(engines), PROMPTS) > 0.1
        # every rank of a node reads the same
        assert 0.0 < kv_use(trainer) == kv_use(trainer, send=False) < 0.1
        assert kv_use(trainer) == 0.0  # no request since the last update
    ready = re.search(r"1 engine\(s\) ready after \d+ s \((.*)\)", capsys.readouterr().out)
    # a stage that is over between two reads of the log has no seconds
    reported = re.findall(r"(\w+) \d+ s", ready[1])
    assert reported == [name for name, _ in STAGES if name in reported]
    assert reported[0] == "imports" and len(reported) > 2
    last_words = (tmp_path / "engine0.log").read_text().split("engine 0: ready after")[1]
    # of vLLM and multiprocessing at the end, seen on slow machines; test_leftovers.py looks for what stays behind
    slow = ("[shutdown]", "resource_tracker")
    ours = "\n".join(
        line for line in last_words.splitlines() if not any(word in line for word in slow)
    )
    assert not re.findall(
        r"(?im)^.*(?:\bkill|sigkill|terminated|\bended|\berror|traceback).*$", ours
    )
    # a harmless line of every update, at a level below ERROR
    assert "Failed to load weights" not in ours
    check_planned_cache(model, (tmp_path / "engine0.log").read_text())
    # vLLM's own for two CPU workers under the usage context; without one it is 2048
    assert "max_num_batched_tokens=8192" in (tmp_path / "engine0.log").read_text()
    assert ours.rstrip().endswith("engine 0: shut down in good order"), last_words


@pytest.mark.fault("6")
def test_a_setting_that_vllm_refuses_is_named_in_the_error(tmp_path):
    refused = r"ValidationError: .*max_model_len \(1000000\)"
    with (
        pytest.raises(EngineStartError, match=refused),
        running_engines(tiny_qwen2(300), tmp_path, FORKED, max_model_len=1_000_000),
    ):
        pass
