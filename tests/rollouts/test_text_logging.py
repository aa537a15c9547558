"""Texts of prompts and completions stay where they are; every other gather is real, or ranks would deadlock."""

from types import ModuleType

import pytest
import torch.distributed as dist
from forks import on_gloo_ranks

from trl_multinode.rollouts.text_logging import TextLogging, gather_to_main

RANKS = 3


def all_gathered(value: list) -> list:
    """What accelerate's `gather_object` does."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return [row for part in parts for row in part]


class Traffic:
    """Counts what crosses between the ranks."""

    def __init__(self, monkeypatch):
        self.values: list = []
        for name, position in (("all_gather_object", 1), ("gather_object", 0)):
            monkeypatch.setattr(dist, name, self._counted(getattr(dist, name), position))

    def _counted(self, real, position: int):
        def call(*args, **kwargs):
            self.values.append(args[position])
            return real(*args, **kwargs)

        return call


def a_step(rank: int, keep: bool) -> dict:
    """The gathers of TRL's `_generate_and_score_completions`, with a reward that gathers for itself."""
    traffic = Traffic(pytest.MonkeyPatch())
    trl = ModuleType("trl")
    trl.gather_object = real = all_gathered
    texts = TextLogging(trl, keep)
    prompts, completions = [f"prompt {rank}"], [f"completion {rank}"] * rank
    with texts.during_scoring():
        before = trl.gather_object(["before"])  # no texts are known yet
        texts.remember(prompts, completions)
        # equal, but not the same object: a reward's own
        own = trl.gather_object([f"prompt {rank}"])
        logged = [trl.gather_object(prompts), trl.gather_object(completions)]
        metrics = trl.gather_object([rank])
    after = trl.gather_object(prompts)  # the next step's, or somebody else's
    return {
        "before": before, "own": own, "logged": logged, "metrics": metrics, "after": after,
        "restored": trl.gather_object is real, "texts_sent": sum(completions is v for v in traffic.values),
    }  # fmt: skip


@pytest.mark.parametrize("keep", [False, True])
def test_only_the_main_process_has_texts_and_all_other_gathers_stay_real(tmp_path, keep):
    main, *others = results = on_gloo_ranks(lambda rank: a_step(rank, keep), RANKS, tmp_path)
    texts = [
        ["prompt 0", "prompt 1", "prompt 2"],
        ["completion 1", "completion 2", "completion 2"],
    ]
    assert main["logged"] == (texts if keep else [[], []])
    assert [other["logged"] for other in others] == [[[], []]] * 2
    for result in results:
        assert result["before"] == ["before"] * RANKS
        assert result["own"] == result["after"] == [f"prompt {rank}" for rank in range(RANKS)]
        assert result["metrics"] == [0, 1, 2]
        assert result["restored"]
        assert result["texts_sent"] == (1 if keep else 0)


def test_a_single_process_keeps_its_own_rows():
    rows = ["a", "b"]
    assert gather_to_main(rows) is rows


def test_an_exception_while_scoring_restores_the_gather():
    trl = ModuleType("trl")
    trl.gather_object = real = lambda value: ["real"]
    texts = TextLogging(trl, keep=False)
    with pytest.raises(ZeroDivisionError), texts.during_scoring():  # noqa: PT012
        texts.remember(["p"], ["c"])
        raise ZeroDivisionError
    assert trl.gather_object is real
