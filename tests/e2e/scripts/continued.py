"""Runs that are killed and go on, or run through. Usage: continued.py FOLDER JOBS_JSON

A job is a trainer; several run one after the other. Of its settings, `name` is its results'; `kill_at` (optimizer
step) ends every rank by SIGKILL right after that step's checkpoint, `kill_inside` in the middle of writing it,
`kill_deleting` the rank that then deletes an older one, when two of its files are gone; `signals` are lists of rank,
optimizer steps done, name and target of a signal, which the rank sends its launcher or itself while it scores; `slow`
are seconds for which every rank then scores; `fill` are the optimizer steps done at which rank 0 fills the disk of
`output`, `resume` goes to `train()`;
`copy_of` is a checkpoint that it resumes from a copy of, `without_rollouts` (ranks)
removes their file from the copy; `best` is the checkpoint that the copy names as the best one and that is loaded at
the end, with the model's differences from it in NAME_best_rank<r>.json;
`seed_of_model` draws its first weights, `frozen` are the beginnings of names that are not trained; `lora` trains an
adapter; `prompts` is the size of the dataset; "{node}" in `output` is the node's number.
Leaves NAME_rank<r>.json, written anew at every log: per optimizer step loss and norm of the gradient, the learning
rates, per generation round what the reward function saw.
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")

import torch
from common import RANK, Recorder, make_trainer, write_result
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from multinode_kit.models import tiny_qwen2

folder, jobs_json = sys.argv[1:]

# a rank's device is `cpu:0`, a name at which torch restores no tensors of DDP's and FSDP's optimizers
torch.serialization.register_package(
    0, lambda _: None, lambda storage, place: storage if place.startswith("cpu:") else None
)


class Rounds(Recorder):
    """Which rows were scored at which optimizer step, how old they were, and which weights the engine had."""

    def __init__(self, signals: list, slow: float, fill: int | None):
        super().__init__()
        self.rounds: list[dict] = []
        self.signals, self.slow, self.fill = signals, slow, fill

    def __call__(self, prompts, completion_ids, **_):
        if self.trainer.model.training:
            generation = self.trainer.vllm_generation
            rows = [[p, list(ids)] for p, ids in zip(prompts, completion_ids, strict=True)]
            self.stop(self.trainer.state.global_step)
            step, ages = self.trainer.state.global_step, generation.ages
            lag = [ages.rounds_mean, ages.steps_mean]
            self.rounds.append({"step": step, "lag": lag, "rows": rows})
        return [sum(token < 150 for token in ids) / len(ids) for ids in completion_ids]

    def stop(self, step: int) -> None:
        for rank, when, name, target in self.signals:
            if when == step and rank == RANK:
                os.kill(
                    os.getppid() if target == "launcher" else os.getpid(), getattr(signal, name)
                )
        if any(when == step for _, when, *_ in self.signals):
            time.sleep(self.slow)
        if self.fill == step and RANK == 0:
            fill_disk(Path(self.trainer.args.output_dir, "filler"))


def fill_disk(path: Path) -> None:
    with suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


class Record(TrainerCallback):
    """Written at every log, because a killed run cannot write at its end."""

    def __init__(self, name: str, rounds: Rounds, kill_at: int | None):
        self.name, self.rounds, self.kill_at = name, rounds, kill_at

    def on_log(self, args, state, control, **_):
        steps = {
            entry["step"]: [entry["loss"], entry["grad_norm"]]
            for entry in state.log_history
            if "loss" in entry
        }
        write_result(
            folder,
            self.name,
            rounds=self.rounds.rounds,
            steps=steps,
            rates=[entry["learning_rate"] for entry in state.log_history if "loss" in entry],
            left_over=[
                thread.name for thread in threading.enumerate() if thread.name == "open-groups"
            ],
            difference=self.rounds.trainer._monitor.last,
            counters=counters(self.rounds.trainer.model_wrapped),
            adam_steps=adam_steps(self.rounds.trainer.optimizer),
            rehearsed=self.rounds.trainer.rehearsed,
        )

    def on_save(self, args, state, control, **_):
        if state.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def adam_steps(optimizer) -> list[int]:
    """The different counts of its states, each of a parameter or of several."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return sorted({int(state["step"]) for state in optimizer.state.values() if "step" in state})


