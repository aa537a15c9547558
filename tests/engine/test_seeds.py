"""A seeded request on a CPU takes back the draw of a step that did not complete its prompt."""

import pytest
import torch

from trl_multinode.vllm_worker.seeds import RewindingGenerators

pytestmark = pytest.mark.nightly  # test_conformance.py has a seeded prompt of several steps on vLLM


def draw(generators: RewindingGenerators) -> dict[int, float]:
    """As vLLM's sampler, which draws for every row."""
    return {
        row: torch.empty(1).exponential_(generator=generator).item()
        for row, generator in generators.items()
    }


def seeded(*seeds: int) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)}


def test_a_draw_that_was_taken_back_comes_again_and_others_go_on():
    generators, expected = RewindingGenerators(seeded(3, 4)), seeded(3, 4)
    first = draw(generators)
    rewind = generators.get(0)
    rewind.set_offset(rewind.get_offset() - 4)
    second = draw(generators)
    assert second[0] == first[0] and second[1] != first[1]
    for row in first:
        assert torch.empty(1).exponential_(generator=expected[row]).item() == first[row]


def test_rows_that_swap_places_keep_their_generators():
    generators, (a, b) = RewindingGenerators({}), seeded(3, 4).values()
    generators[0], generators[1] = a, b
    generators[0], generators[1] = generators.get(1), generators.get(0)
    assert generators.pop(0) is b and generators.get(1).generator is a and generators.get(0) is None
