"""TRL's generation seam on engines that are stubs: nothing runs, every request is kept."""

from types import SimpleNamespace

import numpy as np

from trl_multinode.engine.client import EngineClient, Rollout
from trl_multinode.node_settings import NodeSettings
from trl_multinode.rollouts.generation import NodeGeneration
from trl_multinode.rollouts.rounds import Rounds
from trl_multinode.rollouts.seeds import RowSeeds
from trl_multinode.run.phases import Phases
from trl_multinode.weights.timings import SyncTimings
from trl_multinode.wire.messages import WeightVersion

A, B, C = [1, 2], [1, 3], [4]  # prompts


class StubClient:
    name = "engine 0 of node 1"
    check_version = EngineClient.check_version

    def __init__(self, truncated_logprobs: str = ""):
        self.ready = SimpleNamespace(truncated_logprobs=truncated_logprobs)


class StubEngines:
    """Completion i of a request with seed s is `[s + i, prompt length]`, so that rows show where they came from."""

    max_model_len = 8

    def __init__(self):
        self.calls: list[SimpleNamespace] = []
        self.version: WeightVersion | None = None
        self.client = StubClient()

    def __getitem__(self, index: int) -> StubClient:
        return self.client

    def __iter__(self):
        return iter([self.client])

    def generate(self, requests, max_tokens, sampling, min_update):
        call = SimpleNamespace(
            requests=requests, max_tokens=max_tokens, sampling=sampling, min_update=min_update
        )
        self.calls.append(call)
        version = self.version or WeightVersion(min_update, 0)
        return [[self._row(r, i, version) for i in range(r.num_completions)] for r in requests]

    @staticmethod
    def _row(request, index: int, version: WeightVersion) -> Rollout:
        tokens = np.array(
            [((request.seed or 0) + index) % 2**31, len(request.prompt)], dtype=np.int32
        )
        return Rollout(tokens, np.array([-0.5, np.nan], dtype=np.float32), version, 0)


class StubHost:
    def __init__(self, settings: NodeSettings):
        self.settings = settings
        self.updates = self
        self.phases = Phases()
        self.engines = StubEngines()
        self.synced: list[WeightVersion] = []
        self.whole = 0  # times that frozen weights were to be sent again
        self.step = lambda: 17
        self.topology = "Rank 3 (node 1)"

    def align(self):
        pass

    def engines_to_restore(self):
        return []

    def wait_for_engines(self):
        pass

    def meet(self, lost=()):
        self.align()
        return False

    def start_engines(self, model, processing_class, keywords):
        self.keywords = keywords
        return self.engines

    def send_everything(self):
        self.whole += 1

    def expect_after(self, version):
        self.expected = WeightVersion(version.update + 1, self.step())

    def sync(self, version):
        assert version == self.expected
        self.synced.append(version)
        return SyncTimings(num_buckets=2)


def build(
    rank: int = 0,
    rollout_seed: int | None = None,
    truncated_logprobs: str = "",
    max_staleness: int = 0,
    ahead_engines: StubEngines | None = None,
    **keywords,
) -> NodeGeneration:
    host = StubHost(NodeSettings(rollout_seed=rollout_seed, max_staleness=max_staleness))
    host.updates.ahead_engines = ahead_engines
    host.updates.engines.client = StubClient(truncated_logprobs)
    accelerator = SimpleNamespace(process_index=rank, wait_for_everyone=lambda: None)
    return NodeGeneration(
        host=host, model=None, accelerator=accelerator, processing_class=None, **keywords
    )


def rounds_of(
    stream, max_staleness: int = 1, oldest_rounds: int = 1, rank: int = 0, open_groups=None
) -> Rounds:
    """Rounds of a rank whose rows have no seeds, without the rest of its generation."""
    generation = SimpleNamespace(
        accelerator=SimpleNamespace(process_index=rank), seeds=RowSeeds(None, rank), sampling={},
        max_completion_length=None,
    )  # fmt: skip
    settings = SimpleNamespace(
        max_staleness=max_staleness, oldest_rounds=oldest_rounds, in_flight=True
    )
    return Rounds(generation, settings, stream, open_groups)


def lag(generation) -> tuple[float, float]:
    """Mean age of the round's tokens, in rounds and in optimizer steps."""
    return generation.ages.rounds_mean, generation.ages.steps_mean


def asked(generation) -> list[tuple[list[int], int]]:
    return [
        (request.prompt, request.num_completions)
        for request in generation.engines.calls[-1].requests
    ]
