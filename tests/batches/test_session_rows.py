"""Sessions of several rows have the gradient of TRL's formula for the session as one sequence.

The reference is written from the formulas, on logits of one forward pass per row; it calls nothing of TRL.
"""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from forks import forked
from refusals import refused
from replays import logged, make, on_ranks
from torch.nn.utils.rnn import pad_sequence

from multinode_kit.models import tiny_qwen2
from multinode_kit.replay import ReplayTrainer, seeded
from trl_multinode import GRPOConfig
from trl_multinode.batches.layouts import PER_TOKEN, cut_rows, join_rows
from trl_multinode.batches.session_rows import (
    MEANS,
    PART,
    SUMS,
    check_session_loss,
    cut_session,
    empty_row,
    parts_of,
)
from trl_multinode.rollouts.loss_scores import RATIO, SCORED, LossScores, Sums
from trl_multinode.rollouts.staleness import StalenessMeter

EOS = 1
RATE = 0.03  # of the test of two iterations: some ratios are clipped, and not all
CAP = 80  # the longest row has 37 tokens, so a step has several micro-batches


@dataclass
class Session:
    """Rows of one session: prompt, completion, mask of the sampled tokens, the sampler's log-probs."""

    rows: list[tuple[list[int], list[int], list[int], list[float]]] = field(default_factory=list)

    def add(self, random: np.random.Generator, prompt: list[int], turns: int) -> None:
        """Add a row in which an answer of others stands between two turns."""
        ids, mask = [], []
        for turn in range(turns):
            sampled = int(random.integers(2, 9))
            others = 3 * (turn + 1 < turns)
            ids += random.integers(2, 258, sampled + others).tolist()
            mask += [1] * sampled + [0] * others
        logps = random.normal(-np.log(258), 0.4, len(ids)).tolist()
        self.rows.append((prompt, [*ids[:-1], EOS], mask, logps))

    def flat(self) -> tuple[list[int], list[int], list[float], list[int]]:
        """The completion that TRL gets, its mask, its log-probs, and the parts."""
        ids, masks, logps, parts = [], [], [], []
        for number, (prompt, completion, mask, scores) in enumerate(self.rows):
            further = prompt if number else []
            ids += further + completion
            masks += [0] * len(further) + mask
            logps += [0.0] * len(further) + scores
            parts += [2 * number - 1] * len(further) + [2 * number] * len(completion)
        return ids, masks, logps, parts


def session_of(prompt: list[int], generation: int) -> Session:
    """A straight session of two turns, a forked one of three to five rows, or an empty one."""
    random, session = seeded("session", *prompt, generation), Session()
    if generation % 3 == 2:
        session.rows.append(([EOS], [EOS], [0], [0.0]))
        return session
    session.add(random, prompt, 2)
    for _ in range((2 + len(prompt) % 3) * (generation % 3)):
        session.add(random, random.integers(2, 258, 5).tolist(), 2)
    return session


class SessionReplay(ReplayTrainer):
    """Sessions in the place of completions, as a harness makes them."""

    _has_sessions = True
    cut_off: tuple[int, ...] = ()  # generations that do not end

    def _generate(self, prompts):
        first = self.accelerator.process_index * len(prompts)
        found = []
        for number, prompt in enumerate(self.processing_class(prompts)["input_ids"], first):
            session = session_of(prompt, number % 3)
            if number % 3 in self.cut_off:
                session.rows[-1][1][-1] = 7
            found.append(session)
        self.rounds = [*getattr(self, "rounds", []), found]
        ids, masks, logps, self.session_parts = map(list, zip(*(one.flat() for one in found)))  # noqa: B905
        texts = self.processing_class.batch_decode(ids)
        return [one.rows[0][0] for one in found], ids, masks, texts, logps, {}, None, []

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        output[PART] = parts_of(self.session_parts, output["completion_ids"])
        self.session_parts = None
        return output


def bare():
    """The model that `make` trains, without what TRL does to it."""
    return tiny_qwen2(vocab_size=258, seed=1)


def logps_of(model, session: Session) -> torch.Tensor:
    """Log-probs of the completions of all rows of a session, one forward pass each."""
    found = []
    for prompt, completion, *_ in session.rows:
        ids = torch.tensor([prompt + completion])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        found.append(logits.log_softmax(-1)[torch.arange(len(completion)), ids[0, len(prompt) :]])
    return torch.cat(found)


