"""Features of TRL on two nodes under ZeRO-3: what our trainer does with them is what TRL's own does, number by number.

`scripts/scenarios.py` has what is trained, `scripts/both_arms.py` how the two are compared. One launch decides; the
features that `scripts/nightly_scenarios.py` has, and the launches without ZeRO-3, run every few nights.
"""

import json
from functools import cache
from pathlib import Path

import pytest

from multinode_kit.engines import FAKE
from multinode_kit.launch_files import DDP, FSDP2, ZERO3
from multinode_kit.models import tiny_qwen2
from multinode_kit.nodes import Nodes

SCRIPT = Path(__file__).parent / "scripts" / "features.py"
pytestmark = [pytest.mark.two_node, pytest.mark.zero3]
LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
ROWS = {
    "plain": [("Training", "full fine-tuning under ZeRO-3"), ("Data", "plain prompts")],
    "losses": [("Losses", f"`loss_type={loss!r}`") for loss in LOSSES],
    "loss_options": [
        ("Losses", "`importance_sampling_level='sequence'`"), ("Losses", "`scale_rewards='batch'`"),
        ("Losses", "`top_entropy_quantile`, `entropy_coef`"), ("Losses", "`mask_truncated_completions`"),
        ("Losses", "`off_policy_mask_threshold`"), ("Generation", "`temperature`"),
    ],
    "reference_model": [("Reference model", "`beta > 0`"), ("Reference model", "`sync_ref_model`")],
    "rewards": [
        ("Rewards", "several functions, `reward_weights`"), ("Rewards", "async functions"),
        ("Rewards", "`None` rewards"), ("Rewards", "reward models"), ("Rewards", "`multi_objective_aggregation`"),
    ],
    "conversations": [
        ("Data", "conversational prompts"), ("Logging", "`log_completions`"), ("Logging", "callbacks"),
    ],
    "trackers": [("Logging", "TensorBoard"), ("Logging", "trackio")],
    "tools": [("Agents", "`tools`, several and unequal turns per rank")],
    "environments": [("Agents", "`environment_factory`, with its own prompt and reward")],
    "rollout_func": [("Agents", "`rollout_func` that calls `vllm_generation.generate`")],
    "schedule": [
        ("Schedule", "`num_iterations`"), ("Schedule", "`steps_per_generation`"),
        ("Schedule", "`gradient_accumulation_steps`"),
    ],
    "generation_batch_size": [
        ("Schedule", "`generation_batch_size`"), ("Schedule", "groups larger than a rank's batch"),
    ],
    "iterable_dataset": [("Data", "iterable datasets")],
    "streamed_dataset": [("Data", "streaming datasets"), ("Data", "columns for the reward")],
    "evaluation": [("Evaluation", "`eval_strategy`"), ("Evaluation", "`num_generations_eval`")],
    "gradient_checkpointing": [("Training", "gradient checkpointing")],
    "lora": [("Training", "LoRA under ZeRO-3"), ("Reference model", "`beta > 0` with an adapter")],
    "rslora": [("Training", "rsLoRA")],
    "server_mode": [("Passed through", "`vllm_mode='server'`")],
    "colocate_mode": [("Passed through", "`vllm_mode='colocate'`")],
    "without_vllm": [("Passed through", "`use_vllm=False`")],
}  # fmt: skip
ZERO2 = ZERO3 | {"zero_optimization": {"stage": 2}}
ELSEWHERE = {  # how it is started -> what runs there
    "zero2": {"plain": [("Training", "full fine-tuning under ZeRO-2")], "dora": [("Training", "DoRA, under ZeRO-2")]},
    "ddp": {
        "plain": [("Training", "full fine-tuning under DDP")], "lora": [("Training", "LoRA under DDP")],
        "reference_model": [],
    },
    "fsdp2": {
        "plain": [("Training", "full fine-tuning under FSDP2")], "lora": [("Training", "LoRA under FSDP2")],
        "reference_model": [],
    },
    "uneven": {"plain": [("Training", "nodes with different numbers of ranks")], "lora": [], "balanced": []},
}  # fmt: skip
LAUNCHES = {
    "zero2": {"deepspeed": ZERO2},
    "ddp": {"accelerate": DDP},
    "fsdp2": {"accelerate": FSDP2},
    "uneven": {"ranks": [2, 1]},
}
DECIDING = {
    "losses", "reference_model", "tools", "rollout_func", "schedule", "generation_batch_size", "evaluation", "lora",
    "without_vllm",
}  # fmt: skip
PASSED_THROUGH = {"server_mode": "server", "colocate_mode": "colocate", "without_vllm": "none"}


