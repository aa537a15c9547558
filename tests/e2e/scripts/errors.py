"""Runs into an error. Usage: errors.py FOLDER CASE; the branches at the end are the cases."""

import sys
import time
from pathlib import Path
from unittest import mock

import torch
from common import RANK, WORLD, Recorder, make_trainer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import TrainerCallback

from multinode_kit.models import tiny_qwen2
from multinode_kit.waiting import wait_until

folder, case = sys.argv[1:]


class Poison(TrainerCallback):
    """Puts a NaN into the shard of rank 3 after the second optimizer step, before its checkpoint."""

    @torch.no_grad()
    def on_step_end(self, args, state, control, model, **_):
        if state.global_step == 2 and RANK == 3:
            model.model.layers[0].mlp.up_proj.weight.ds_tensor[0] = float("nan")


class Alone(TrainerCallback):
    """Calls a collective on rank 0 only, as a save in a callback of the main process does under ZeRO-3."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 1 and RANK == 0:
            self.trainer.save_model(f"{folder}/alone")


settings = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 3}
prompts = [f"{i} + {i + 1} =" for i in range(64)]
HANG_S = 600.0


def generate_slowly_on_rank_2(trainer) -> None:
    """A round in which rank 2 generates until the others wait for it, which they may not do in a collective."""
    engines, accelerator, host = trainer.vllm_generation.engines, trainer.accelerator, trainer.host
    generate, gather, align = engines.generate, accelerator.gather, host.updates.align
    others = [Path(folder, f"waits{rank}") for rank in range(WORLD) if rank != 2]
    generated = Path(folder, "generated")

    def slow(*args):
        rows = generate(*args)
        assert wait_until(lambda: all(path.exists() for path in others), HANG_S), others
        generated.touch()
        return rows

    def note_align():
        Path(folder, f"waits{RANK}").touch()
        align()

    def note_gather(value):
        Path(folder, f"waits{RANK}").touch()
        assert generated.exists(), "a collective began before rank 2 had generated"
        return gather(value)

    with (
        mock.patch.object(engines, "generate", slow if RANK == 2 else generate),
        mock.patch.object(host.updates, "align", note_align),
        mock.patch.object(accelerator, "gather", note_gather),
    ):
        trainer._begin_round()
        with trainer._aligned(host):
            trainer._generate(["1 + 2 ="] * 4)
    print("the slow round is done", flush=True)


if case == "small_dataset":
    # a config without weights: whoever opened a weights file would say that
    model = str(Path(folder) / "model")
    tiny_qwen2().config.save_pretrained(model)
    make_trainer(model, Recorder(), folder, prompts[:2], **settings)
elif case == "shuffled":
    model = str(Path(folder) / "model")
    tiny_qwen2().config.save_pretrained(model)
    order = prompts[::-1] if RANK // 2 else prompts
    make_trainer(model, Recorder(), folder, order, **settings)
elif case == "rates":  # changed after the trainer was built
    trainer = make_trainer(tiny_qwen2(), Recorder(), folder, prompts, **settings)
    trainer.args.learning_rate *= 1 + RANK
    trainer.train()
elif case == "leaves":
    record = Recorder()

    def exec_answers(prompts, completion_ids, trainer_state, **_):
        """What `exec` of a model's answer does some day."""
        if RANK == 1 and trainer_state.global_step == 1:
            sys.exit(0)
        return record(prompts, completion_ids)

    make_trainer(tiny_qwen2(), exec_answers, folder, prompts, **settings).train()
elif case == "alone":
    trainer = make_trainer(tiny_qwen2(), Recorder(), folder, prompts, **settings)
    trainer.add_callback(Alone(trainer))
    trainer.train()
elif case == "early":
    if RANK == 1:
        raise ValueError("on purpose")
    time.sleep(HANG_S)
elif case == "nan":
    keep = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer = make_trainer(tiny_qwen2(), Recorder(), folder, prompts, **settings, **keep)
    trainer.add_callback(Poison())
    trainer.train()
elif case.startswith("diverges"):  # the engine of rank 3 in its second round
    if "balanced" in case:
        settings["micro_batch_tokens"] = 128
    settings["gradient_accumulation_steps"] = 4 if "accumulated" in case else 1
    steps = Path(folder, f"steps{RANK}")
    trainer = make_trainer(tiny_qwen2(), Recorder(), folder, prompts, **settings)
    register_optimizer_step_pre_hook(
        lambda *_: print(trainer.state.global_step, file=steps.open("a"))
    )
    generate = trainer.vllm_generation.generate

    def wrong(*args, **kwargs):
        prompt_ids, completion_ids, logprobs, *rest = generate(*args, **kwargs)
        if RANK == 3 and trainer.state.global_step == 1:
            logprobs = [[[value - 3.0 for value in token] for token in row] for row in logprobs]
        return prompt_ids, completion_ids, logprobs, *rest

    trainer.vllm_generation.generate = wrong
    trainer.train()
else:
    trainer = make_trainer(
        tiny_qwen2(), Recorder(), folder, prompts, vllm_max_model_length=40, **settings
    )
    trainer.vllm_generation.sync_weights()
    rows = ["1 + 2 ="] * 4 if RANK != 2 else ["long " * 20] * 4
    with trainer.host.watch.guard():
        generate_slowly_on_rank_2(trainer)
        trainer._generate_and_score_completions([{"prompt": row} for row in rows])
