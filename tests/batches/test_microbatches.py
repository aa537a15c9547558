"""Balanced micro-batches give TRL's gradient: real trainers on forked gloo ranks, the same rollouts in both."""

import pytest
import torch
from refusals import refused
from replays import PROMPTS, logged, make, on_ranks

from trl_multinode import GRPOConfig
from trl_multinode.batches import shares
from trl_multinode.batches.batching import plan_micro_steps
from trl_multinode.batches.layouts import join_rows
from trl_multinode.batches.shares import RowDealer

CAP = 200  # the longest row has 84 tokens, TRL's micro-batch of 4 rows up to 336 slots
EVERYTHING = {"engine": "token_truncate", "beta": 0.05, "num_iterations": 2, "max_steps": 2}
# A second epoch-less run of 12 prompts is 3 generation blocks of 2 slices: a window of 4 and a short one of 2
SHORT_WINDOW = {
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 4,
    "max_steps": -1,
    "num_train_epochs": 1,
}
# Each differs from the others in what our code does: sum or mean, blocks, windows, masks, padding
CASES = {
    "dapo": {"loss_type": "dapo"} | EVERYTHING,
    "grpo": {"loss_type": "grpo"} | EVERYTHING,
    "sequence truncate": {"loss_type": "luspo", "importance_sampling_level": "sequence", "engine": "sequence_truncate",
                          "num_iterations": 2, "max_steps": 2},
    "tools": {"loss_type": "dapo", "tool_tokens": True} | EVERYTHING,
    "truncated": {"loss_type": "grpo", "mask_truncated_completions": True, "max_completion_length": 20} | EVERYTHING,
    "off policy mask": {"loss_type": "grpo", "off_policy_mask_threshold": 0.01, "delta": 1.5} | EVERYTHING,
    "many blocks, dapo": {"loss_type": "dapo", "prompts": PROMPTS[:12]} | SHORT_WINDOW,
    "many windows a block": {"steps_per_generation": 4, "max_steps": 2},
    "multiple of 8": {"pad_to_multiple_of": 8, "beta": 0.05},
    "no accumulation": {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8},
    "lora": {"peft_config": "lora", "beta": 0.05},
}  # fmt: skip
# e2e/test_in_flight compares the gradients of all losses with TRL's under ZeRO-3, with balanced micro-batches too


def compare(folder, settings) -> dict:
    """Runs TRL's micro-batches, then balanced ones."""
    theirs = make(folder, **settings)
    theirs.train()
    ours = make(folder, micro_batch_tokens=CAP, **settings)
    ours.train()
    pairs = list(zip(theirs.gradients, ours.gradients, strict=True))
    entropy = [trainer.state.log_history[0]["entropy"] for trainer in (theirs, ours)]
    return {
        "world": ours.accelerator.num_processes,
        "differences": [float((a - b).norm() / a.norm()) for a, b in pairs],
        "losses": [logged(theirs, "loss"), logged(ours, "loss")],
        "entropy": entropy,
        "steps": [theirs._step, ours._step],
        "moved": min(logged(ours, "balance/moved_mib"), default=-1.0),
        "crossed": max(logged(ours, "balance/moved_between_nodes_mib"), default=-1.0),
        "share": min(logged(ours, "balance/real_token_share"), default=-1.0),
        "step_times": [len(logged(trainer, "step_time")) for trainer in (theirs, ours)],
    }


def check(found: dict, limit: float = 1e-5) -> None:
    assert found["differences"] and max(found["differences"]) < limit, found
    assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-5, abs=1e-6)
    assert found["entropy"][1] == pytest.approx(found["entropy"][0], rel=1e-2)
    assert (
        found["steps"][0] == found["steps"][1] and found["step_times"][0] == found["step_times"][1]
    )
    assert found["share"] > 0.6


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_trls(case, tmp_path):
    settings = CASES[case]
    for found in on_ranks(lambda rank: compare(tmp_path, settings), 2, tmp_path):
        assert found["world"] == 2 and found["moved"] > 0
        check(found)
        assert found["steps"][0] > 0


