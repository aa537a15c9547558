"""Several engines on a node, and tensor parallelism: parity on each engine, requests where there is room."""

import pytest
from test_conformance import PROMPTS, SAMPLING

from trl_multinode.engine.node_engines import PromptRequest
from trl_multinode.testing.engines import REAL, Trainer, running_engines, worst_difference
from trl_multinode.testing.faults import Faults
from trl_multinode.testing.models import tiny_qwen2

pytestmark = pytest.mark.engine


def generate(engines, num_requests: int = 2):
    requests = [PromptRequest(PROMPTS[i % 2], 2, seed=i) for i in range(num_requests)]
    return engines.generate(requests, 8, SAMPLING, 0)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_two_workers_of_a_tensor_parallel_engine_hold_the_trainers_weights(tied, tmp_path):
    model = tiny_qwen2(300, tied)
    with running_engines(model, tmp_path, REAL, tensor_parallel_size=2) as engines:
        trainer = Trainer(model, engines)
        for _ in range(2):
            trainer.perturb()
            trainer.send()
        assert worst_difference(trainer, generate(engines), PROMPTS) < 1e-3
        trainer.perturb()
        assert worst_difference(trainer, generate(engines), PROMPTS) > 0.1


def test_two_engines_both_hold_the_weights_and_the_slow_one_gets_less(tmp_path):
    model = tiny_qwen2(300)
    with running_engines(
        model, tmp_path, REAL, num_engines=2, faults=Faults().slow_engine(1, 1.0), window=2
    ) as engines:
        trainer = Trainer(model, engines)
        trainer.perturb()
        trainer.send()
        for engine in (0, 1):
            scored = engines.score([5, 6, 7, 299], engine).logprobs
            assert scored == pytest.approx(trainer.logprobs([5], [6, 7, 299]).numpy(), abs=1e-3)
        rows = [row for group in generate(engines, 40) for row in group]
        assert {row.engine for row in rows} == {0, 1}
        later = rows[len(rows) // 4 :]
        assert sum(row.engine == 0 for row in later) >= 0.7 * len(later)
        assert worst_difference(trainer, generate(engines), PROMPTS) < 1e-3