def counters(engine) -> dict:
    """DeepSpeed's numbers and flags; autograd counts all backward passes of the process."""
    if not hasattr(engine, "zero_optimization"):
        return {}
    zero = engine.optimizer
    found = [
        vars(engine),
        vars(zero),
        vars(zero._backward_hook_state),
        {"loss_scale": zero.loss_scale},
    ]
    return {
        name: value for part in found for name, value in part.items()
        if isinstance(value, int | float | bool) and "graph_task_id" not in name
    }  # fmt: skip


def count_rehearsals(trainer) -> None:
    """How many rows of which length the engines and the model took before step 1."""
    trainer.rehearsed = []
    generate = trainer.vllm_generation.rehearse

    def counted(prompts, num_tokens):
        trainer.rehearsed.append([len(prompts), len(prompts[0]) + num_tokens])
        generate(prompts, num_tokens)

    trainer.vllm_generation.rehearse = counted


def kill_while_saving(trainer, step: int | None) -> None:
    save = trainer._save_optimizer_and_scheduler

    def cut_off(output_dir):
        if trainer.state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        save(output_dir)

    trainer._save_optimizer_and_scheduler = cut_off


def kill_while_deleting(trainer, step: int | None) -> None:
    rmtree = shutil.rmtree

    def cut_off(path, *args, **keywords):
        if trainer.state.global_step == step and "checkpoint-" in str(path):
            for file in ("latest", "model.safetensors"):
                Path(path, file).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        rmtree(path, *args, **keywords)

    shutil.rmtree = cut_off


def copy(trainer, checkpoint: str, name: str, without_rollouts: list[int]) -> str:
    """Into a folder of this job; made by the main process."""
    target = Path(folder, f"{name}-{Path(checkpoint).name}")
    if trainer.accelerator.is_main_process:
        shutil.copytree(Path(folder, checkpoint), target)
        for rank in without_rollouts:
            (target / f"rollouts_rank{rank}.safetensors").unlink()
    trainer.accelerator.wait_for_everyone()
    return str(target)


def name_best(checkpoint: str, best: str) -> None:
    """Let a checkpoint name the best one, as an evaluation does."""
    state = Path(checkpoint, "trainer_state.json")
    named = json.loads(state.read_text()) | {"best_model_checkpoint": str(Path(folder, best))}
    state.write_text(json.dumps(named))


def compare_with_best(trainer, name: str, best: str) -> None:
    own = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    saved = load_file(Path(folder, best, "model.safetensors"))
    differences = {key: float((own[key].float() - saved[key]).abs().max()) for key in saved}
    write_result(folder, f"{name}_best", differences=differences)


def run(name: str, prompts: int, output: str, kill_at=None, kill_inside=None, kill_deleting=None, resume=None,
        copy_of=None, without_rollouts=(), signals=(), slow=0.0, fill=None, seed_of_model=0, frozen=(), lora=False,
        best=None, **settings) -> None:  # fmt: skip
    rounds = Rounds(signals, slow, fill)
    output = output.format(node=os.environ.get("GROUP_RANK", "0"))
    unset_hf_deepspeed_config()  # the job before left it, and under it a model begins with other weights
    model = tiny_qwen2(tied=False, seed=seed_of_model)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not parameter_name.startswith(tuple(frozen)))
    if lora:
        settings["peft_config"] = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(
        model, rounds, f"{folder}/{output}", [f"{i} + {i + 1} =" for i in range(prompts)],
        rollout_seed=5, **{"save_strategy": "steps", "learning_rate": 1e-2} | settings,
    )  # fmt: skip
    rounds.trainer = trainer
    trainer.add_callback(Record(name, rounds, kill_at))
    count_rehearsals(trainer)
    kill_while_saving(trainer, kill_inside)
    kill_while_deleting(trainer, kill_deleting)
    if copy_of is not None:
        resume = copy(trainer, copy_of, name, without_rollouts)
    if best is not None:
        # transformers wants an evaluation with it
        trainer.args.load_best_model_at_end = True
        name_best(resume, best)
    print(f"JOB {name} on rank {RANK}", flush=True)
    trainer.train(resume_from_checkpoint=resume)
    if best is not None:
        compare_with_best(trainer, name, best)
    trainer.host.close()
    Path(folder, output, "filler").unlink(missing_ok=True)


for job in json.loads(jobs_json):
    run(**job)
