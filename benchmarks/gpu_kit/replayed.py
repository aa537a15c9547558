"""Trainer on replayed completions for the arms `replay` and `balanced`: same rows, weights and gradient."""

import argparse
import time
from collections.abc import Callable

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_grad

from multinode_kit.replay import ReplayTrainer, log_normal_length
from trl_multinode import GRPOConfig

# of every layer, enough to reveal a wrong gradient
PER_LAYER = (
    "q_proj",
    "down_proj",
    "input_layernorm",
)


class Replayed(ReplayTrainer):
    """Trainer that times the training part of every step and keeps the gradient of the last step."""

    longest = 768

    def length_of(self, prompt: list[int], generation: int) -> int:
        return log_normal_length(prompt, generation, longest=self.longest)

    def start(self, gradient_file) -> None:
        self._gradient_file, self._step_s = gradient_file, []
        take_step = DeepSpeedEngine.step

        def spy(engine, *args, **kwargs):
            self._gradient = {
                name: safe_get_full_grad(parameter).float().cpu()
                for name, parameter in engine.module.named_parameters()
                if any(part in name for part in PER_LAYER)
            }
            return take_step(engine, *args, **kwargs)

        DeepSpeedEngine.step = spy

    def training_step(self, *args, **kwargs):
        start = time.perf_counter()
        loss = super().training_step(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._step_s.append(time.perf_counter() - start)
        return loss

    def figures(self) -> dict:
        """Write the gradient; return the training seconds of the last optimizer step, summed over micro-steps."""
        torch.save(self._gradient, self._gradient_file)
        micro_steps = self.args.gradient_accumulation_steps
        return {"train_s": sum(self._step_s[-micro_steps:])}


def build_replay(
    options: argparse.Namespace, settings: dict, reward: Callable, keywords: dict
) -> Replayed:
    """Build a trainer with learning rate 0: the weights stay, so the last gradient is independent of earlier steps."""
    changes = {"learning_rate": 0.0, "use_vllm": False, "generation_kwargs": None}
    cap = options.cap if options.arm == "balanced" else None
    args = GRPOConfig(**settings | changes, micro_batch_tokens=cap)
    Replayed.longest = options.completion
    trainer = Replayed(options.model, reward, args, **keywords)
    # replayed rows have log-probs
    trainer.use_vllm, trainer.vllm_importance_sampling_mode = (
        True,
        "token_truncate",
    )
    if cap:
        # rebuilt, because it has read the old mode
        trainer._balance = type(trainer._balance)(trainer)
    trainer.start(options.folder / "gradient.pt")
    return trainer
