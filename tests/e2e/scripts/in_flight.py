"""Rounds in flight with completions of very different lengths. Usage: in_flight.py FOLDER JOBS_JSON

A job is a trainer; several run one after the other. Of its settings, `name` is its results'; `kill` ends every rank by
SIGKILL at an optimizer step: "begin" after its round has begun the next rows, "step" between its backward pass and its
update, "saving" in the middle of its checkpoint; `resume` goes to `train()`; `compare` is a round whose tensors are
compared with those of TRL's own method on the same rows; lengths are geometric with the mean `mean`; `lora`, `tools`
and `environment` (half of whose turns call a tool) are what they say. The job "losses" trains twice, see
in_flight_losses.py.
"""

import json
import os
import signal
import sys
import time
from copy import copy
from pathlib import Path

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")

import torch
import trl
from common import RANK, make_trainer, write_result
from datasets import Dataset
from deepspeed.runtime.engine import DeepSpeedEngine
from peft import LoraConfig
from scenarios import Adder, add
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from multinode_kit.models import tiny_qwen2
from multinode_kit.tool_model import CALL, DONE, TURN_END, tool_model, tool_tokenizer

folder, jobs_json = sys.argv[1:]


class Rounds:
    """Rows that a reward function was given, and how old their tokens were; prompts that the loss was given."""

    __name__ = "rounds"

    def __init__(self):
        self.rounds: list[dict] = []
        # before optimizer step -> prompt of each row of its losses
        self.trained: dict[int, list[str]] = {}

    def __call__(self, prompts, completions, completion_ids, **_):
        generation = self.trainer.vllm_generation
        if self.trainer.model.training and not self.trainer.compares:
            rows = generation.rows
            self.rounds.append({
                "step": self.trainer.state.global_step,
                "prompts": list(map(text_of, prompts)),
                "rows": [list(row) for row in completion_ids],
                "turns": [len(row) for row in completions],
                "made": [row.tokens.tolist() for row in rows],
                "versions": [[[s.update, s.step, s.end] for s in row.versions] for row in rows],
                "engines": [row.engine for row in rows],
                "lag": [generation.ages.rounds_mean, generation.ages.steps_mean],
                "current": generation.version.update,
                "open": len(generation.rounds.groups.ids) if generation.rounds else 0,
            })  # fmt: skip
        return [sum(token > 108 for token in ids) / len(ids) for ids in completion_ids]

    def record_losses(self) -> None:
        compute_loss = self.trainer.compute_loss

        def recorded(model, inputs, *args, **kwargs):
            if torch.is_grad_enabled():
                rows = zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
                prompts = [
                    self.trainer.processing_class.decode(ids[mask.bool()]) for ids, mask in rows
                ]
                self.trained.setdefault(self.trainer.state.global_step, []).extend(prompts)
            return compute_loss(model, inputs, *args, **kwargs)

        self.trainer.compute_loss = recorded


def text_of(prompt) -> str:
    return prompt if isinstance(prompt, str) else prompt[0]["content"]


class Replayed:
    """Stands for the generation object in TRL's own method: it returns the rows of a round."""

    def __init__(self, rows):
        self.rows = rows

    def sync_weights(self):
        raise AssertionError("the weights of this round were sent")

    def generate(self, prompts, **_):
        logprobs = [[[value] for value in row.logprobs.tolist()] for row in self.rows]
        return prompts, [row.tokens.tolist() for row in self.rows], logprobs, None


def compared(trainer, output: dict) -> list:
    """Names of the tensors that differ from those of TRL's own method on the rows that were taken, and both losses."""
    generation, trainer.compares = trainer.vllm_generation, True
    scores, trainer._loss_scores = trainer._loss_scores, copy(trainer._loss_scores)
    rows = [row for group in generation.rounds.taken for row in group.inputs]
    trainer.vllm_generation = Replayed(generation.rows)
    expected = trl.GRPOTrainer._generate_and_score_completions(trainer, rows)
    trainer.vllm_generation, trainer.compares = generation, False
    scored = {"old_per_token_logps", "importance_sampling_ratio"}  # by the loss itself
    assert expected.keys() - scored == output.keys() - {"origin", "present_logps"}
    different = [
        name
        for name, value in expected.items()
        if name not in scored and isinstance(value, torch.Tensor) and not value.equal(output[name])
    ]
    losses = []
    for tensors in (expected, output):
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        losses.append(trainer._compute_loss(trainer.model, dict(tensors)).item())
    trainer._loss_scores = scores
    return [different, losses, len(expected)]


