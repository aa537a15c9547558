"""Does a run learn as well on older completions? The demo's task, five seeds and a control.

    python benchmarks/learning.py [--seeds 5] [--steps 120] [--arms ...]

    staleness_0    max_staleness=0
    staleness_1    max_staleness=1
    in_flight_3    max_staleness=3
    control        completions of weights 8 rounds old, importance-sampling correction off: must do worse,
                   or this measurement could not see harm

A completion goes on after its answer until it ends, after 1 to 64 tokens, and one that does not end scores 0. One rank
and one vLLM engine per run; every run is a process of its own. In flight vLLM sleeps at every token, as if the model
were larger, so that completions last for several rounds; the results of the other arms do not depend on time. A run
fails if its shortest and longest completion do not reach from 2 to 60 tokens, and a run in flight also if fewer than
30 % of its rows hold tokens of several updates. The figures are mean rewards over ten steps, in the middle of learning
and at the end; the picture shows every step.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "demo"))
RESULTS = Path(__file__).parent / "results"
PICTURE = ROOT / "docs" / "use" / "staleness-learning.png"
ARMS = ("staleness_0", "staleness_1", "in_flight_3", "control")
NUM_GENERATIONS, NUM_ROWS = 8, 256
CHECKPOINTS = (80, 120)  # optimizer steps after which runs are compared
LAST_STEPS = 10  # over which a reward is averaged
LONGEST = 64  # tokens of a completion
KEYS = (  # of the log, kept beside the rewards
    "staleness/rounds_mean",
    "staleness/effective_sample_size",
    "staleness/clipped_share",
    "in_flight/mixed_rows",
    "completions/min_length",
    "completions/mean_length",
    "completions/max_length",
    "step_time",
)
CONTROL_LAG = 8  # generation rounds
SECONDS_A_TOKEN = 0.0002  # that vLLM sleeps in flight: 256 rows of 30 tokens then take 1.5 s
MIXED_ROWS = 0.3  # smallest share of rows in flight with tokens of several updates
RUN_LIMIT_S = 1800.0


def lag_weights(trainer, rounds: int) -> None:
    """The engine gets the weights of `rounds` syncs ago, and is none the wiser."""
    sync, history = trainer.host.updates.sync, deque(maxlen=rounds + 1)

    def lagged(version):
        parameters = list(trainer.model.parameters())
        history.append([parameter.detach().clone() for parameter in parameters])
        copy_into(parameters, history[0])
        timings = sync(version)
        copy_into(parameters, history[-1])
        return timings

    trainer.host.updates.sync = lagged


def copy_into(parameters, values) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)


def train(arm: str, seed: int, steps: int, output: Path) -> None:
    """One run; leaves its rewards in `output`."""
    import torch
    from task import ended_reward, make_datasets, make_model, make_tokenizer
    from transformers import PrinterCallback

    from trl_multinode import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    control, in_flight = arm == "control", arm == "in_flight_3"
    slow = {"logits_processors": ["multinode_kit.logits_processor:SlowTokens"]}
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_steps=steps,
            per_device_train_batch_size=NUM_ROWS,
            num_generations=NUM_GENERATIONS,
            max_completion_length=LONGEST,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            beta=0.0,
            loss_type="grpo",  # a mean per completion: otherwise the noise of long completions hides their answer
            temperature=1.0,
            seed=seed,
            rollout_seed=seed,
            max_staleness=3 if in_flight else int(arm == "staleness_1"),
            engine_kwargs=slow if in_flight else {},
            generation_kwargs={"extra_args": {"seconds_a_token": SECONDS_A_TOKEN}}
            if in_flight
            else None,
            vllm_importance_sampling_correction=not control,
            vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_max=2.0,
            logprob_divergence_limit=0 if control else None,  # the alarm would stop it
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        train_set, _ = make_datasets(num_train=2048, num_held_out=1)
        trainer = GRPOTrainer(
            make_model(seed), ended_reward, config, train_set, processing_class=make_tokenizer()
        )
        trainer.remove_callback(PrinterCallback)
        if control:
            lag_weights(trainer, CONTROL_LAG)
        trainer.train()
        trainer.host.close()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    found = {key: [entry[key] for entry in logs if key in entry] for key in KEYS}
    check_lengths(arm, found)
    output.write_text(json.dumps({"rewards": [entry["reward"] for entry in logs], **found}))


def check_lengths(arm: str, found: dict[str, list[float]]) -> None:
    """Fail if the run lacks what it is for: completions of very different lengths, and rows of several updates.

    Raises:
        SystemExit: with what was found and what is needed.
    """
    shortest, longest = min(found["completions/min_length"]), max(found["completions/max_length"])
    if shortest > 2 or longest < 60:
        raise SystemExit(
            f"{arm}: completions had {shortest:.0f} to {longest:.0f} tokens, needed are 2 to 60 at least"
        )
    if arm == "in_flight_3" and (mixed := mean(found["in_flight/mixed_rows"])) < MIXED_ROWS:
        raise SystemExit(
            f"{arm}: {mixed:.0%} of the rows hold several versions, needed are {MIXED_ROWS:.0%}"
        )


def run_all(
    arms: list[str], seeds: int, steps: int, folder: Path, keep: bool
) -> dict[str, list[dict]]:
    """Arms take turns within a seed; with `keep` a run that exists already in `folder` is not repeated."""
    for seed in range(seeds):
        for arm in arms:
            output = folder / f"{arm}-{seed}-{steps}.json"
            if keep and output.exists():
                continue
            command = [
                sys.executable,
                __file__,
                "--one",
                arm,
                "--seed",
                str(seed),
                "--steps",
                str(steps),
            ]
            with open(output.with_suffix(".log"), "w") as log:
                subprocess.run(
                    [*command, "--output", str(output)],
                    check=True,
                    timeout=RUN_LIMIT_S,
                    stdout=log,
                    stderr=log,
                )
            print(f"{arm} seed {seed}: {score(json.loads(output.read_text())):.3f}", flush=True)
    return {
        arm: [
            json.loads((folder / f"{arm}-{seed}-{steps}.json").read_text()) for seed in range(seeds)
        ]
        for arm in arms
    }


def score(run: dict, step: int | None = None) -> float:
    """Mean reward of the `LAST_STEPS` steps up to `step`, default the last."""
    return mean(run["rewards"][:step][-LAST_STEPS:])


def summarize(runs: dict[str, list[dict]], steps: int) -> dict:
    summary: dict = {
        "steps": steps,
        "averaged_over": LAST_STEPS,
        "rows_per_step": NUM_ROWS,
        "after": {},
    }
    for step in [step for step in CHECKPOINTS if step <= steps] or [steps]:
        summary["after"][step] = compare(
            {arm: [round(score(run, step), 4) for run in runs[arm]] for arm in runs}
        )
    for name in ("effective_sample_size", "rounds_mean"):
        summary[name] = {arm: mean_of(of_arm, f"staleness/{name}") for arm, of_arm in runs.items()}
    summary["mixed_rows"] = {
        arm: mean_of(of_arm, "in_flight/mixed_rows") for arm, of_arm in runs.items()
    }
    summary["mean_length"] = {
        arm: mean_of(of_arm, "completions/mean_length") for arm, of_arm in runs.items()
    }
    return summary


def mean_of(runs: list[dict], key: str) -> float | None:
    """Mean of a logged figure over all steps and seeds; `None` if the arm does not log it."""
    values = [value for run in runs for value in run[key]]
    return round(mean(values), 4) if values else None


def compare(scores: dict[str, list[float]]) -> dict:
    """Inside the spread: the arm's mean lies between the worst and the best seed of `staleness_0`."""
    found: dict = {
        "reward": scores,
        "mean": {arm: round(mean(values), 4) for arm, values in scores.items()},
    }
    base = scores.get("staleness_0", [])
    for arm in ("staleness_1", "in_flight_3"):
        if base and arm in scores:
            found[f"{arm}_inside_spread"] = min(base) <= found["mean"][arm] <= max(base)
    if base and "control" in scores:
        found["control_fails"] = max(scores["control"]) < min(base)
    return found


