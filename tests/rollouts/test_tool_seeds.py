"""Rows of later turns have the seeds of their global rows: TRL's own tool loop on stub engines, in several layouts."""

from types import SimpleNamespace

import numpy as np
import pytest
from stubs import A, B, build
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from trl_multinode.engine.client import Rollout
from trl_multinode.rollouts.generation import NodeGeneration

CALL, DONE, TOOL = 50, 51, 52  # tokens
SAYS = {"role": "assistant", "content": ""}
CALLS = SAYS | {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
TURNS = 6
LAYOUTS = [(1, 8), (2, 4), (4, 2), (8, 1)]  # ranks x rows


def toss(request, index, version) -> Rollout:
    """A completion of one token: two of three seeds call the tool. Rows with equal tokens are therefore common."""
    seed = (
        np.random.default_rng(request.seed + index).integers(3) if request.seed is not None else 0
    )
    return Rollout(
        np.array([CALL if seed else DONE], dtype=np.int32),
        np.zeros(1, dtype=np.float32),
        version,
        0,
    )


def generation_of(rank: int, mode: str = "train") -> NodeGeneration:
    generation = build(rank, rollout_seed=5)
    generation.engines._row, generation.engines.max_model_len = toss, 1000
    generation.begin_round(mode, 2)
    return generation


def trls_tool_loop(
    generation: NodeGeneration, prompts: list[list[int]], limit: int
) -> list[list[int]]:
    """Return each row's tokens after its prompt. `limit` is `max_completion_length`."""

    def generate(prompts, *_, **__):
        _, completions, logprobs, _ = generation.generate(prompts, None, 1)
        return completions, [[top[0] for top in row] for row in logprobs]

    trainer = SimpleNamespace(
        max_tool_calling_iterations=TURNS, max_completion_length=limit, use_vllm=True, vllm_mode="node", _is_vlm=False,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=1000)), environment_factories=None,
        tools=[int], _sync_tool_dicts=[{"f": int}] * len(prompts), _async_tool_dicts=[{}] * len(prompts),
        _get_tool_suffix_ids=lambda messages: [TOOL], _generate_single_turn=generate, _tokenizer=None,
    )  # fmt: skip
    completions, logprobs = generate(prompts)
    messages = [[parse(None, ids)] for ids in completions]
    loop = GRPOTrainer._tool_call_loop
    return loop(trainer, [[] for _ in prompts], prompts, completions, messages, logprobs, None, {})[
        2
    ]


def parse(_, ids, **__) -> dict:
    return CALLS if ids[-1] == CALL else SAYS


def in_layout(ranks: int, rows: int, roll) -> list[list[int]]:
    """Two groups of four equal prompts on some ranks, each of which generates alone."""
    prompts = [A] * 4 + [B] * 4
    return [
        row for rank in range(ranks) for row in roll(rank, prompts[rank * rows : (rank + 1) * rows])
    ]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_tool_loop_samples_the_same_in_every_layout(mode, monkeypatch):
    monkeypatch.setattr(grpo_trainer, "parse_response", parse)
    found = [
        in_layout(
            *layout, lambda rank, prompts: trls_tool_loop(generation_of(rank, mode), prompts, 100)
        )
        for layout in LAYOUTS
    ]
    assert found[1:] == found[:1] * 3
    assert len({len(row) for row in found[0]}) > 2  # rows end after different numbers of turns
    assert len({tuple(row) for row in found[0]}) < 8  # rows of equal tokens


def row_by_row(rank: int, prompts: list[list[int]]) -> list[list[int]]:
    """Return each row's tokens in a `rollout_func` that finishes one row before it begins the next."""
    generation = generation_of(rank)
    generation.seeds.num_rows = len(prompts)  # as the trainer does
    generation.begin_round("train", 2)
    rows = [list(prompt) for prompt in prompts]
    for row in rows:
        while row[-1] != DONE:
            row += generation.generate([row], None, 1)[1][0]
            row += [TOOL] * (row[-1] == CALL)
    return rows


def test_a_rollout_that_generates_row_by_row_samples_the_same_in_every_layout():
    found = [in_layout(*layout, row_by_row) for layout in LAYOUTS]
    assert found[1:] == found[:1] * 3 and len({len(row) for row in found[0]}) > 2


def seeds_of(generation: NodeGeneration) -> list[int]:
    requests = generation.engines.calls[-1].requests
    return [
        request.seed + index for request in requests for index in range(request.num_completions)
    ]


def test_seeds_differ_by_run_mode_round_and_call():
    def first_seed(
        rollout_seed: int = 5, mode: str = "train", number: int = 2, calls: int = 1
    ) -> int:
        generation = build(rollout_seed=rollout_seed)
        generation.begin_round(mode, number)
        for _ in range(calls):
            generation.generate([A], None, 4)
        return seeds_of(generation)[0]

    seeds = [
        first_seed(),
        first_seed(rollout_seed=6),
        first_seed(mode="eval"),
        first_seed(number=3),
        first_seed(calls=2),
    ]
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) < 2**63 - 24  # what torch's generator takes


def test_all_rows_and_turns_of_a_round_have_seeds_of_their_own():
    seeds = []
    for rank in range(2):
        generation = generation_of(rank)
        for prompts in ([A] * 4, [A] * 4, [A] * 6):  # all rows twice, then more rows than there are
            generation.generate(prompts, None, 4)
            seeds += seeds_of(generation)
    assert len(set(seeds)) == len(seeds) == 28


def test_prompts_that_continue_no_row_are_new_requests_for_the_rows_in_order():
    generation = generation_of(1)
    generation.generate([A, B], None, 1)
    first = seeds_of(generation)
    generation.generate([[9, 9], [8, 8]], None, 1)
    assert np.diff(seeds_of(generation)) == np.diff(first) == 1 and not set(first) & set(
        seeds_of(generation)
    )