def marked(rows: dict) -> list:
    found = []
    for name in rows:
        marks = [pytest.mark.feature(*row, engine=engine_of(name)) for row in rows[name]]
        nightly = [] if name in DECIDING else [pytest.mark.nightly]
        found.append(pytest.param(name, marks=marks + nightly))
    return found


def engine_of(name: str) -> str:
    return "none" if name in PASSED_THROUGH else "fake"


def launched(folder: Path, names, ranks=(1, 1), **how) -> Path:
    """The scenarios, one after another, on two nodes, of one rank by default."""
    tiny_qwen2(seed=1).save_pretrained(folder / "reference")
    with Nodes(
        2, ranks, folder=folder, env={"TRL_MULTINODE_ENGINE_MODULE": FAKE}, forked=True, **how
    ) as nodes:
        nodes.launch(SCRIPT, str(folder), ",".join(names))
        nodes.wait(timeout_s=1200)
        print(nodes.rank_log(0)[-4000:])
    return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Function that returns the folder of a scenario's launch: that of the deciding ones, or that of the others."""

    @cache
    def launch(decide: bool) -> Path:
        names = [name for name in ROWS if (name in DECIDING) == decide]
        return launched(tmp_path_factory.mktemp("features"), names, deepspeed=ZERO3)

    return lambda name: launch(name in DECIDING)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Function that launches one of `ELSEWHERE`, once; pytest would set up a parametrised fixture several times."""
    return cache(
        lambda kind: launched(tmp_path_factory.mktemp(kind), ELSEWHERE[kind], **LAUNCHES[kind])
    )


def results(folder: Path, name: str) -> list[dict]:
    paths = sorted(folder.glob(f"{name}_rank*.json"))
    found = [json.loads(path.read_text()) for path in paths]
    assert found and found[0]["world"] == len(found) > 1, (
        f"scenario {name} did not end; see the launch's log above"
    )
    return found


def check(found: dict, name: str) -> None:
    """What a rank saw of a scenario in both arms."""
    assert found["mode"] == PASSED_THROUGH.get(name, found["mode"])
    assert found["engine"] == engine_of(name)
    assert found["not_replayed"] == 0 and (name in PASSED_THROUGH or found["rows"] > 0)
    assert found["moved"][-1] > 1e-4, "the weights did not move: equal weights would say nothing"
    assert max(found["weights"]) <= 1e-6, found["weights"]
    assert found["missing"] == []
    # sums in another order: what is 0 but for rounding differs by as much as it is
    same = {"grad_norm", "train_loss", "reward"} if name == "balanced" else found["metrics"].keys()
    assert max(found["metrics"][metric] for metric in same) < 1e-5, found["metrics"]
    assert {"loss", "grad_norm", "reward"} <= found["metrics"].keys()


@pytest.mark.parametrize("name", marked(ROWS))
def test_metrics_gradients_and_weights_are_trls(name, folder_of):
    for found in results(folder_of(name), name):
        check(found, name)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, *case.values, marks=case.marks)
        for kind in ELSEWHERE
        for case in marked(ELSEWHERE[kind])
    ],
)
def test_and_without_zero_3(kind, name, elsewhere):
    for found in results(elsewhere(kind), name):
        check(found, name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["conversations", "environments", "trackers"])
def test_what_a_user_sees_is_trls(name, folder_of):
    ours, trls = results(folder_of(name), name)[0]["observed"]
    assert ours == trls and ours


@pytest.mark.parametrize(
    "name", ["tools", "rollout_func", pytest.param("environments", marks=pytest.mark.nightly)]
)
def test_ranks_took_different_numbers_of_turns(name, folder_of):
    first, second = results(folder_of(name), name)
    assert first["calls"] != second["calls"]
    assert first["logs"][0].get("tools/call_frequency", 1.0) > 0