def reference(trainer, model, frozen, rounds, old=None) -> tuple[torch.Tensor, list]:
    """The loss of all optimizer steps of these rounds, each session as one sequence, and the log-probs."""
    args, kind = trainer.args, trainer.loss_type
    low, high, used = args.epsilon, args.epsilon_high or args.epsilon, []
    slices = args.gradient_accumulation_steps * args.per_device_train_batch_size
    loss = torch.zeros(())
    for sessions in rounds:
        rewards = torch.tensor([float(len(set(one.flat()[0]))) for one in sessions]).view(-1, 3)
        advantages = (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)
        masks = []
        for one in sessions:
            mask = torch.tensor([float(x) for row in one.rows for x in row[2]])
            ends = one.rows[-1][1][-1] == EOS or not args.mask_truncated_completions
            masks.append(mask * ends)
        items = float(sum(mask.sum() for mask in masks))
        for one, advantage, mask in zip(sessions, advantages.flatten(), masks, strict=True):
            logps = logps_of(model, one)
            before = logps.detach() if old is None else old[len(used)]
            used.append(logps.detach())
            sampled = torch.tensor([x for row in one.rows for x in row[3]])
            start = before if old is None else used[-1] * 0 + before
            weight = (
                (start - sampled)
                .exp()
                .clamp(
                    args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
                )
            )
            ratio = (logps - before).exp()
            if kind == "cispo":
                term = -ratio.clamp(max=high).detach() * advantage * logps
            elif kind == "sapo":
                heat = args.sapo_temperature_pos if advantage > 0 else args.sapo_temperature_neg
                term = -torch.sigmoid(heat * (ratio - 1)) * 4 / heat * advantage
            else:
                clipped = ratio.clamp(1 - low, 1 + high)
                term = -torch.min(ratio * advantage, clipped * advantage)
            term = term * weight
            if args.beta:
                apart = logps_of(frozen, one).detach() - logps
                # with TRL's `use_bias_correction_kl`, the default
                term = term + args.beta * (apart.exp() - apart - 1) * ratio
            total = (term * mask).sum()
            if kind in ("grpo", "sapo"):
                loss = loss + total / mask.sum().clamp(min=1) / slices
            elif kind == "dr_grpo":
                loss = loss + total / args.max_completion_length / slices
            elif kind == "luspo":
                loss = loss + total / slices
            else:
                steps = args.gradient_accumulation_steps / args.steps_per_generation
                loss = loss + total / (items * steps)
    return loss, used


def gradient_of(loss: torch.Tensor, model) -> torch.Tensor:
    return torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(model.parameters()))])


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert expected.norm() > 0
    return float((found - expected).norm() / expected.norm())


def make_sessions(folder: Path, cut_off=(), **settings):
    defaults = {
        "num_generations": 3, "per_device_train_batch_size": 3, "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 1, "micro_batch_tokens": CAP, "learning_rate": 0.0,
    }  # fmt: skip
    trainer = make(folder, kind=SessionReplay, engine="token_truncate", **defaults | settings)
    trainer.cut_off = cut_off
    assert trainer._balance is not None
    return trainer


TWO_SLICES = {"gradient_accumulation_steps": 2}
CASES = {
    **{kind: {"loss_type": kind} for kind in MEANS + SUMS},
    **{f"{kind}, reference": {"loss_type": kind, "beta": 0.1} for kind in SUMS},
    "two slices": {"loss_type": "grpo"} | TWO_SLICES,
    "two blocks": {"loss_type": "dapo", "steps_per_generation": 1} | TWO_SLICES,
    "two steps a block": {"loss_type": "dapo", "steps_per_generation": 2, "max_steps": 2},
    "two mean steps a block": {"loss_type": "sapo", "steps_per_generation": 2, "max_steps": 2},
    "truncated": {"loss_type": "grpo", "mask_truncated_completions": True, "cut_off": (1,)},
    "multiple of 8": {"loss_type": "dapo", "pad_to_multiple_of": 8, "beta": 0.1},
}


