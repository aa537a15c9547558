"""Rounds made ahead on real engines; then one update lies. Usage: stale.py FOLDER

Every step is a round; update k comes with step k - 1. Update 5, of step 4, is asked for by hand so that log-probs can
be compared before and after it; the round finds the engines there and moves nothing. Update 6, for the stale round of
step 5, loads nothing and says it did.
"""

import sys

import torch
from common import Recorder, make_trainer, write_result
from transformers import TrainerCallback

from trl_multinode.testing.models import tiny_qwen2

folder = sys.argv[1]
SEQUENCE = list(range(10, 40))


class Compare(TrainerCallback):
    """Engine and trainer on one sequence, and what the alarm saw, round by round."""

    def __init__(self):
        self.rounds: list[list] = []

    def on_step_end(self, args, state, control, **_):
        self.rounds.append([trainer.vllm_generation.lag[0], trainer._monitor.last])
        if state.global_step != 4:
            return
        generation = trainer.vllm_generation
        before = difference(generation.engines)
        generation.sync_weights()
        write_result(folder, rounds=self.rounds, before=before, after=difference(generation.engines))


def difference(engines) -> float:
    """Largest |engine - trainer| log-prob of the sequence; a ZeRO-3 forward is a collective."""
    ids = torch.tensor([SEQUENCE])
    with torch.no_grad():
        scores = trainer.model(ids).logits[0, :-1].log_softmax(-1)
    expected = scores.gather(1, ids[0, 1:, None])[:, 0]
    return (torch.from_numpy(engines[0].score(SEQUENCE).logprobs.copy()) - expected).abs().max().item()


trainer = make_trainer(
    tiny_qwen2(), Recorder(), folder, [f"{i} + {i + 1} =" for i in range(32)], per_device_train_batch_size=4,
    learning_rate=1e-2, max_steps=8, rollout_seed=5, max_staleness=1, temperature=0.7, top_p=0.9,
    lr_scheduler_type="constant",
)  # fmt: skip
trainer.add_callback(Compare())
trainer.train()
print("NOBODY NOTICED", flush=True)
