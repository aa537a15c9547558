"""Whole rollouts ahead against TRL's own trainer: on the same engine output all else is equal, to the bit."""

import math
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import trl
from agent_kinds import AHEAD, KINDS, SPEAKER, Kind
from agents import CONTEXT, GROUP, Seen, build, chats, engines_here, keep_outputs, ours
from trl.trainer import grpo_trainer

from trl_multinode.engine.client import Rollout
from trl_multinode.engine.row_stream import RowRequest

# test_agents decides: a run ahead is the synchronous one, which TRL's own loop makes
pytestmark = pytest.mark.nightly


def numbers(log: list[dict]) -> list[dict]:
    """What TRL logs and no clock made."""
    clocks = ("time", "runtime", "per_second", "flos", "vllm")
    return [{key: value for key, value in entry.items() if not any(word in key for word in clocks)} for entry in log]


Conversation = list[tuple[list[int], Rollout]]  # prompt and completion of every turn of a row


def keep_rounds(trainer) -> list[tuple[list[dict], list[Conversation]]]:
    """Rows of the dataset and conversations of every round of a run ahead, from now on."""
    kept: list[tuple[list[dict], list[Conversation]]] = []
    take, stream = trainer.vllm_generation.take_groups, trainer.host.ahead_engines.stream

    def taken(*args):
        rows = take(*args)
        groups = trainer.vllm_generation.continuous.taken
        found = conversations(stream.turns)
        kept.append((
            [dict(row) for group in groups for row in group.inputs],
            [conversation for group in groups for conversation in found[group.id]],
        ))  # fmt: skip
        return rows

    trainer.vllm_generation.take_groups = taken
    return kept


def conversations(turns: list[tuple[RowRequest, Rollout]]) -> dict[tuple[int, int], list[Conversation]]:
    """Group -> conversation of each of its rows."""
    found: dict[tuple[int, int], list[Conversation]] = {}
    for request, rollout in turns:
        rows, prompt = found.setdefault(request.group, []), list(request.prompt)
        continued = next((row for row in rows if is_beginning(whole(row), prompt)), None)
        if continued is None:
            rows.append(continued := [])
        continued.append((prompt, rollout))
    return found


def whole(conversation: Conversation) -> list[int]:
    prompt, rollout = conversation[-1]
    return [*prompt, *rollout.tokens.tolist()]


def is_beginning(tokens: list[int], longer: list[int]) -> bool:
    return len(tokens) < len(longer) and longer[: len(tokens)] == tokens


class Replay:
    """TRL's `VLLMGeneration`, with the conversations of our run. It insists on the same prompts in every turn."""

    mode = "colocate"
    rounds: list[tuple[list[dict], list[Conversation]]]

    def __init__(self, **_):
        engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=CONTEXT))
        self.llm = SimpleNamespace(llm_engine=engine)  # asked for by TRL's tool loop
        self.number, self._left = -1, []

    def sync_weights(self) -> None:
        """The weights of each row are those of our run."""

    def begin_round(self) -> list[dict]:
        assert not any(self._left), f"turns of round {self.number} are left"
        self.number += 1
        rows, made = self.rounds[self.number]
        self._left = [deque(conversation) for conversation in made]
        return rows

    def generate(self, prompts, images=None, num_generations=1, profiler=None):
        rows = [turns for turns in self._left if turns][: len(prompts)]
        assert [turns[0][0] for turns in rows] == [list(prompt) for prompt in prompts], f"round {self.number}"
        made = [turns.popleft()[1] for turns in rows]
        logprobs = [[[value] for value in row.logprobs.tolist()] for row in made]
        return prompts, [row.tokens.tolist() for row in made], logprobs, None


class Replaying(trl.GRPOTrainer):
    """TRL's own trainer; the rows of a batch are those that our run took."""

    def _generate_and_score_completions(self, inputs):
        rows = self.vllm_generation.begin_round()
        self.batches.append(([dict(row) for row in inputs], [dict(row) for row in rows]))
        return super()._generate_and_score_completions(rows)