@pytest.fixture
def frozen(tmp_path):
    """The reference model, also where TRL loads it from."""
    model = tiny_qwen2(vocab_size=258, seed=0)
    model.save_pretrained(tmp_path / "reference")
    return model


def test_the_gradient_is_that_of_sessions_as_sequences(frozen, tmp_path):
    """With a learning rate of 0, the gradients of all steps of a block add up."""

    def difference(settings: dict) -> float:
        trainer, model = make_sessions(tmp_path, **settings), bare()
        trainer.train()
        loss, _ = reference(trainer, model, frozen, trainer.rounds)
        assert np.isfinite(logged(trainer, "entropy")).all()
        return apart(sum(trainer.gradients), gradient_of(loss, model))

    def body(rank: int) -> dict[str, float]:
        return {case: difference(settings) for case, settings in CASES.items()}

    with forked(body, 1, tmp_path) as (one,):
        assert not {case: found for case, found in one.result.items() if not found < 1e-5}


def test_a_second_iteration_clips_the_ratio_of_each_row(tmp_path):
    """The old log-probs come from the pass without gradients, whose rows are cut in the same way."""

    def differences(kind: str) -> list[float]:
        settings = {"num_iterations": 2, "max_steps": 2, "learning_rate": RATE, "epsilon": 0.1}
        trainer = make_sessions(tmp_path, loss_type=kind, **settings)
        model, found, old = bare(), [], None
        trainer.train()
        for theirs in trainer.gradients:
            loss, old = reference(trainer, model, None, trainer.rounds, old)
            gradient = gradient_of(loss, model)
            found.append(apart(theirs, gradient))
            parameters = list(model.parameters())
            sizes = [one.numel() for one in parameters]
            for one, part in zip(parameters, gradient.split(sizes), strict=True):
                one.data -= RATE * part.view_as(one)
        if kind not in ("sapo", "cispo"):
            assert 0 < logged(trainer, "clip_ratio/region_mean")[1] < 1
        return found

    with forked(lambda rank: list(map(differences, MEANS + SUMS)), 1, tmp_path) as (one,):
        assert np.shape(one.result) == (6, 2) and np.max(one.result) < 1e-5, one.result


def test_the_loss_of_an_evaluation_is_that_of_sessions_as_sequences(frozen, tmp_path):
    """Of two samples, transformers counts three rows of the first batch and two of the last."""

    def losses(kind: str) -> list[float]:
        trainer = make_sessions(tmp_path, loss_type=kind, beta=0.1 * (kind in SUMS))
        loss = trainer.evaluate(Dataset.from_dict({"prompt": ["abcd", "one more"]}))["eval_loss"]
        (entropy,) = logged(trainer, "eval_entropy")
        assert np.isfinite(entropy) and logged(trainer, "eval_balance/micro_steps")[0] > 1
        assert not trainer._metrics["train"]
        first, last = (
            float(reference(trainer, bare(), frozen, [one])[0]) for one in trainer.rounds
        )
        return [loss, (3 * first + 2 * last) / 5]

    with forked(lambda rank: list(map(losses, ("grpo", "dapo", "dr_grpo"))), 1, tmp_path) as (one,):
        for found, expected in one.result:
            assert found == pytest.approx(expected, rel=1e-5)