def test_a_micro_batch_of_truncated_rows_has_two_columns_and_rows_have_the_same_fields():
    """TRL's metrics take one column for values of sequences."""
    row = {"prompt_ids": torch.tensor([5, 6]), "completion_ids": torch.tensor([], dtype=torch.long)}
    batch = join_rows([row, row], frozenset({"completion_ids"}), 0)
    assert batch["completion_mask"].tolist() == [[0, 0]] * 2 and batch["completion_ids"].shape == (
        2,
        2,
    )
    with pytest.raises(ValueError, match=" \\['tool_mask'\\]"):
        join_rows(
            [row, row | {"tool_mask": row["completion_ids"]}],
            frozenset({"completion_ids", "tool_mask"}),
            0,
        )


def compare_between_nodes(folder, rank: int, settings) -> dict:
    """Compares, and notes the ranks that held the rows which this rank trained."""
    owners: set[int] = set()
    share = RowDealer.share

    def spy(self, inputs):
        result = share(self, inputs)
        owners.update(int(result.plan.owners[number]) for rows in result.steps for number in rows)
        return result

    RowDealer.share = spy
    return compare(folder, settings) | {"owners": sorted(owners)}


def test_rows_stay_on_their_node_if_told_so(tmp_path):
    settings = {"loss_type": "dapo", "beta": 0.05, "balance_across": "node"}
    found = on_ranks(
        lambda rank: compare_between_nodes(tmp_path, rank, settings), 4, tmp_path, ranks_per_node=2
    )
    for rank, result in enumerate(found):
        check(result)
        assert {owner // 2 for owner in result["owners"]} == {rank // 2}
        assert result["crossed"] == 0 < result["moved"]


def test_rows_are_dealt_to_all_nodes_and_the_gradient_is_trls(tmp_path):
    """Three nodes of two ranks, two pools of three ranks: pools and nodes need not agree. Also one row per rank."""
    blocks = {
        "loss_type": "dapo",
        "beta": 0.05,
        "steps_per_generation": 1,
        "engine": "token_truncate",
    }
    one_row = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_generations": 3,
    }

    def body(rank: int) -> list[dict]:
        pools: list[int] = []

        def plan(*args):
            found = plan_micro_steps(*args, pool_ranks=3)
            pools.append(found.pools)
            return found

        shares.plan_micro_steps = plan
        return [compare_between_nodes(tmp_path, rank, settings) | {"pools": pools.copy()}
                for settings in (blocks, blocks | one_row)]  # fmt: skip

    ranks = on_ranks(body, 6, tmp_path, ranks_per_node=2)
    for rank, (found, single) in enumerate(ranks):
        check(found)
        # for each of two blocks one of both no-grad passes, and one of the training
        assert found["pools"] == [2] * 4
        assert {owner // 2 for owner in found["owners"]} - {rank // 2}, (
            f"rank {rank} got no row of another node"
        )
        assert 0 < found["crossed"] < found["moved"]
        check(single)
    assert sum(single["owners"] != [rank] for rank, (_, single) in enumerate(ranks)) > 1


def test_a_row_above_the_cap_is_an_error_on_every_rank(tmp_path):
    def body(rank: int) -> str:
        trainer = make(tmp_path, micro_batch_tokens=70, loss_type="grpo")
        with refused(
            "micro_batch_tokens", "`max_completion_length` 64", node=0, rank=rank
        ) as caught:
            trainer.train()
        return str(caught.value)

    for rank, message in enumerate(on_ranks(body, 2, tmp_path)):
        assert message.startswith(f"node 0, rank {rank}: ") and "`micro_batch_tokens` 70" in message


@pytest.mark.parametrize(
    ("setting", "value"), [("micro_batch_tokens", 256), ("balance_across", "rack")]
)
def test_fields_are_checked(setting, value):
    with refused(setting, got=value):
        GRPOConfig("out", use_cpu=True, bf16=False, max_completion_length=256, **{setting: value})