class Record(TrainerCallback):
    """Written at every log, because a killed run cannot write at its end."""

    def __init__(self, name: str, rounds: Rounds):
        self.name, self.rounds = name, rounds

    def on_log(self, args, state, control, **_):
        trainer = self.rounds.trainer
        write_result(
            folder,
            self.name,
            rounds=self.rounds.rounds,
            trained=self.rounds.trained,
            log=state.log_history,
            compared=trainer.found,
            spot_check=trainer._monitor.last,
            rows_left=trainer.host.updates.ahead_engines.rows_left
            if trainer.host.updates.ahead_engines
            else 0,
        )


def kill(trainer, where: str, step: int) -> None:
    """End this process by SIGKILL in the middle of a method, before optimizer step `step` + 1."""

    def cut_off(owner, name: str) -> None:
        method = getattr(owner, name)

        def killed(*args, **kwargs):
            if trainer.state.global_step == step:
                if where == "begin":
                    method(*args, **kwargs)
                    # the engine gets them soon
                    while not trainer.vllm_generation.rounds.groups.rows_under_way:
                        time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args, **kwargs)

        setattr(owner, name, killed)

    match where:
        case "begin":
            cut_off(trainer.vllm_generation.rounds, "begin_following")
        case "step":
            cut_off(DeepSpeedEngine, "step")
        case "saving":
            cut_off(trainer, "_save_optimizer_and_scheduler")


def run(
    name: str,
    prompts: int,
    output: str,
    kill_at=None,
    resume=None,
    compare=None,
    mean=16,
    ignore_eos=False,
    min_tokens=0,
    lora=False,
    tools=False,
    environment=False,
    **settings,
) -> None:
    rounds = Rounds()
    sampling = {
        "allowed_token_ids": [1, *range(100, 99 + mean)],
        "ignore_eos": ignore_eos,
        "min_tokens": min_tokens,
    }
    unset_hf_deepspeed_config()  # the job before left it, and under it a model begins with other weights
    texts = [f"{i} + {i + 1} =" for i in range(prompts)]
    if tools or environment:
        tokenizer = tool_tokenizer()
        words = list(range(100, 99 + mean))
        sampling["allowed_token_ids"] = [
            *tokenizer.convert_tokens_to_ids([CALL, DONE, TURN_END]),
            *words,
        ]
        texts = [[{"role": "user", "content": text}] for text in texts]
        agent = {"environment_factory": Adder} if environment else {"tools": [add]}
        settings |= agent | {"processing_class": tokenizer}
    if lora:
        targets = ["q_proj", "v_proj", "down_proj"]
        settings["peft_config"] = LoraConfig(
            r=4, lora_alpha=8, use_rslora=True, target_modules=targets
        )
    trainer = make_trainer(
        tool_model(7.75 if tools else 8.0, words) if tools or environment else tiny_qwen2(tied=False),
        rounds, f"{folder}/{output}", texts,
        eval_prompts=["1 + 1 =", "2 + 2 ="] if "eval_strategy" in settings else None,
        rollout_seed=5, generation_kwargs=sampling, vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0, **{"learning_rate": 1e-2} | settings,
    )  # fmt: skip
    rounds.trainer, trainer.compares, trainer.found = trainer, False, None
    rounds.record_losses()
    trainer.add_callback(Record(name, rounds))
    if kill_at is not None:
        kill(trainer, *kill_at)
    score = trainer._generate_and_score_completions

    def scored(inputs):
        made = score(inputs)
        if trainer.model.training and len(rounds.rounds) - 1 == compare:
            trainer.found = compared(trainer, made)
        return made

    trainer._generate_and_score_completions = scored
    print(f"JOB {name} on rank {RANK}", flush=True)
    trainer.train(resume_from_checkpoint=resume)
    trainer.host.close()


for job in json.loads(jobs_json):
    if job["name"] == "losses":
        from in_flight_losses import compare as compare_losses

        texts = [f"{i} + {i + 1} =" for i in range(job["prompts"])]
        write_result(
            folder, "losses", **compare_losses(Path(folder), Dataset.from_dict({"prompt": texts}))
        )
    else:
        run(**job)