def draw(runs: dict[str, list[dict]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = dict(zip(ARMS, ("tab:blue", "tab:orange", "tab:green", "tab:gray"), strict=True))
    names = (
        "max_staleness=0",
        "max_staleness=1",
        "in flight, max_staleness=3",
        "8 rounds old, uncorrected",
    )
    labels = dict(zip(ARMS, names, strict=True))
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for arm, of_arm in runs.items():
        curves = [run["rewards"] for run in of_arm]
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), curve, color=colors[arm], alpha=0.25, linewidth=0.8)
        middle = [mean(values) for values in zip(*curves, strict=True)]
        axes.plot(
            range(1, len(middle) + 1), middle, color=colors[arm], linewidth=2, label=labels[arm]
        )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean reward")
    axes.set_title(
        f"Demo task, {len(next(iter(runs.values())))} seeds: thin lines are runs, thick ones their means"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "outputs" / "learning", help="of the single runs"
    )
    parser.add_argument(
        "--keep", action="store_true", help="use the runs that are there, whatever code made them"
    )
    for name, kind in [("--one", str), ("--seed", int), ("--output", Path)]:
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        train(options.one, options.seed, options.steps, options.output)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    runs = run_all(options.arms, options.seeds, options.steps, options.folder, options.keep)
    summary = summarize(runs, options.steps)
    print(json.dumps(summary, indent=1))
    (RESULTS / "learning.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(runs, PICTURE)


if __name__ == "__main__":
    main()
