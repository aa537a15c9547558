"""Agents that own their loop on several nodes, one trainer after another. Usage: harnesses.py FOLDER JOBS_JSON

A job is a trainer: `name` is its results', `kill` the optimizer step in which a session kills an engine, `resume` goes
to `train()`, all others are settings. Results: every session with its calls, every row that was trained, and the log.
"""

import json
import os
import signal
import sys
import threading
from functools import partial

import httpx
import torch
from common import RANK, make_trainer, write_result
from datasets import Dataset
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from multinode_kit.models import tiny_tokenizer
from trl_multinode.sessions.running import Sessions

folder, jobs_json = sys.argv[1:]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Agent:
    """A harness with one to three turns, of which the last rewrites the conversation in every third prompt.

    It fails after its calls for the prompts `fails`, and with `writes` it returns a text.
    """

    def __init__(self, kill: int | None, fails: list[int], writes: bool):
        self._kill, self._lock = kill, threading.Lock()
        self._fails, self._writes = fails, writes
        self.trainer = None

    async def __call__(self, session) -> float | str:
        number = session.row["number"]
        messages = session.row["prompt"]  # and it changes them, as agents do
        assert len(messages) == 1
        async with httpx.AsyncClient(timeout=600, base_url=session.base_url) as client:
            for turn in range(1 + number % 3):
                self._kill_at_times()
                if turn == 2:
                    messages[0] = {"role": "user", "content": f"summary of {number}"}
                answer = await client.post(
                    "/chat/completions",
                    json={"model": session.model, "messages": messages},
                    headers={"Authorization": f"Bearer {session.api_key}"},
                )
                answer.raise_for_status()
                message = answer.json()["choices"][0]["message"]
                messages += [message, {"role": "user", "content": "more"}]
        if number in self._fails:
            raise RuntimeError("a tool")
        text = "".join(one["content"] or "" for one in messages if one["role"] == "assistant")
        return text if self._writes else len(set(text)) / 10

    def _kill_at_times(self) -> None:
        with self._lock:
            step = self.trainer.state.global_step
            if self._kill is None or step < self._kill or RANK:
                return
            self._kill = None
            os.kill(self.trainer.vllm_generation.engines[0].ready.pid, signal.SIGKILL)


def recorded_sessions(found: list) -> None:
    """Keep the calls of every session that ends."""
    run = Sessions.run

    def kept(self, rows, *args):
        finished = run(self, rows, *args)
        for row, one in zip(rows, finished, strict=True):
            calls = [
                {
                    "prompt": call.prompt,
                    "tokens": call.rollout.tokens.tolist(),
                    "logprobs": call.rollout.logprobs.tolist(),
                    "versions": [[s.update, s.step, s.end] for s in call.rollout.versions],
                }
                for call in one.calls
            ]
            found.append(
                {"number": row["number"], "value": one.value, "calls": calls, "counts": one.counts}
            )
        return finished

    Sessions.run = kept


def recorded_rows(trainer, found: list, rehearsed: list) -> None:
    """Keep every row of every loss, as the model gets it, and the shapes of completions in a rehearsal."""
    compute_loss = trainer.compute_loss

    def kept(model, inputs, *args, **kwargs):
        if "tool_mask" not in inputs:
            rehearsed.append(inputs["completion_ids"].shape)
        elif torch.is_grad_enabled():
            for index in range(len(inputs["prompt_ids"])):
                prompt = inputs["prompt_ids"][index][inputs["prompt_mask"][index].bool()]
                real = inputs["completion_mask"][index].bool()
                found.append(
                    {
                        "step": trainer.state.global_step,
                        "prompt": prompt.tolist(),
                        "completion": inputs["completion_ids"][index][real].tolist(),
                        "mask": inputs["tool_mask"][index][real].tolist(),
                        "logprobs": inputs["sampling_per_token_logps"][index][real].tolist(),
                        "advantage": inputs["advantages"][index].item(),
                    }
                )
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = kept


def letters(completions, seen: list, **_) -> list[float]:
    """Reward of a text; no row without one has a reward."""
    texts = [completion[0]["content"] for completion in completions]
    seen += texts
    return [len(set(text)) / 10 for text in texts]


class Stop(TrainerCallback):
    """Ends the run after a step."""

    def __init__(self, step: int):
        self._step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= self._step


def run(
    name: str,
    prompts: int,
    kill: int | None = None,
    resume=None,
    evaluates: bool = False,
    fails: tuple = (),
    writes: bool = False,
    stop: int = 10**9,
    **settings,
) -> None:
    unset_hf_deepspeed_config()  # the job before left it, and under it a model begins with other weights
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    agent = Agent(kill, fails, writes)
    texts: list[str] = []
    reward = partial(letters, seen=texts) if writes else None
    if writes:
        reward.__name__ = "letters"

    def rows(count: int) -> Dataset:
        texts = [[{"role": "user", "content": f"task {number}"}] for number in range(count)]
        return Dataset.from_dict({"prompt": texts, "number": list(range(count))})

    sessions: list[dict] = []
    trained: list[dict] = []
    rehearsed: list[tuple] = []
    recorded_sessions(sessions)
    trainer = make_trainer(
        f"{folder}/model", reward, f"{folder}/{settings.pop('output', name)}", [],
        dataset=rows(prompts), eval_dataset=rows(4) if evaluates else None, processing_class=tokenizer,
        harness=agent, rollout_seed=5, micro_batch_tokens=512, vllm_max_model_length=512,
        vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0,
        max_completion_length=6, learning_rate=1e-3, **settings,
    )  # fmt: skip
    agent.trainer = trainer
    trainer.add_callback(Stop(stop))
    recorded_rows(trainer, trained, rehearsed)
    print(f"JOB {name} on rank {RANK}", flush=True)
    trainer.train(resume_from_checkpoint=resume)
    evaluation = trainer.evaluate() if evaluates else None
    write_result(
        folder, name, sessions=sessions, trained=trained, log=trainer.state.log_history,
        evaluation=evaluation, texts=texts, rehearsed=rehearsed, restarts=trainer.host.updates.num_restarts,
    )  # fmt: skip
    trainer.close()


for job in json.loads(jobs_json):
    run(**job)
