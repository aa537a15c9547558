"""A group with rows of several prompts is found before a round generates, wherever its rows lie."""

from types import SimpleNamespace

import pytest
import torch

from trl_multinode.errors import ConfigurationError
from trl_multinode.rollouts.one_prompt import check_one_prompt


def rows(*prompts) -> list[dict]:
    return [{"prompt": prompt} for prompt in prompts]


def check(of_ranks: list[list[dict]], size: int) -> list[str]:
    """Return the message of each rank."""
    given: dict[int, torch.Tensor] = {}
    texts: list[str] = []

    def gather(rank: int, digests: torch.Tensor) -> torch.Tensor:
        given[rank] = digests
        return torch.cat([given.get(other, digests) for other in range(len(of_ranks))])

    for _ in range(2):  # the second time, every rank's digests are known
        texts = []
        for rank, inputs in enumerate(of_ranks):
            accelerator = SimpleNamespace(
                device=torch.device("cpu"),
                process_index=rank,
                gather=lambda value, rank=rank: gather(rank, value),
            )
            try:
                check_one_prompt(accelerator, inputs, size)
                texts.append("")
            except ConfigurationError as error:
                texts.append(str(error))
    return texts


def test_groups_of_one_prompt_pass():
    chat = [{"role": "user", "content": "a"}]
    assert check([rows("a", "a", "b", "b"), rows("a", "a", "c", "c")], 2) == ["", ""]
    assert check([rows(chat, [dict(chat[0])])], 2) == [""]
    assert check([rows("a", "a"), rows("a", "a")], 4) == ["", ""]
    assert check([rows("a", "a", "a"), rows("b", "b", "b")], 3) == ["", ""]
    assert check([rows("a", "a", "b"), rows("b", "c", "c")], 2) == ["", ""]


def test_rows_of_a_group_on_one_rank():
    first, second = check([rows("a", "a", "b", "c"), rows("a", "a", "b", "b")], 2)
    assert second == "" and "row 2 has 'b' and row 3 has 'c'" in first


@pytest.mark.parametrize("size", [4, 6])
def test_a_group_that_straddles_ranks_fails_on_all_of_them(size):
    """Four rows a rank: q06 of rank 0 and q05 of rank 1 in one group, as seen with a shuffle without a seed."""
    half = size // 2
    texts = check([rows(*["q06"] * half), rows(*["q05"] * half)], size)
    assert all(texts)
    assert f"row 0 has 'q06' and row {half} has another rank's prompt" in texts[0]
    assert f"row 0 has another rank's prompt and row {half} has 'q05'" in texts[1]
