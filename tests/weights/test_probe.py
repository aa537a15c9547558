"""The probe after the first update: an engine that serves other weights is named before it generates anything."""

from types import SimpleNamespace

import pytest

from multinode_kit.engines import FAKE, SyncDriver, running_engines
from multinode_kit.faults import Faults
from multinode_kit.models import tiny_qwen2
from trl_multinode.errors import LogprobDivergenceError
from trl_multinode.weights.probe import probe_engines


def test_an_engine_that_says_it_loaded_and_did_not_is_named_unless_the_check_is_off(tmp_path):
    model, rank = tiny_qwen2(300), SimpleNamespace(rank=4)
    with running_engines(model, tmp_path, Faults().lie_about_load(1).engine(FAKE)) as engines:
        trainer = SyncDriver(model, engines)
        trainer.perturb()
        trainer.send()
        with pytest.raises(
            LogprobDivergenceError,
            match=r"engine 0 .*rank 4.*limit 0\.02.*logprob_divergence_limit",
        ):
            probe_engines(model, engines, 0.02, rank)
        probe_engines(model, engines, 0.0, rank)
        trainer.send()
        probe_engines(model, engines, 0.02, rank)
        # A rank without engines only takes part in the forward, and the model keeps its mode
        probe_engines(model.train(), None, 0.02, rank)
        assert model.training
