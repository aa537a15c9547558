"""TRL's seam, pinned: a TRL that moved one of these must fail here, by name, and not in the middle of a run.

Only sources and signatures are looked at. When a test fails after an upgrade of TRL, change the file named in its
message first, then the pin.
"""

import ast
import inspect

import pytest
import trl
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from trl_multinode.rollouts.generation import NodeGeneration

VERSION = f"TRL {trl.__version__}"
# The lock pins TRL; `make versions` runs this file on others
pytestmark = pytest.mark.nightly
KEYWORDS = {
    "model", "accelerator", "processing_class", "mode", "structured_outputs_regex", "server_base_url", "server_host",
    "server_port", "group_port", "server_timeout", "tensor_parallel_size", "gpu_memory_utilization",
    "max_model_length", "max_num_seqs", "enable_sleep_mode", "model_impl", "trust_remote_code", "repetition_penalty",
    "temperature", "top_p", "top_k", "min_p", "max_completion_length", "logprobs", "generation_kwargs",
}  # fmt: skip


@pytest.fixture(scope="module")
def source() -> ast.Module:
    return ast.parse(inspect.getsource(grpo_trainer))


def function(source: ast.Module, name: str) -> ast.FunctionDef:
    (cls,) = (n for n in source.body if isinstance(n, ast.ClassDef) and n.name == "GRPOTrainer")
    found = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == name]
    assert found, f"{VERSION}: `GRPOTrainer.{name}` is gone; trainer.py overrides or relies on it"
    return found[0]


def calls(node: ast.AST, text: str) -> list[ast.Call]:
    """Calls in `node` of exactly the function `text`."""
    return [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func) == text]


def parameters(callable_) -> dict[str, inspect.Parameter]:
    return {
        n: p
        for n, p in inspect.signature(callable_).parameters.items()
        if n not in ("self", "args", "kwargs")
    }


# ---- how the generation object is built


def test_the_trainer_builds_its_generation_object_once_with_the_25_keywords(source):
    built = [call for node in source.body for call in calls(node, "VLLMGeneration")]
    assert len(built) == 1, (
        f"{VERSION} builds VLLMGeneration {len(built)} times, trainer.py replaces one"
    )
    assert calls(function(source, "__init__"), "VLLMGeneration") == built, (
        f"{VERSION} builds it outside __init__"
    )
    (call,) = built
    got = {keyword.arg for keyword in call.keywords}
    assert not call.args, (
        f"{VERSION} passes positional arguments to VLLMGeneration; ours takes keywords"
    )
    assert len(KEYWORDS) == 25 and got == KEYWORDS, (
        f"{VERSION} passes other keywords to VLLMGeneration: new {got - KEYWORDS}, gone {KEYWORDS - got}. "
        "See NodeGeneration.__init__ in generation.py, and _engine_args in host.py."
    )


# ---- how it is used


def test_generate_has_trls_signature():
    ours, theirs = parameters(NodeGeneration.generate), parameters(VLLMGeneration.generate)
    assert list(theirs) == ["prompts", "images", "num_generations", "profiler"], (
        f"{VERSION} changed generate()"
    )
    assert {n: (p.kind, p.default) for n, p in ours.items()} == {
        n: (p.kind, p.default) for n, p in theirs.items()
    }
    assert not parameters(VLLMGeneration.sync_weights) and not parameters(
        NodeGeneration.sync_weights
    )


def test_the_trainer_calls_generate_by_keyword_and_takes_the_first_log_prob_of_each_token(source):
    turn = ast.unparse(function(source, "_generate_single_turn"))
    expected = "_, completion_ids, logprobs, _ = self.vllm_generation.generate(prompts=prompt_ids, images=images, "
    assert (
        expected
        + "num_generations=num_generations, profiler=profiling_context(self, 'vLLM.generate'))"
        in turn
    ), (
        f"{VERSION} calls vllm_generation.generate() in another way; see NodeGeneration.generate in generation.py"
    )
    assert "logprobs = [[lp[0] for lp in seq] for seq in logprobs]" in turn, (
        f"{VERSION} reads log-probs in another way; see ArrayRow in rows.py"
    )


def test_the_trainer_uses_nothing_else_of_the_generation_object(source):
    used: dict[str, list[int]] = {}
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.vllm_generation":
            used.setdefault(node.attr, []).append(node.lineno)
    # `vllm_client` under vllm_mode == "server", `llm` under "colocate"
    assert set(used) == {"sync_weights", "generate", "vllm_client", "llm"}, (
        f"{VERSION} uses vllm_generation.{used}; NodeGeneration in generation.py must have what node mode reaches"
    )
    assert len(used["vllm_client"]) == len(used["llm"]) == 1, (
        f"{VERSION}: the modes' own objects elsewhere: {used}"
    )


# ---- what trainer.py replaces and overrides


def test_rewards_get_the_very_lists_of_texts_that_are_gathered_for_the_log(source):
    body = function(source, "_generate_and_score_completions")
    (rewards,) = calls(body, "self._calculate_rewards")
    assert [ast.unparse(a) for a in rewards.args[1:3]] == ["prompts", "completions"], (
        f"{VERSION}: see text_logging.py"
    )
    gathered = {ast.unparse(call.args[0]): call.lineno for call in calls(body, "gather_object")}
    assert {"prompts", "completions"} <= set(gathered), (
        f"{VERSION} gathers texts otherwise: {set(gathered)}"
    )
    for node in ast.walk(body):
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and node.id in ("prompts", "completions")
        ):
            assert not rewards.lineno < node.lineno < gathered[node.id], (
                f"{VERSION} makes new `{node.id}` in line {node.lineno}, after the rewards; see text_logging.py"
            )
