"""Training script of the demo. Start it on every node:

    accelerate launch --config_file accelerate_configs/2node_cpu.yaml --machine_rank K examples/demo/train.py

`run.py` starts both nodes on one machine and writes the report.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from modes import JOINED, LEAVES_AFTER, MODES, REWARD_WAITS_S
from rows import RecordedStream
from task import (
    ANSWER_LENGTH,
    best_constant_score,
    ended_reward,
    make_datasets,
    make_model,
    make_tokenizer,
    successor_reward,
)
from transformers import TrainerCallback

from multinode_kit.faults import Faults
from trl_multinode import GRPOConfig, GRPOTrainer

NUM_GENERATIONS = 8
ROWS_PER_RANK = (
    64  # 32 prompts a step on 4 ranks; with 16, one seed in three got stuck at a reward below 0.7
)


def parse_arguments(modes: Iterable[str] = MODES) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=modes, default=next(iter(modes)), help="see modes.py")
    parser.add_argument(
        "--no-sync", action="store_true", help="test only: the engines keep their first weights"
    )
    return parser.parse_args()


def suppress_sync() -> None:
    """Make the engines load nothing from the second update on and still report success. For tests only."""
    os.environ |= Faults().lie_about_load(2, sys.maxsize).environment()


def make_config(options: argparse.Namespace) -> GRPOConfig:
    by_mode = {
        "per_device_train_batch_size": ROWS_PER_RANK, "learning_rate": 2e-3, "max_completion_length": ANSWER_LENGTH,
    } | MODES[options.mode]  # fmt: skip
    return GRPOConfig(
        output_dir=str(options.output_dir),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=options.steps,
        per_device_eval_batch_size=ROWS_PER_RANK,
        num_generations=NUM_GENERATIONS,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        seed=options.seed,
        rollout_seed=options.seed,
        logprob_divergence_limit=0
        if options.no_sync
        else None,  # the alarm would stop a run on stale weights
        eval_on_start=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        # TRL's correction for completions that older weights sampled; the same in every mode
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        **by_mode,
    )


def shard_every_parameter(config: GRPOConfig) -> None:
    """Shard every parameter. By default DeepSpeed shards none here, because all have fewer than 100,000 elements.

    `stage3_param_persistence_threshold` is the only setting that a tiny model needs and a real one does not.
    """
    plugin = getattr(config, "deepspeed_plugin", None)
    if plugin is not None:
        plugin.hf_ds_config.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0


def waiting_reward(options: argparse.Namespace) -> Callable[..., list[float]]:
    """Return a reward function that waits in each round, and before the first agent leaves for the second one."""
    joined = options.output_dir / JOINED

    def reward(prompts, completions, trainer_state, **_) -> list[float]:
        time.sleep(REWARD_WAITS_S[options.mode])
        # `run.py` ends the wait if the agent ends, or the time is up
        while trainer_state.global_step >= LEAVES_AFTER * options.steps and not joined.exists():
            time.sleep(0.1)
        return successor_reward(prompts, completions)

    return reward


class Trained:
    """Prompts of the rounds of one rank, and the agents whose engines completed them. Only with `max_staleness=0`."""

    def __init__(self, trainer: GRPOTrainer):
        self._generation = trainer.vllm_generation
        self._prompts: list[str] = []
        (self._reward,) = trainer.reward_funcs
        trainer.reward_funcs[0] = self

    @property
    def __name__(self) -> str:
        return self._reward.__name__

    def __call__(self, prompts: list[str], **columns) -> list[float]:
        self._prompts = prompts
        return self._reward(prompts=prompts, **columns)

    def last_round(self) -> dict:
        """Return the rows of each agent by its number, and the completions of each prompt."""
        engines = self._generation.engines
        agents = Counter(engines[row.engine].place.node for row in self._generation.rows)
        return {"agents": agents, "prompts": Counter(self._prompts)}


class Recorder(TrainerCallback):
    """Callback that writes the input of `report.py`: times of each step on every rank, and the logs of rank 0."""

    def __init__(self, folder: Path, trainer: GRPOTrainer):
        rank = trainer.accelerator.process_index
        self._trained_on = Trained(trainer) if trainer.host.settings.min_engines else None
        (folder / "steps").mkdir(parents=True, exist_ok=True)
        self._steps = open(folder / "steps" / f"rank{rank}.jsonl", "w", buffering=1)
        self._history = open(folder / "history.jsonl", "w", buffering=1) if rank == 0 else None
        self._begin = 0.0

    def on_step_begin(self, args, state, control, **_):
        self._begin = time.time()

    def on_step_end(self, args, state, control, **_):
        line = {"step": state.global_step, "begin": self._begin, "end": time.time()}
        if self._trained_on is not None:
            line |= self._trained_on.last_round()
        self._steps.write(json.dumps(line) + "\n")

    def on_log(self, args, state, control, logs=None, **_):
        if self._history is not None:
            self._history.write(json.dumps({**(logs or {}), "step": state.global_step}) + "\n")


def write_run(trainer: GRPOTrainer, folder: Path, best_constant: float) -> None:
    """Write the figures that only the running trainer has. Rank 0 calls it after the last step."""
    topology, devices = trainer.host.topology, trainer.host.devices
    engines = trainer.vllm_generation.engines
    num_engines = topology.num_nodes * len(devices.per_engine)
    num_engines += sum(engine.place.is_of_agent for engine in engines)
    training_gpus = 0 if trainer.args.use_cpu else topology.world_size
    whole = [getattr(parameter, "ds_persist", True) for parameter in trainer.model.parameters()]
    run = {
        "nodes": topology.num_nodes,
        "ranks": topology.world_size,
        "engines": num_engines,
        "devices": training_gpus + topology.num_nodes * sum(map(len, devices.per_engine)),
        "engine": "fake" if engines[0].ready.model_runner == "fake" else "vLLM",
        "steps": trainer.state.global_step,
        "rows_per_step": trainer.args.generation_batch_size,
        "train_rows": len(trainer.train_dataset) * trainer.num_generations,
        "num_generations": trainer.num_generations,
        "weight_versions": trainer.vllm_generation.version.update,
        "best_constant": best_constant,
        "sharded_parameters": [whole.count(False), len(whole)],  # sharded, total
    }
    (folder / "run.json").write_text(json.dumps(run, indent=2) + "\n")


def train_and_record(trainer: GRPOTrainer, folder: Path, best_constant: float) -> None:
    trainer.add_callback(Recorder(folder, trainer))
    if (rounds := trainer.vllm_generation.rounds) is not None:
        path = folder / "rows" / f"rank{trainer.accelerator.process_index}.jsonl"
        rounds.groups._stream = RecordedStream(rounds.groups._stream, path)
    trainer.train()
    if trainer.accelerator.is_main_process:
        # first: a run that ends in the evaluation still has a report
        write_run(trainer, folder, best_constant)
    trainer.evaluate()


def main() -> None:
    options = parse_arguments()
    if options.no_sync:
        suppress_sync()
    train_set, held_out = make_datasets(num_train=1024, num_held_out=32)
    model = make_model(options.seed)
    config = make_config(options)
    shard_every_parameter(config)
    reward = ended_reward if config.max_completion_length > ANSWER_LENGTH else successor_reward
    if options.mode in REWARD_WAITS_S:
        reward = waiting_reward(options)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=train_set,
        eval_dataset=held_out,
        processing_class=make_tokenizer(),
    )
    train_and_record(
        trainer, options.output_dir, max(map(best_constant_score, (train_set, held_out)))
    )


if __name__ == "__main__":
    main()