def test_ranks_with_unequal_numbers_of_rows_have_the_gradient_and_loss_of_one_rank(tmp_path):
    """The forked session of a prompt of one token has four rows, that of two tokens five."""

    def trained(kind: str, rows: int) -> dict:
        trainer = make_sessions(
            tmp_path, prompts=["a", "bb"], loss_type=kind, beta=0.1 * (kind in SUMS),
            per_device_train_batch_size=rows, per_device_eval_batch_size=rows,
        )  # fmt: skip
        trainer.train()
        return {
            "rows": sum(len(one.rows) for one in trainer.rounds[0]),
            "steps": logged(trainer, "balance/micro_steps"),
            "gradient": trainer.gradients[0].tolist(),
            "entropy": logged(trainer, "entropy"),
            "loss": trainer.evaluate(trainer.train_dataset)["eval_loss"],
        }

    def body(rank: int) -> list[dict]:
        return [trained(kind, 6 // torch.distributed.get_world_size()) for kind in ("grpo", "dapo")]

    (alone,) = on_ranks(body, 1, tmp_path)
    both = on_ranks(body, 2, tmp_path)
    for one, two, expected in zip(*both, alone, strict=True):
        assert sorted([one["rows"], two["rows"]]) == [6, 7] and expected["rows"] == 13
        assert one["steps"] == two["steps"]
        for found in (one, two):
            assert apart(*(torch.tensor(each["gradient"]) for each in (found, expected))) < 1e-5
            assert found["entropy"] == pytest.approx(expected["entropy"], rel=1e-5)
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_a_step_without_trained_tokens_logs_numbers(tmp_path):
    def body(rank: int) -> list[str]:
        settings = CASES["truncated"] | {"cut_off": (0, 1, 2)}
        trainer = make_sessions(tmp_path, **settings)
        trainer.train()
        assert not trainer.gradients[0].any()
        entry = trainer.state.log_history[0]
        return [name for name, value in entry.items() if not np.isfinite(value)]

    with forked(body, 1, tmp_path) as (one,):
        assert one.result == []


def test_the_scores_of_rows_add_up_to_those_of_their_sessions():
    """`LossScores` adds what the losses find to sums by the rank that generated a row."""
    args = SimpleNamespace(
        vllm_importance_sampling_mode="token_truncate", gradient_accumulation_steps=1
    )
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=2), args=args, steps_per_round=1,
        vllm_importance_sampling_clip_min=None, vllm_importance_sampling_clip_max=3.0,
    )  # fmt: skip

    def scored(batch: dict) -> LossScores:
        scores = LossScores(trainer, None, StalenessMeter(args), lambda: None)
        with scores.of({name: batch[name] for name in batch if name != SCORED}) as copied:
            scores.add(batch[SCORED])
        assert copied[RATIO].shape == batch[SCORED].shape
        return scores

    per_token = frozenset(PER_TOKEN)
    sessions = [session_of([3, 4], generation) for generation in (1, 0, 2)]
    batch = batch_of(sessions)
    rows = [row for one in cut_rows(batch, per_token) for row in cut_session(one, per_token, True)]
    whole = scored(batch)
    parts = scored(join_rows([*rows, empty_row(rows[0], per_token)], per_token, 0))
    torch.testing.assert_close(parts._sums, whole._sums)
    torch.testing.assert_close(parts._extremes, whole._extremes)
    torch.testing.assert_close(parts._weights, whole._weights)
    assert whole._sums[:, Sums._fields.index("tokens")].tolist() == [
        sum(sum(row[2]) for one in part for row in one.rows)
        for part in (sessions[::2], sessions[1:2])
    ]


def test_a_pass_without_gradients_scores_each_row_alone(tmp_path):
    def body(rank: int) -> bool:
        trainer = make_sessions(tmp_path)
        for mode in (trainer.model.train, trainer.model.eval):
            mode()
            rows = [{"prompt": text} for text in ("abc", "abc", "abc", "de", "de", "de")]
            output = trainer._generate_and_score_completions(rows)
            for number, session in enumerate(trainer.rounds[-1]):
                is_completion = [part % 2 == 0 for part in session.flat()[3]]
                found = output["old_per_token_logps"][number]
                ours = found[: len(is_completion)][is_completion]
                torch.testing.assert_close(ours, logps_of(bare(), session).detach())
                # prompts of further rows, and padding
                assert int((found != 0).sum()) == sum(is_completion)
        return True

    with forked(body, 1, tmp_path) as (one,):
        assert one.result


def batch_of(sessions: list[Session]) -> dict[str, torch.Tensor]:
    """A batch of TRL's with sessions of the ranks 0, 1, 0, ..., all with the prompt of their first row."""
    columns = zip(*(one.flat() for one in sessions), strict=True)
    ids, mask, logps, _ = (pad_sequence([*map(torch.tensor, one)], True) for one in columns)
    prompts = torch.tensor([one.rows[0][0][-1:] for one in sessions])
    lengths = torch.tensor([[len(one.flat()[0])] for one in sessions])
    count = torch.arange(len(sessions))
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": ids,
        "completion_mask": (torch.arange(ids.shape[1]) < lengths).long(),
        "tool_mask": mask,
        "sampling_per_token_logps": logps,
        SCORED: logps + 0.1 * torch.sin(ids.float()) * mask,
        "present_logps": logps - 0.1 * torch.cos(ids.float()) * mask,
        "advantages": count + 2.0,
        "origin": count % 2,
    }
    return batch | {PART: parts_of([one.flat()[3] for one in sessions], ids)}


