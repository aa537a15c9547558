"""Does a run learn in fewer steps and tokens if groups with equal rewards are sampled again? Five seeds.

    python benchmarks/dynamic_sampling.py [--seeds 5] [--steps 250] [--groups 8] [--jobs 2]

    off    every group is trained
    on     dynamic_sampling=8

The demo's task with a reward of 0 or 1: the first symbol must be right. A new model guesses it with probability 1/12,
so (11/12)^8, half of the groups of 8 completions are flat at the start, and most of them are again near the end.

The measure is the expected reward on held-out prompts, by the model's probabilities, because the rewards in the log of
a run with dynamic sampling are those of the kept groups. A run ends when it reaches the target. One rank and one vLLM
engine per run; every run is a process of its own. The picture shows the expected reward by steps and by tokens.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "demo"))
RESULTS = Path(__file__).parent / "results"
PICTURE = ROOT / "docs" / "use" / "dynamic-sampling.png"
ARMS = ("off", "on")
NUM_GENERATIONS = 8
TARGET = 0.9  # expected reward at which runs are compared, and end
# share of the groups in the first steps of `off`; the benchmark fails outside of it
FLAT_AT_START = (
    0.35,
    0.65,
)
FIRST_STEPS = 5
LONGEST = 4  # tokens of a completion
RUN_LIMIT_S = 900.0


def first_symbol_reward(prompts, completions, **_) -> list[float]:
    """Score the first symbol: 1 or 0."""
    from task import answer

    pairs = zip(prompts, completions, strict=True)
    return [float(completion.split()[:1] == answer(prompt)[:1]) for prompt, completion in pairs]


def expected_reward(model, tokenizer, prompts: list[str]) -> float:
    """Return the mean probability of the right first symbol at temperature 1."""
    import torch
    from task import answer

    right = torch.tensor([tokenizer.convert_tokens_to_ids(answer(prompt)[0]) for prompt in prompts])
    with torch.no_grad():
        scores = (
            model(**tokenizer(prompts, return_tensors="pt").to(model.device)).logits[:, -1].float()
        )
    return scores.softmax(-1).gather(1, right[:, None]).mean().item()


def train(arm: str, seed: int, steps: int, groups: int, output: Path) -> None:
    """Run one training, and write its expected rewards and tokens to `output`."""
    import torch
    from task import make_datasets, make_model, make_tokenizer
    from transformers import PrinterCallback, TrainerCallback

    from trl_multinode import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    train_set, held_out = make_datasets(num_train=2048, num_held_out=256)
    tokenizer, expected = make_tokenizer(), []

    class Measure(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            expected.append(expected_reward(model, tokenizer, list(held_out["prompt"])))
            control.should_training_stop |= expected[-1] >= TARGET

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_steps=steps,
            per_device_train_batch_size=groups * NUM_GENERATIONS,
            num_generations=NUM_GENERATIONS,
            max_completion_length=LONGEST,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            beta=0.0,
            temperature=1.0,
            seed=seed,
            rollout_seed=seed,
            score_groups=0 if arm == "on" else None,
            dynamic_sampling=8 if arm == "on" else 0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            make_model(seed),
            first_symbol_reward,
            config,
            train_set,
            processing_class=tokenizer,
            callbacks=[Measure()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.host.close()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    output.write_text(json.dumps({"expected": expected} | numbers(logs, groups * NUM_GENERATIONS)))


def numbers(logs: list[dict], rows: int) -> dict[str, list[float]]:
    """Return, per step, the share of flat groups among the sampled ones, and the sampled tokens of completions."""
    flat, tokens = [], []
    for entry in logs:
        dropped = entry.get("dynamic_sampling/dropped_share", 0.0)
        flat.append(dropped + (1 - dropped) * entry["frac_reward_zero_std"])
        tokens.append(
            entry["completions/mean_length"]
            * rows
            / (1 - entry.get("dynamic_sampling/extra_tokens", 0.0))
        )
    return {"flat_share": flat, "tokens": tokens}


def check(runs: dict[str, list[dict]]) -> None:
    """Fail if the task is not the one that this benchmark is about.

    Raises:
        SystemExit: with what was found and what is needed.
    """
    share, (low, high) = share_at_start(runs["off"]), FLAT_AT_START
    if not low <= share <= high:
        raise SystemExit(
            f"{share:.0%} of the first groups are flat, needed are {low:.0%} to {high:.0%}"
        )


def share_at_start(runs: list[dict]) -> float:
    return round(mean(share for run in runs for share in run["flat_share"][:FIRST_STEPS]), 3)


def run_all(options: argparse.Namespace) -> dict[str, list[dict]]:
    """Run both arms of a seed before the next seed, `--jobs` runs at a time."""

    def run(arm: str, seed: int) -> dict:
        output = options.folder / f"{arm}-{seed}-{options.steps}-{options.groups}.json"
        if not (options.keep and output.exists()):
            command = [
                sys.executable,
                __file__,
                "--one",
                arm,
                "--seed",
                str(seed),
                "--steps",
                str(options.steps),
            ]
            command += ["--groups", str(options.groups), "--output", str(output)]
            with open(output.with_suffix(".log"), "w") as log:
                subprocess.run(command, check=True, timeout=RUN_LIMIT_S, stdout=log, stderr=log)
        found = json.loads(output.read_text())
        print(
            f"{arm} seed {seed}: {len(found['expected'])} steps to {found['expected'][-1]:.3f}",
            flush=True,
        )
        return found

    with ThreadPoolExecutor(options.jobs) as pool:
        made = {
            (seed, arm): pool.submit(run, arm, seed)
            for seed in range(options.seeds)
            for arm in ARMS
        }
        return {arm: [made[seed, arm].result() for seed in range(options.seeds)] for arm in ARMS}


def reached(run: dict) -> tuple[int, int] | None:
    """Return the steps and the tokens of completions until the target; `None` if it was not reached."""
    steps = next((step for step, value in enumerate(run["expected"], 1) if value >= TARGET), None)
    return None if steps is None else (steps, round(sum(run["tokens"][:steps])))


def summarize(runs: dict[str, list[dict]], steps: int, groups: int) -> dict:
    summary: dict = {
        "target": TARGET,
        "most_steps": steps,
        "groups_per_step": groups,
        "rows": NUM_GENERATIONS,
    }
    for arm, of_arm in runs.items():
        found = [reached(run) for run in of_arm]
        summary[arm] = {
            "steps": [one and one[0] for one in found],
            "tokens": [one and one[1] for one in found],
            "flat_share_at_start": share_at_start(of_arm),
            "flat_share": round(mean(share for run in of_arm for share in run["flat_share"]), 3),
        }
    if all(None not in summary[arm]["steps"] for arm in ARMS):
        for name in ("steps", "tokens"):
            summary[f"{name}_on_over_off"] = round(
                mean(summary["on"][name]) / mean(summary["off"][name]), 3
            )
    return summary


def draw(runs: dict[str, list[dict]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_steps, by_tokens) = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for arm, color in zip(ARMS, ("tab:gray", "tab:blue"), strict=True):
        for seed, run in enumerate(runs[arm]):
            label = f"dynamic_sampling={8 if arm == 'on' else 0}" if seed == 0 else None
            tokens = [sum(run["tokens"][: step + 1]) / 1000 for step in range(len(run["expected"]))]
            by_steps.plot(
                range(1, len(tokens) + 1), run["expected"], color=color, linewidth=1, label=label
            )
            by_tokens.plot(tokens, run["expected"], color=color, linewidth=1)
    for axes, name in (
        (by_steps, "optimizer step"),
        (by_tokens, "sampled tokens of completions, thousands"),
    ):
        axes.axhline(TARGET, color="black", linewidth=0.5)
        axes.set_xlabel(name)
    by_steps.set_ylabel("expected reward, held-out prompts")
    by_steps.legend()
    figure.suptitle(f"Demo task, {len(runs['on'])} seeds; half of the groups are flat at the start")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=250, help="after which a run ends without the target"
    )
    parser.add_argument("--groups", type=int, default=8, help="prompts of an optimizer step")
    parser.add_argument(
        "--jobs", type=int, default=2, help="runs at a time; the results do not depend on it"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "outputs" / "dynamic_sampling", help="of single runs"
    )
    parser.add_argument(
        "--keep", action="store_true", help="use the runs that are there, whatever code made them"
    )
    for name, kind in [("--one", str), ("--seed", int), ("--output", Path)]:
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        train(options.one, options.seed, options.steps, options.groups, options.output)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    runs = run_all(options)
    check(runs)
    summary = summarize(runs, options.steps, options.groups)
    print(json.dumps(summary, indent=1))
    (RESULTS / "dynamic_sampling.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(runs, PICTURE)


if __name__ == "__main__":
    main()
