"""TRL's seam in the trainers beside GRPO, pinned as test_contract.py pins GRPO's: from sources, before any launch."""

import ast
import inspect
import os
from functools import cache
from pathlib import Path

import pytest
import trl
from test_contract import KEYWORDS

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import trl_multinode
from trl_multinode.node_trainer import NodeTrainer
from trl_multinode.rollouts.generation import NodeGeneration

VERSION = f"TRL {trl.__version__}"
pytestmark = pytest.mark.nightly  # the lock pins TRL
TRAINERS = ["RLOO", "Distillation", "SDFT", "SDPO", "GOLD", "IWOPD", "GMPO", "ServerDistillation"]
# here, because vLLM sets variables
CLASSES = {name: getattr(trl_multinode, f"{name}Trainer") for name in [*TRAINERS, "GRPO"]}
ROUND = {  # the method of TRL that generates one round, and what it takes
    "RLOO": ("_generate_and_score_completions", ["inputs"]),
    "Distillation": ("_generate_and_score_completions", ["inputs"]),
    "SDFT": ("_prepare_training_batch", ["inputs"]),
    "SDPO": ("_prepare_training_batch", ["inputs"]),
    "GOLD": ("_fill_buffer", ["generation_batch", "buffer_steps"]),
    "IWOPD": ("_fill_buffer", ["generation_batch", "buffer_steps"]),
    "GMPO": ("_generate_and_score_completions", ["inputs"]),
    "ServerDistillation": ("_generate_and_score_completions", ["inputs"]),
}


def ours(name: str) -> type:
    return CLASSES[name]


@cache
def source(name: str) -> ast.Module:
    return ast.parse(inspect.getsource(ours(name)._code()))


def calls(name: str, text: str) -> list[ast.Call]:
    return [
        n for n in ast.walk(source(name)) if isinstance(n, ast.Call) and ast.unparse(n.func) == text
    ]


# ---- TRL's side


def faults_of(name: str) -> list[str]:
    """Return what TRL's trainer has otherwise than this library's needs it."""
    (call,) = calls(name, "VLLMGeneration")
    return [
        *faults_of_keywords(name, call),
        *faults_of_the_place(name),
        *faults_of_calls(name),
        *faults_of_the_round(name),
    ]


def faults_of_keywords(name: str, call: ast.Call) -> list[str]:
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    faults = []
    if call.args or not keywords.keys() <= KEYWORDS:
        faults.append(
            f"new arguments of VLLMGeneration {keywords.keys() - KEYWORDS}: see generation.py"
        )
    # A trainer of ours adds the factor of tensor parallelism that NodeGeneration takes out again, where TRL has none
    added_by_us = ours(name)._build_generation is not NodeTrainer._build_generation
    if ("vllm_tensor_parallel_size" in keywords["max_num_seqs"]) == added_by_us:
        faults.append(f"max_num_seqs={keywords['max_num_seqs']}: see buffered.py")
    return faults


def faults_of_the_start(name: str, folder: Path) -> list[str]:
    """Engines start before TRL computes its keywords, so this library computes the same ones."""
    (call,) = calls(name, "VLLMGeneration")
    wanted = {"num_generations": 4, "steps_per_generation": 4, "vllm_tensor_parallel_size": 2}
    config = ours(name)._config
    known = {key: value for key, value in wanted.items() if hasattr(config, key)}
    if name == "ServerDistillation":
        known["teacher_model_server_url"] = "http://localhost:8000"
    args = config(
        str(folder), use_cpu=True, bf16=False, gradient_accumulation_steps=4,
        per_device_train_batch_size=4, **known,
    )  # fmt: skip
    early = ours(name)._engine_keywords(args)
    theirs = {
        keyword.arg: eval(ast.unparse(keyword.value), {"args": args})  # noqa: S307 - code of TRL
        for keyword in call.keywords
        if keyword.arg in early
    }
    if ours(name)._build_generation is not NodeTrainer._build_generation:
        theirs["max_num_seqs"] *= args.vllm_tensor_parallel_size
    return [] if early == theirs else [f"engines start with {early}, and TRL passes {theirs}"]


def test_engines_start_with_the_keywords_that_trl_passes_later(tmp_path):
    names = [*TRAINERS, "GRPO"]
    faults = {name: found for name in names if (found := faults_of_the_start(name, tmp_path))}
    assert not faults, VERSION