def cut(session: Session, has_share: bool) -> list[dict]:
    (row,) = cut_rows(batch_of([session]), frozenset(PER_TOKEN))
    return cut_session(row, frozenset(PER_TOKEN), has_share)


def test_the_rows_of_a_session_come_back():
    session = session_of([3], 1)
    rows = cut(session, has_share=True)
    assert len(rows) == len(session.rows) > 2
    trained = sum(sum(row[2]) for row in session.rows)
    for found, (prompt, completion, mask, logps) in zip(rows, session.rows, strict=True):
        assert found["prompt_ids"].tolist() == prompt
        assert found["completion_ids"].tolist() == completion
        assert found["tool_mask"].tolist() == mask
        assert found["sampling_per_token_logps"].tolist() == pytest.approx(logps)
        assert found["advantages"].item() == pytest.approx(2.0 * sum(mask) / trained)
        assert found["origin"].item() == 0
        assert PART not in found
    assert sum(row["advantages"] for row in rows).item() == pytest.approx(2.0)
    assert [row["advantages"].item() for row in cut(session, has_share=False)] == [2.0] * len(rows)


def test_a_session_without_calls_or_tokens_is_one_row():
    (row,) = cut(session_of([3], 2), has_share=True)
    assert torch.isfinite(row["advantages"]) and row["completion_ids"].tolist() == [EOS]
    # masked as truncated
    row = {name: value[:0] if name in PER_TOKEN else value for name, value in row.items()}
    row[PART] = torch.zeros(0, dtype=torch.int32)
    (one,) = cut_session(row, frozenset(PER_TOKEN), True)
    assert one["completion_ids"].numel() == 0


def test_an_empty_row_has_the_fields_of_the_others_and_no_completion():
    row = cut(session_of([3, 4], 1), has_share=True)[0]
    empty = empty_row(row, frozenset(PER_TOKEN))
    assert empty.keys() == row.keys()
    sizes = {name: len(empty[name]) for name in ("prompt_ids", "completion_ids", "tool_mask")}
    assert sizes == {"prompt_ids": 1, "completion_ids": 0, "tool_mask": 0}


FITTING = {
    "micro_batch_tokens": 4096,
    "loss_type": "dapo",
    "vllm_importance_sampling_mode": "token_truncate",
}
REFUSED = [
    ("micro_batch_tokens", None, {}),
    ("loss_type", "bnpo", {}),
    ("loss_type", "vespo", {}),
    ("importance_sampling_level", "sequence", {}),
    ("vllm_importance_sampling_mode", "sequence_truncate", {}),
    ("vllm_importance_sampling_mode", "sequence_mask", {}),
    ("off_policy_mask_threshold", 0.1, {}),
    ("beta", 0.1, {"loss_type": "grpo"}),
    ("beta", 0.1, {"loss_type": "sapo"}),
]


@pytest.mark.parametrize(("setting", "value", "others"), REFUSED)
def test_a_loss_that_does_not_add_up_over_rows_is_refused(setting, value, others):
    config = GRPOConfig("out", use_cpu=True, bf16=False, **FITTING | others | {setting: value})
    with refused(setting, got=value):
        check_session_loss(config)


@pytest.mark.parametrize("kind", MEANS + SUMS)
def test_other_losses_are_accepted(kind):
    settings = FITTING | {"loss_type": kind, "beta": 0.1 * (kind in SUMS)}
    check_session_loss(GRPOConfig("out", use_cpu=True, bf16=False, **settings))


class MeanOfRows(SessionReplay):
    loss_reduction = "rows"


@pytest.mark.parametrize(
    "settings",
    [{"kind": SessionReplay, "entropy_coef": 0.01}, {"kind": MeanOfRows}],
    ids=["entropy", "own loss"],
)
def test_sessions_do_not_fall_back_to_trls_micro_batches(settings, tmp_path):
    def body(rank: int) -> bool:
        with refused("harness"):
            make(tmp_path, micro_batch_tokens=CAP, **settings)
        return True

    with forked(body, 1, tmp_path) as (one,):
        assert one.result