def trls(folder: Path, rounds: list, reward, dataset=None, keywords=None, **settings):
    """TRL's own trainer on the conversations of our run. `batches` has each batch and the rows in its place."""
    with mock.patch.object(grpo_trainer, "VLLMGeneration", type("Replayed", (Replay,), {"rounds": rounds})):
        trainer = build(Replaying, folder, reward, dataset, keywords, use_vllm=True, vllm_mode="colocate", **settings)
    trainer.batches = []
    return trainer


class Pair:
    """A run ahead, and TRL's trainer on its engine output."""

    def __init__(self, folder, kind: Kind, **settings):
        torch.manual_seed(0)
        dataset, rewards = chats(12, **kind.columns), [Seen(*kind.seen), Seen(*kind.seen)]
        with engines_here(SPEAKER):
            self.ours = ours(folder / "ours", rewards[0], dataset, kind.keywords, **settings)
            rounds = keep_rounds(self.ours)
            self.our_outputs = keep_outputs(self.ours)
            self.ours.train()
            self.ours.close()
        self.trls = trls(folder / "trl", rounds, rewards[1], dataset, kind.keywords)
        self.trl_outputs = keep_outputs(self.trls)
        self.trls.train()
        self.rounds, self.rewards = rounds, rewards


CASES = [
    ("tools", "drain"),
    ("environments", "drain"),
    ("rollout_func", "drain"),
    ("environments", "in flight"),
    ("rollout_func", "in flight"),
]


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def pair(request, tmp_path_factory):
    kind, mode = request.param
    made = Pair(tmp_path_factory.mktemp("pair"), KINDS[kind], **AHEAD[mode])
    made.kind, made.mode = kind, mode
    return made


def test_rewards_get_what_trls_own_loop_gives_them(pair):
    mine, its = (seen.rounds for seen in pair.rewards)
    assert mine == its and len(mine) == 3
    turns = {len(completion) for one in mine for completion in one["completions"]}
    assert len(turns) > (2 if pair.kind != "rollout_func" else 0), "all conversations end at the same turn"


def test_tokens_masks_logprobs_and_advantages_are_trls(pair):
    for mine, its in zip(pair.our_outputs, pair.trl_outputs, strict=True):
        assert mine.keys() == its.keys() and {"tool_mask", "sampling_per_token_logps"} <= mine.keys()
        different = [name for name in its if isinstance(its[name], torch.Tensor) and not its[name].equal(mine[name])]
        assert different == []
        assert 0 < its["tool_mask"].float().mean() < 1


def test_gradients_are_trls_to_the_bit(pair):
    assert len(pair.ours.gradients) == len(pair.trls.gradients) == 3
    for mine, its in zip(pair.ours.gradients, pair.trls.gradients, strict=True):
        assert mine.equal(its) and mine.abs().max() > 1e-4


def test_the_log_is_trls(pair):
    mine, its = numbers(pair.ours.state.log_history), numbers(pair.trls.state.log_history)
    for ours_at, trls_at in zip(mine, its, strict=True):
        differing = {
            key: (value, ours_at.get(key))
            for key, value in trls_at.items()
            if ours_at.get(key) != value and not (isinstance(value, float) and math.isnan(value))
        }
        assert differing == {}
    if pair.kind != "rollout_func":
        calls = [entry["tools/call_frequency"] for entry in its if "loss" in entry]
        failures = [entry["tools/failure_frequency"] for entry in its if "loss" in entry]
        assert min(calls) > 0.5 and max(failures) > 0


def test_rows_are_the_datasets_in_its_order(pair):
    """A round in flight may take groups in another order."""
    for batch, rows in pair.trls.batches:
        assert pair.mode == "in flight" or batch == rows
        assert len(rows) == 2 * GROUP


def test_later_rounds_ran_ahead_of_their_weights(pair):
    steps = [[rollout.version.step for row in rows for _, rollout in row] for _, rows in pair.rounds]
    assert set(steps[0]) == {0}
    assert all(max(made_at) <= number for number, made_at in enumerate(steps))
    assert any(min(made_at) < number for number, made_at in enumerate(steps))
    log = [entry for entry in pair.ours.state.log_history if "loss" in entry]
    assert max(entry["staleness/rounds_mean"] for entry in log) > 0
