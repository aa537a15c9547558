"""`max_staleness` 0 and 1 side by side, a trainer for each setting, in one process. Usage: overlapped.py FOLDER CASES

CASES is JSON: name -> settings; of these `prompts` is the size of the dataset, `iterable` makes a stream of it. The
engine is the fake one's model in this process, so that a trainer costs a second; weights that come while it generates
are noted, which the real server would hide by waiting. Leaves NAME_rank0.json with both runs.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")

from types import SimpleNamespace

import numpy as np
import torch
from common import make_trainer, write_result

from trl_multinode.engine.client import EngineClient, Rollout
from trl_multinode.host import NodeHost
from trl_multinode.testing.fake_engine import FakeBackend, FakeRow, Freezer
from trl_multinode.testing.models import tiny_qwen2
from trl_multinode.weights.timings import SyncTimings
from trl_multinode.wire.messages import WeightVersion

folder, cases_json = sys.argv[1:]
torch.set_num_threads(1)


class Engine(FakeBackend):
    """The fake engine's arithmetic, with weights that may not change while it works."""

    def __init__(self, model):
        self._model = tiny_qwen2(tied=False).eval()
        self._eos, self._context, self._tokens = {1}, 2048, 0
        self._random = torch.Generator().manual_seed(0)
        self._freezer, self._token_delay_s = Freezer(), 0.0
        self._trainer = model
        self._running: list[str] = []
        self.version = WeightVersion()
        self.broken_rules: list[str] = []
        self.calls: list[list] = []  # who asked (main, ahead), weight update, of the call's beginning

    @contextmanager
    def working(self, who: str):
        self._running.append(who)
        yield
        self._running.remove(who)

    def rows(self, request, max_tokens: int, sampling: dict) -> list[FakeRow]:
        rows = [FakeRow(request.prompt) for _ in range(request.num_completions)]
        self._complete(rows, max_tokens, sampling, request.seed, ended=lambda: None)
        return rows

    def update(self, version: WeightVersion) -> None:
        if self._running:
            self.broken_rules.append(f"update {version.update} came while {self._running} generated")
        self._model.load_state_dict(self._trainer.state_dict())
        self.version = version


class Connection:
    """What a rank holds of it; the look-ahead's thread has one of its own."""

    max_model_len = 2048
    name = "engine 0 of node 0"
    check_version = EngineClient.check_version

    ready = SimpleNamespace(truncated_logprobs="")
    rows_left = rows_under_way = 0
    lost, tolerant = None, False

    def __init__(self, engine: Engine, who: str):
        self._engine, self._who = engine, who

    def expect(self, version: WeightVersion) -> None:
        """All versions are accepted."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator["Connection"]:
        yield self

    def __getitem__(self, index: int) -> "Connection":
        return self

    def generate(self, requests, max_tokens, sampling, min_update):
        engine = self._engine
        with engine.working(self._who):
            engine.calls.append([self._who, engine.version.update])
            version = engine.version
            if self._who == "ahead":
                time.sleep(0.02)  # so that a rank which does not wait is seen
            groups = [engine.rows(request, max_tokens, sampling) for request in requests]
        return [[self._rollout(row, version) for row in rows] for rows in groups]

    @staticmethod
    def _rollout(row, version: WeightVersion) -> Rollout:
        return Rollout(np.array(row.tokens, dtype=np.int32), np.array(row.logprobs, dtype=np.float32), version, 0)

    def post_score(self, tokens, temperature) -> Rollout:
        return self._scores(list(tokens))

    def scored(self, request_id: Rollout) -> Rollout:
        return request_id

    @torch.no_grad()
    def _scores(self, tokens: list[int]) -> Rollout:
        ids = torch.tensor([tokens])
        scores = self._engine._model(ids).logits[0, :-1].float().log_softmax(-1)
        logprobs = scores.gather(1, ids[0, 1:, None])[:, 0]
        return Rollout(ids[0, 1:].numpy(), logprobs.numpy(), self._engine.version, 0)


def start_engines(host, model, processing_class, keywords):
    host._model, host._dtype = model, torch.float32
    host.engine = Engine(model)
    host.ahead_engines = Connection(host.engine, "ahead")
    host.engines = Connection(host.engine, "main")
    return host.engines


def sync(host, version) -> SyncTimings:
    host.engine.update(version)
    return SyncTimings()


NodeHost.start_engines, NodeHost.sync = start_engines, sync
NodeHost._end_engines = lambda host: None


class Rounds:
    """A reward function that keeps what it saw, and how old it was."""

    __name__ = "rounds"

    def __init__(self):
        self.train: list[dict] = []
        self.evals: list[dict] = []

    def __call__(self, prompts, completion_ids, **_):
        generation = self.trainer.vllm_generation
        seen = {
            "step": self.trainer.state.global_step,
            "lag": generation.lag,
            "made_by_step": generation.used.version.step,
            "rows": [[prompt, list(ids)] for prompt, ids in zip(prompts, completion_ids, strict=True)],
        }
        (self.train if self.trainer.model.training else self.evals).append(seen)
        return [sum(token < 150 for token in ids) / len(ids) for ids in completion_ids]


def run(name: str, staleness: int, prompts: int, **settings) -> dict:
    rounds = Rounds()
    texts = [f"{i} + {i + 1} =" for i in range(prompts)]
    settings = {"max_completion_length": 6, "learning_rate": 1e-2, "rollout_seed": 5} | settings
    settings["per_device_train_batch_size"] = 4
    if settings.get("eval_strategy"):
        settings |= {"eval_prompts": texts[:2], "per_device_eval_batch_size": 4}
    trainer = make_trainer(
        tiny_qwen2(tied=False), rounds, f"{folder}/{name}{staleness}", texts, max_staleness=staleness, **settings
    )
    rounds.trainer = trainer
    differences = []
    judge = trainer._monitor._judge
    trainer._monitor._judge = lambda difference: (judge(difference), differences.append(trainer._monitor.last))
    trainer.train()
    return {
        "rounds": rounds.train,
        "evals": rounds.evals,
        "steps": trainer.state.global_step,
        "calls": trainer.host.engine.calls,
        "broken_rules": trainer.host.engine.broken_rules,
        "differences": differences,
        "left_over": [thread.name for thread in threading.enumerate() if thread.name == "look-ahead"],
    }


for name, settings in json.loads(cases_json).items():
    write_result(folder, name, runs=[run(name, staleness, **settings) for staleness in (0, 1)])
