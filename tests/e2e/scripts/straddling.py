"""3 ranks a node, groups of 4: groups straddle ranks and nodes. And ranks that call `generate` as they like."""

import sys

from common import RANK, Recorder, make_trainer, write_result

from trl_multinode.testing.models import counting_model

folder = sys.argv[1]


def main() -> None:
    recorder = Recorder()
    trainer = make_trainer(
        counting_model(), recorder, folder, [chr(ord("a") + i) for i in range(24)], per_device_train_batch_size=2,
        learning_rate=0.0, max_steps=2, rollout_seed=5,
    )  # fmt: skip
    trainer.train()
    write_result(folder, rows=recorder.rows, uneven=uneven_calls(trainer.vllm_generation))


def uneven_calls(generation) -> list:
    """Rank r calls r + 1 times, each time with other lengths and numbers of rows."""
    answers = []
    for call in range(RANK + 1):
        generation.max_tokens = 3 + RANK + call
        prompts = [[40 + 20 * RANK + call]] * (call + 1) + [[150 + RANK, 160 + 10 * RANK]]
        _, completions, logprobs, _ = generation.generate(prompts, None, 4)
        answers += [[p, c, len(lp)] for p, c, lp in zip(prompts, completions, logprobs, strict=True)]
    return answers


main()
