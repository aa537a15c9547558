"""Trains while engines die, one trainer after the other. Usage: restarted.py FOLDER JOBS_JSON

A job has a `name`, `deaths`, settings of the trainer, and perhaps `slow_restart`: seconds by which a restart
takes longer. A death has a `moment`, and kills engine 0 of node 1:

- `idle@2`: in the reward of training round 2;
- `generate@2`: when rows of round 2 are under way, or in the `call`-th generation of that round;
- `sync@2`: when the sync of update 2 has gathered its second bucket;
- `eval@0`: when rows of the evaluation after step `0` are under way;
- `ahead@2`: in round 2, while the rows of round 3 are made;
"""

import json
import os
import signal
import sys
import threading
import time
from functools import partial

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")

import common
from common import RANK, make_trainer, write_result
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from multinode_kit.faults import HOOK, Faults
from multinode_kit.models import tiny_qwen2
from multinode_kit.waiting import wait_until
from trl_multinode import GRPOTrainer
from trl_multinode.host import NodeHost

folder, jobs_json = sys.argv[1:]
ROWS_LIMIT_S = 5.0
PER_NODE = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
KILLER = max(0, int(os.environ["WORLD_SIZE"]) - PER_NODE)  # local main process of the last node


class Rows:
    """A reward function that keeps the rows of every round, and kills an idle engine."""

    __name__ = "rows"

    def __init__(self, deaths: list[dict]):
        self.deaths = deaths
        self.rounds: list = []
        self.trained = 0

    def __call__(self, prompts, completion_ids, **_):
        if self.trainer.model.training:
            self.kill("idle", self.trained)
            self.trained += 1
        self.rounds.append([list(prompts), [list(ids) for ids in completion_ids]])
        versions = [row.version.step for row in self.trainer.vllm_generation.rows]
        self.rounds[-1].append(versions)
        return [sum(ids) % 7 + len(set(ids)) for ids in completion_ids]

    def kill(self, moment: str, number: int) -> None:
        """Kill the engine of each death that is due, in the local main process of its node."""
        for death in list(self.deaths):
            if death["moment"] == f"{moment}@{number}" and RANK == KILLER:
                self.deaths.remove(death)
                kill(self.trainer.host, death)


def kill(host: NodeHost, death: dict) -> None:
    fleet = host.updates._fleet
    # the process that an earlier death has begun
    while not fleet.restarts.is_ready(0):
        time.sleep(0.01)
    process = fleet._processes[0]
    print(f"KILL {death} pid {process.pid}", flush=True)
    os.kill(process.pid, signal.SIGKILL)
    # until its owner has noticed, which looks twice a second: a step may be shorter
    while fleet._processes[0] is process:
        time.sleep(0.01)


def watch_rows(rows: Rows) -> None:
    """Make `generate` kill engines while it waits for rows, in training and in evaluation."""
    generation, engines = rows.trainer.vllm_generation, rows.trainer.host.updates.engines
    generate, ahead = engines.generate, rows.trainer.host.updates.ahead_engines

    calls: dict = {}

    def watched(*args):
        moment, number = (
            ("generate", rows.trained)
            if rows.trainer.model.training
            else ("eval", rows.trainer.host.step())
        )
        calls[moment, number] = calls.get((moment, number), 0) + 1
        due = [
            d
            for d in rows.deaths
            if d["moment"] == f"{moment}@{number}" and d.get("call", 1) == calls[moment, number]
        ]
        if due and RANK == KILLER:
            threading.Thread(
                target=kill_later, args=(rows, moment, number, engines), daemon=True
            ).start()
        return generate(*args)

    engines.generate = watched
    if generation.rounds is not None and not rows.trainer.host.settings.in_flight:
        begin_following = generation.rounds.begin_following

        def begun(version):
            begin_following(version)
            # on a busy machine they may be done already
            wait_until(lambda: ahead.rows_left > 0, ROWS_LIMIT_S)
            rows.kill("ahead", rows.trained)

        generation.rounds.begin_following = begun


def more_turns_on_even_ranks(prompts, trainer) -> dict:
    """A user's rollout: rank 0 of a node generates three times, rank 1 once."""
    ids = trainer.processing_class(text=prompts)["input_ids"]
    generate = trainer.vllm_generation.generate
    _, completions, logprobs, _ = generate(prompts=ids, images=None, num_generations=4)
    completions, logprobs = (
        [list(c) for c in completions],
        [[top[0] for top in row] for row in logprobs],
    )
    for _ in range(0 if RANK % 2 else 2):
        longer = [prompt + completion for prompt, completion in zip(ids, completions, strict=True)]
        _, more, theirs, _ = generate(prompts=longer, images=None, num_generations=1)
        for row, new in enumerate(more):
            completions[row] += list(new)
            logprobs[row] += [top[0] for top in theirs[row]]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs}


def kill_later(rows: Rows, moment: str, number: int, engines) -> None:
    while not engines.rows_left:
        time.sleep(0.002)
    rows.kill(moment, number)


def watch_buckets(rows: Rows) -> None:
    sync = rows.trainer.host.updates._sync
    source, third = sync._source, sync.buckets[min(2, len(sync.buckets) - 1)]
    gathering = source.gathering

    def begun(bucket, holder):
        if bucket is third:
            rows.kill("sync", rows.trainer.vllm_generation.version.update)
        return gathering(bucket, holder)

    source.gathering = begun


def run(
    name: str, deaths: list[dict], eval_prompts: int = 0, slow_restart: float = 0.0, **settings
) -> None:
    engine = os.environ.get(HOOK, "")
    if slow_restart:  # a restart reads the variable
        os.environ[HOOK] = " ".join((engine, *Faults().slow_restart(slow_restart).words))
    unset_hf_deepspeed_config()  # the job before left it, and under it a model begins with other weights
    rows = Rows(deaths)
    settings = {
        "rollout_seed": 5, "learning_rate": 1e-2, "max_steps": 4, "per_device_train_batch_size": 4,
        "sync_bucket_mb": 0.04, "max_completion_length": 16,
    } | settings  # fmt: skip
    more = [f"{i} - 1 =" for i in range(eval_prompts)] or None
    model = tiny_qwen2(tied=False)
    if settings.pop("turns", False):
        common.GRPOTrainer = partial(GRPOTrainer, rollout_func=more_turns_on_even_ranks)
    trainer = make_trainer(
        model,
        rows,
        f"{folder}/run-{name}",
        [f"{i} + {i + 1} =" for i in range(32)],
        more,
        **settings,
    )
    rows.trainer, common.GRPOTrainer = trainer, GRPOTrainer
    watch_rows(rows)
    watch_buckets(rows)
    trainer.train()
    log = trainer.state.log_history
    write_result(
        folder,
        name,
        rounds=rows.rounds,
        losses=[
            [entry["loss"], entry["reward"], entry["grad_norm"]] for entry in log if "loss" in entry
        ],
        restarts=[entry.get("engine/restarts") for entry in log if "loss" in entry],
        evals=[entry["eval_reward"] for entry in log if "eval_reward" in entry],
        left=len(rows.deaths),
    )
    trainer.host.close()
    if slow_restart:
        os.environ[HOOK] = engine
    print(f"JOB DONE {name}", flush=True)


for job in json.loads(jobs_json):
    run(**job)
