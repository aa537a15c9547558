"""The longest rows of a run: their prompt, their completion, and the largest micro-batches of them."""

import pytest
from datasets import Dataset

from trl_multinode.rehearsal.rows import CANDIDATES, longest_prompt, longest_row, micro_batches


@pytest.mark.parametrize(
    ("prompt", "completion", "limit", "expected"),
    [
        (100, 50, 1000, (100, 50)),
        (100, None, 1000, (100, 900)),  # only the context bounds a completion
        (100, 950, 1000, (100, 900)),  # an engine ends a completion where its context ends
        (None, 200, 1000, (800, 200)),  # prompts of an environment: they may fill the context
        (None, None, 1000, (1, 999)),
        (1200, 50, 1000, (999, 1)),  # generation refuses this prompt; the rehearsal has no opinion
    ],
)
def test_the_longest_row_ends_where_the_first_limit_does(prompt, completion, limit, expected):
    assert longest_row(prompt, completion, limit) == expected


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("cap", "multiple", "most", "expected"),
    [
        (400, 1, 64, [(4, 100)]),  # four rows fill it
        (390, 1, 64, [(3, 100), (4, 97)]),  # three rows leave a quarter: also four shorter ones
        (100, 1, 64, [(1, 100)]),
        (150, 1, 64, [(1, 100), (2, 75)]),
        (400, 64, 64, [(3, 100)]),  # padded to 128
        (1000, 1, 2, [(2, 100)]),  # an optimizer step has no more rows
    ],
)
def test_the_largest_micro_batches_fill_their_limit(cap, multiple, most, expected):
    found = micro_batches(60, 40, cap, multiple, most)
    assert [(rows.count, rows.length) for rows in found] == expected
    assert all(rows.prompt > 0 and rows.completion > 0 for rows in found)


class Words:
    """A trainer whose tokens are words, over a dataset."""

    environment_factories = rollout_func = None

    def __init__(self, data, **fields):
        self.train_dataset = data
        vars(self).update(fields)

    def _tokenize_prompts(self, prompts):
        self.tokenized = len(prompts)
        return [prompt.split() for prompt in prompts], None, {}


@pytest.mark.nightly
def test_the_longest_prompt_is_found_among_those_with_the_most_bytes():
    prompts = [" ".join(["a"] * (i % 97 + 1)) for i in range(5000)] + ["a" * 500]
    trainer = Words(Dataset.from_dict({"prompt": prompts}))
    assert longest_prompt(trainer) == 97 and trainer.tokenized == CANDIDATES


@pytest.mark.nightly
@pytest.mark.parametrize(
    "trainer",
    [
        Words(Dataset.from_dict({"prompt": ["a"]}).to_iterable_dataset()),
        Words(Dataset.from_dict({"environment": ["a"]})),
        Words(Dataset.from_dict({"prompt": ["a"], "image": [0]})),
        Words(Dataset.from_dict({"prompt": ["a"]}), environment_factories={None: list}),
        Words(Dataset.from_dict({"prompt": ["a"]}), rollout_func=print),
    ],
)
def test_prompts_that_the_dataset_does_not_determine_have_no_known_length(trainer):
    assert longest_prompt(trainer) is None
