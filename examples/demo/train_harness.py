"""Training script of `make demo MODE=harness`: the trainer of `examples/harness.py`, the model of `agent_model.py`."""

import sys
from functools import partial
from pathlib import Path

import torch
from forked_agents import Agents
from train import parse_arguments, shard_every_parameter, suppress_sync, train_and_record
from train_agent import ROWS_PER_RANK, make_config
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))
from agent import COLORS
from harness import hunt, make_trainer


def main() -> None:
    options = parse_arguments(modes=["harness"])
    if options.no_sync:
        suppress_sync()
    folder = options.output_dir / "model"
    # loaded before the config is made, because DeepSpeed would then shard the model during the load
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = make_config(
        options,
        # of one call of the model, which is one turn
        max_completion_length=8,
        micro_batch_tokens=4096,
        # half as many hunts as with an environment, because a process and HTTP calls cost 0.2 s of a core for each
        per_device_train_batch_size=ROWS_PER_RANK // 2,
        num_generations_eval=2,
        learning_rate=1e-3,
    )
    shard_every_parameter(config)
    trainer = make_trainer(
        config,
        model,
        harness=partial(hunt, run_agent=Agents().run),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    guess = 0.5 / (len(COLORS) - 1)  # among the boxes that the prompt does not name
    train_and_record(trainer, options.output_dir, best_constant=guess)


if __name__ == "__main__":
    main()