def faults_of_the_place(name: str) -> list[str]:
    """The generation object must be replaced where the trainer looks it up."""
    module = ours(name)._builds_in or ours(name)._code()
    nodes = [node for node in ast.walk(source(name)) if isinstance(node, ast.ImportFrom)]
    imports = [
        node for node in nodes if any(alias.name == "VLLMGeneration" for alias in node.names)
    ]
    if not hasattr(module, "VLLMGeneration") or len(imports) != 1:
        return [f"{module.__name__} has no VLLMGeneration, or imports it {len(imports)} times"]
    at_the_top = imports[0] in source(name).body or imports[0].col_offset == 0
    if at_the_top != (ours(name)._builds_in is None):
        return ["VLLMGeneration is imported elsewhere: see `_builds_in` in node_trainer.py"]
    return []


def faults_of_calls(name: str) -> list[str]:
    known = set(inspect.signature(NodeGeneration.generate).parameters) - {"self"}
    generate = calls(name, "self.vllm_generation.generate")
    faults = []
    if not generate or not calls(name, "self.vllm_generation.sync_weights"):
        faults.append("it calls generate or sync_weights no more")
    for call in generate:
        given = {keyword.arg for keyword in call.keywords}
        faults += (
            [f"generate gets {given - known or call.args}"]
            if call.args or not given <= known
            else []
        )
    return faults


def faults_of_the_round(name: str) -> list[str]:
    """The method that generates a round must be the one that is wrapped."""
    method, parameters = ROUND[name]
    theirs = list(inspect.signature(getattr(ours(name)._trl, method)).parameters)[1:]
    owner = next(cls for cls in ours(name).__mro__ if method in vars(cls))
    wrapped = owner.__module__.startswith("trl_multinode") and "_one_round" in inspect.getsource(
        owner
    )
    if theirs != parameters or not wrapped:
        return [f"{method} takes {theirs}, expected {parameters}; wrapped: {wrapped}"]
    return []


def test_each_trainer_of_trl_has_what_is_replaced_wrapped_and_set():
    faults = {name: found for name in TRAINERS if (found := faults_of(name))}
    assert not faults, VERSION


def method(name: str, which: str) -> ast.FunctionDef:
    found = [
        n for n in ast.walk(source(name)) if isinstance(n, ast.FunctionDef) and n.name == which
    ]
    assert found, f"{VERSION}: {name} has no {which}"
    return found[-1]


def gathered(node: ast.AST) -> set[str]:
    return {ast.unparse(n.args[0]) for n in ast.walk(node) if isinstance(n, ast.Call) and
            ast.unparse(n.func) == "gather_object"}  # fmt: skip


def test_rloo_gathers_the_very_lists_of_texts_that_its_rewards_got():
    body = method("RLOO", "_generate_and_score_completions")
    (rewards,) = [n for n in ast.walk(body) if isinstance(n, ast.Call) and
                  ast.unparse(n.func) == "self._calculate_rewards"]  # fmt: skip
    assert [ast.unparse(a) for a in rewards.args[1:3]] == ["prompts", "completions"], (
        f"{VERSION}: see text_logging.py"
    )
    assert {"prompts", "completions"} <= gathered(body)
    made_anew = [n.lineno for n in ast.walk(body) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
                 and n.id in ("prompts", "completions") and n.lineno > rewards.lineno]  # fmt: skip
    assert not made_anew, (
        f"{VERSION}: new texts in lines {made_anew}, after the rewards; see text_logging.py"
    )


def test_gold_gathers_the_texts_of_its_buffer():
    body = method("GOLD", "training_step")
    assert "prompt_texts, completion_texts = self._buffered_text_logs[slice_idx]" in ast.unparse(
        body
    )
    assert gathered(body) == {"prompt_texts", "completion_texts"}, (
        f"{VERSION}: see experimental/gold.py"
    )


def test_rloo_scores_the_completions_with_the_model_itself_first():
    """The monitor takes the first pass of a round for the model's own."""
    body = method("RLOO", "_generate_and_score_completions")
    scores = [n for n in ast.walk(body) if isinstance(n, ast.Call) and
              ast.unparse(n.func) == "self._get_per_token_logps_and_entropies"]  # fmt: skip
    first = min(scores, key=lambda call: call.lineno)
    assert ast.unparse(first.args[0]) == "self.model" and "old_per_token_logps" in ast.unparse(body)
