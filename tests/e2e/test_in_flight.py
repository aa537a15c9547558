"""Rounds in flight on two nodes under ZeRO-3: rows go on across weight updates, and every id is trained once."""

import json
import re
import shutil
from collections import Counter
from math import isfinite
from pathlib import Path

import pytest

from trl_multinode.testing.faults import FAKE, FORKED, Faults
from trl_multinode.testing.models import tiny_qwen2
from trl_multinode.testing.nodes import Nodes

SCRIPT = Path(__file__).parent / "scripts" / "in_flight.py"
pytestmark = [pytest.mark.zero3, pytest.mark.two_node]
GROUP, WORLD = 4, 4
SLOW = Faults().slow_tokens(0.06)  # generation takes longer than a step, whatever else the machine does

# Four ranks x 8 rows = 8 prompts a round, two groups a rank
RUN = {
    "prompts": 40, "per_device_train_batch_size": 8, "steps_per_generation": 1, "gradient_accumulation_steps": 1,
    "max_completion_length": 256, "weight_update": "in_flight", "open_rounds": 2,
}  # fmt: skip
WHOLE = {
    "name": "whole", "output": "whole", "prompts": 64, "num_train_epochs": 1, "open_rounds": 4, "compare": 3,
    "mean": 20, "min_tokens": 16, "num_engines": 2,
}  # fmt: skip
# 16 prompts a round, each trained twice in 4 optimizer steps; the run ends inside the second epoch, 24 rows unused
FEATURES = {
    "name": "features", "output": "features", "prompts": 48, "max_steps": 14, "num_iterations": 2,
    "steps_per_generation": 2, "gradient_accumulation_steps": 1, "micro_batch_tokens": 2048, "recompute_kv": True,
    "eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": 4, "open_rounds": 2,
}  # fmt: skip
# Two ranks: six rounds of 4 prompts; the reference model is the base without its adapter
ADAPTER = {
    "name": "adapter", "output": "adapter", "prompts": 24, "num_train_epochs": 1, "compare": 3, "lora": True,
    "lora_sync": "adapter", "learning_rate": 0.1, "beta": 0.05, "mean": 24,
}  # fmt: skip
MERGED = ADAPTER | {"name": "merged", "output": "merged", "lora_sync": "merged"}
# An eighth of the first turns calls a tool; then a turn goes on, because `min_tokens` keeps it from ending at once.
# The fake engine computes the long prompt for every token, so there are few rows
TOOLS = {
    "name": "tools", "output": "tools", "prompts": 24, "num_train_epochs": 1, "tools": True, "min_tokens": 2,
    "per_device_train_batch_size": 4, "mean": 40, "max_completion_length": 300, "max_tool_calling_iterations": 2,
    "learning_rate": 1e-5,
}  # fmt: skip
# Whole rollouts one round ahead, and engines that are empty when they get new weights
AGENTS = TOOLS | {
    "name": "agents", "output": "agents", "tools": False, "environment": True, "weight_update": "drain",
    "open_rounds": 1, "max_staleness": 1, "prompts": 16, "mean": 1, "min_tokens": 0, "max_tool_calling_iterations": 3,
}  # fmt: skip
HANGS = AGENTS | {"name": "hangs", "output": "hangs", "hangs": 3, "tool_timeout": 3.0}  # on rank 3
LOSSES = {"name": "losses", "prompts": 84}

# Two ranks, 8 prompts a round in two optimizer steps, four rounds in each of two epochs; a checkpoint at every third
# step, so that every second one is inside a round
KILLED = {
    "output": "killed", "prompts": 32, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3, "mean": 24,
    "steps_per_generation": 2,
}  # fmt: skip
LAST, EPOCH = 16, 8  # steps
# where a run ends -> checkpoint from which the next one goes on
KILLS = {("take", 4): 3, ("step", 6): 6, ("saving", 9): 6, None: LAST}


# Six rounds of 4 prompts; vLLM makes thousands of tokens a second, so every row must be long to see a swap
REAL = {
    "name": "real", "output": "real", "prompts": 24, "num_train_epochs": 1, "compare": 3, "ignore_eos": True,
    "max_completion_length": 700,
}  # fmt: skip
# Two workers on a CPU make hundreds of tokens a second
REAL_ADAPTER = REAL | {
    "name": "real_adapter", "output": "real_adapter", "lora": True, "lora_sync": "adapter", "learning_rate": 0.1,
    "vllm_tensor_parallel_size": 2, "prompts": 16, "max_completion_length": 300,
}  # fmt: skip


def results(folder: Path, name: str, world: int = WORLD) -> list[dict]:
    return [json.loads((folder / f"{name}_rank{rank}.json").read_text()) for rank in range(world)]


def launch(nodes: Nodes, folder: Path, *jobs: dict) -> list[int]:
    nodes.launch(SCRIPT, str(folder), json.dumps([RUN | job for job in jobs]))
    return nodes.wait(timeout_s=500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("in_flight")
    with Nodes(2, 2, folder=folder, env=SLOW.environment(FAKE), forked=True) as nodes:
        assert launch(nodes, folder, WHOLE, FEATURES, TOOLS, AGENTS) == [0, 0], nodes.rank_log(0)[-3000:]
        assert all(launch(nodes, folder, HANGS)), "a tool hangs, and the run goes on"
        for rank in range(WORLD):
            (folder / f"hangs{rank}.log").write_text(nodes.rank_log(rank))
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """Two nodes of one rank."""
    folder = tmp_path_factory.mktemp("pair")
    tiny_qwen2(seed=1).save_pretrained(folder / "reference")
    with Nodes(2, 1, folder=folder, env=SLOW.environment(FAKE), forked=True) as nodes:
        assert launch(nodes, folder, ADAPTER, MERGED, LOSSES) == [0, 0], nodes.rank_log(0)[-3000:]
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A run that is killed three times, on two nodes of one rank."""
    folder = tmp_path_factory.mktemp("killed")
    with Nodes(2, 1, folder=folder, env=SLOW.environment(FAKE), forked=True) as nodes:
        for number, where in enumerate(KILLS):
            job = KILLED | {"name": f"run{number}", "kill_at": where, "resume": number > 0}
            codes = launch(nodes, folder, job)
            assert (codes == [0, 0]) == (where is None), nodes.rank_log(0)[-3000:]
            (folder / f"run{number}.log").write_text("".join(nodes.rank_log(rank) for rank in range(2)))
    return folder


def trained(runs: list[dict]) -> Counter:
    """Prompt -> rows that were trained, of all ranks."""
    return Counter(prompt for run in runs for one in run["rounds"] for prompt in one["prompts"])


def versions(runs: list[dict]) -> list[list[list[int]]]:
    return [row for run in runs for one in run["rounds"] for row in one["versions"]]


def losses(run: dict) -> list[float]:
    return [entry["loss"] for entry in run["log"] if "loss" in entry]


def losses_of(runs: list[dict]) -> list[str]:
    """Prompt of each row of every loss, of all ranks."""
    return [prompt for run in runs for rows in run["trained"].values() for prompt in rows]


def check_whole(runs: list[dict], prompts: int) -> None:
    """Every id was trained once, rows with several versions exist, and nothing is left under way."""
    every = Counter({f"{i} + {i + 1} =": GROUP for i in range(prompts)})
    assert trained(runs) == every and Counter(losses_of(runs)) == every
    assert any(len(row) > 1 for row in versions(runs))
    assert [run["rows_left"] for run in runs] == [0] * len(runs)


def test_every_id_of_every_epoch_is_trained_once_and_nothing_is_left_under_way(folder):
    runs = results(folder, "whole")
    check_whole(runs, WHOLE["prompts"])
    assert {engine for run in runs for one in run["rounds"] for engine in one["engines"]} == {0, 1}
    assert all(len(losses(run)) == 8 and all(map(isfinite, losses(run))) for run in runs)


def test_at_least_a_third_of_the_rows_hold_several_versions_and_the_reward_sees_the_rows_that_were_taken(folder):
    runs = results(folder, "whole")
    rows = versions(runs)
    assert sum(len(row) > 1 for row in rows) > 0.3 * len(rows)
    lengths = [row[-1][2] for row in rows]
    assert max(lengths) > 4 * min(lengths)
    for run in runs:
        assert all(one["rows"] == one["made"] for one in run["rounds"])
        assert [one["open"] for one in run["rounds"]] == [8, 8, 8, 8, 6, 4, 2, 0]


def test_scoring_is_trls_own_on_the_same_rows(folder):
    """In a round with old and mixed rows; the loss is that of the same method on equal tensors."""
    for run in results(folder, "whole"):
        different, (expected, loss), names = run["compared"]
        assert different == [] and expected == loss and names > 6
        assert run["rounds"][WHOLE["compare"]]["lag"][0] > 0


def test_ages_are_logged_and_bounded_and_the_spot_check_runs_in_mixed_rounds(folder):
    runs = results(folder, "whole")
    log = [entry for entry in runs[0]["log"] if "loss" in entry]
    assert log[0]["staleness/rounds_mean"] == 0.0
    assert 0 < max(entry["staleness/rounds_max"] for entry in log) <= 3 * WHOLE["open_rounds"]
    assert max(entry["in_flight/mixed_rows"] for entry in log) > 0.3
    assert max(entry["in_flight/swapped_rows"] for entry in log) > 4
    assert all(entry["staleness/effective_sample_size"] > 0 for entry in log)
    assert all(0.0 <= run["spot_check"] < 1e-3 for run in runs) and any(run["spot_check"] > 0 for run in runs)


def test_iterations_blocks_balanced_batches_evaluation_and_the_end_of_the_run_in_an_epoch(folder):
    runs = results(folder, "features")
    # rounds of 4 optimizer steps: 3 in the first epoch; one and a half in the second, which begins the half one too
    assert [one["step"] for one in runs[0]["rounds"]] == [0, 4, 8, 12]
    first = [run | {"rounds": run["rounds"][:3]} for run in runs]
    assert trained(first) == Counter({f"{i} + {i + 1} =": GROUP for i in range(48)})
    assert sorted(Counter(trained([run | {"rounds": run["rounds"][3:]} for run in runs]).values())) == [GROUP]
    epoch = [
        run | {"trained": {step: rows for step, rows in run["trained"].items() if int(step) < 12}} for run in runs
    ]
    assert Counter(losses_of(epoch)) == Counter({f"{i} + {i + 1} =": 2 * GROUP for i in range(48)})
    assert [run["rows_left"] for run in runs] == [0] * WORLD
    assert all(map(isfinite, losses(runs[0]))) and len(losses(runs[0])) == 14
    assert len([entry for entry in runs[0]["log"] if "eval_reward" in entry]) == 3  # the last one after the last step
    assert max(entry.get("balance/moved_between_nodes_mib", 0.0) for entry in runs[0]["log"]) > 0
    assert any(len(row) > 1 for row in versions(runs))


@pytest.mark.parametrize("name", ["adapter", "merged"])
def test_an_adapter_beside_a_reference_model(pair, name):
    runs = results(pair, name, world=2)
    check_whole(runs, ADAPTER["prompts"])
    for run in runs:
        different, (expected, loss), names = run["compared"]
        assert different == [] and expected == loss and names > 7  # with the reference's log-probs
        assert run["spot_check"] < 1e-3
    assert any(run["spot_check"] > 0.0 for run in runs)
    log = [entry for entry in runs[0]["log"] if "loss" in entry]
    assert [entry["kl"] > 0 for entry in log] == [False, *[True] * 5]
    sent = [entry["sync/mib"] for entry in log]
    assert (max(sent[1:]) < 0.1 * sent[0]) == (name == "adapter")


def test_tools_continue_from_first_turns_that_saw_several_updates(folder):
    runs = results(folder, "tools")
    assert sorted(Counter(prompt for run in runs for one in run["rounds"] for prompt in one["prompts"]).values()) == (
        [GROUP] * TOOLS["prompts"]
    )
    assert set(Counter(losses_of(runs)).values()) == {GROUP} and [run["rows_left"] for run in runs] == [0] * WORLD
    assert any(len(row) > 1 for row in versions(runs))
    assert max(entry.get("tools/call_frequency", 0.0) for entry in runs[0]["log"]) > 0
    rows = [pair for run in runs for one in run["rounds"] for pair in zip(one["made"], one["rows"], strict=True)]
    assert all(row[: len(made)] == made for made, row in rows)  # later turns are appended to the first
    assert any(len(row) > len(made) for made, row in rows)


@pytest.mark.parametrize("job", [TOOLS, AGENTS], ids=["in flight", "drain"])
def test_whole_rollouts_end_at_different_turns_on_every_rank(folder, job):
    runs = results(folder, job["name"])
    every = Counter({f"{i} + {i + 1} =" + " Add!" * (job is AGENTS): GROUP for i in range(job["prompts"])})
    assert trained(runs) == every and [run["rows_left"] for run in runs] == [0] * WORLD
    rounds = zip(*(run["rounds"] for run in runs), strict=True)
    assert any(len({max(one["turns"]) for one in ranks}) > 1 for ranks in rounds)
    turns = {count for run in runs for one in run["rounds"] for count in one["turns"]}
    assert turns >= ({1, 3, 5, 7} if job is AGENTS else {1, 3})
    assert max(one["lag"][0] for run in runs for one in run["rounds"]) > 0


def test_a_tool_that_hangs_ends_all_ranks_with_its_place(folder):
    logs = [(folder / f"hangs{rank}.log").read_text() for rank in range(WORLD)]
    assert "HANGS" in logs[3]
    lines = {log.rstrip().splitlines()[-1] for log in logs}
    assert len(lines) == 1, lines
    assert re.search(
        r"node 1, rank 3.*: the tool `add` has not returned after [3-9] s, for row \d of this rank; it is at .*"
        r"\(add\).*`tool_timeout` \(got 3 s\)",
        lines.pop(),
    )


def test_gradients_of_all_losses_are_trls_on_the_same_rows(pair):
    """Of TRL's own trainer, which takes the rows, tokens and log-probs of ours; with balanced micro-batches too."""
    runs = results(pair, "losses", world=2)
    taken = Counter(prompt for run in runs for prompt in run["prompts"])
    assert taken == Counter({f"{i} + {i + 1} =": GROUP for i in range(LOSSES["prompts"])})
    for run in runs:
        assert len(run["differences"]) == len(run["steps"]) and min(run["norms"]) > 1e-3 and run["not_taken"] == 0
        for (*step, balanced), difference in zip(run["steps"], run["differences"], strict=True):
            assert difference <= (1e-5 if balanced else 0.0), (step, run["differences"])
        assert run["losses"][0] == pytest.approx(run["losses"][1], rel=1e-4, abs=1e-5)
        assert [count > 0 for count in run["micro_steps"]] == [balanced for _, _, balanced in run["steps"]]
    rounds = zip(*(run["versions"] for run in runs), strict=True)
    mixed = [sum(count > 1 for rows in one for count in rows) for one in rounds]
    assert min(mixed[4:]) > 0, mixed
    assert all(abs(ratio - 1) > 1e-4 for ratio in runs[0]["ratios"][4:])


def test_ids_trained_before_and_after_three_kills_are_all_ids_once(killed):
    found = [results(killed, f"run{number}", world=2) for number in range(len(KILLS))]
    starts = [min(map(int, runs[0]["trained"])) for runs in found]
    assert starts == [0, *list(KILLS.values())[:-1]]
    kept: dict[int, list[str]] = {}  # before optimizer step -> rows of the run that went on
    for runs, start, end in zip(found, starts, KILLS.values(), strict=True):
        for step in range(start, end):
            kept[step] = [prompt for run in runs for prompt in run["trained"][str(step)]]
    epochs = [[prompt for step in range(at, at + EPOCH) for prompt in kept[step]] for at in range(0, LAST, EPOCH)]
    assert list(map(Counter, epochs)) == [Counter({f"{i} + {i + 1} =": GROUP for i in range(KILLED["prompts"])})] * 2
    assert any(len(row) > 1 for runs in found for row in versions(runs))
    logs = [(killed / f"run{number}.log").read_text() for number in range(len(KILLS))]
    assert "AssertionError" not in logs[0], "no row was under way when the first run was killed"
    assert "checkpoint-9 is skipped: unfinished" in logs[-1]


def test_rows_under_way_at_a_checkpoint_continue_with_their_versions(killed):
    continued, said = [], []
    for number, step in enumerate(list(KILLS.values())[:-1], start=1):
        rows = [row for row in versions(results(killed, f"run{number}", world=2)) if row[0][0] < 0]
        assert rows, f"the checkpoint of step {step} has no row"
        assert {made_at for row in rows for update, made_at, _ in row if update < 0} <= set(range(step + 1))
        continued += [row for row in rows if row[-1][0] > 0]
        log = (killed / f"run{number}.log").read_text()
        said += re.findall(r"(\d+) rows that were under way at the checkpoint continue, (\d+) begin again", log)
    # some continued rows had not begun, and a run that was killed has not trained all of its own
    assert 0 < len(continued) <= sum(int(number) for number, _ in said)


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """vLLM and ZeRO-3 on two nodes of one rank.

    On a busy machine, vLLM may end all rows within the first step, so that none sees a swap: then the job runs again.
    """
    folder, jobs = tmp_path_factory.mktemp("real"), [REAL, REAL_ADAPTER]
    with Nodes(2, 1, folder=folder, env=Faults().environment(FORKED), forked=True) as nodes:
        for _ in range(3):
            assert launch(nodes, folder, *jobs) == [0, 0], nodes.rank_log(0)[-3000:]
            jobs = [job for job in jobs if not any(len(row) > 1 for row in versions(results(folder, job["name"], 2)))]
            if not jobs:
                break
            for job in jobs:
                shutil.rmtree(folder / job["output"])
    return folder


@pytest.mark.engine
@pytest.mark.parametrize("job", [REAL, REAL_ADAPTER], ids=["full", "adapter-tp2"])
def test_vllm_swaps_weights_under_rows_of_a_whole_run(real, job):
    """The log-probs of the rows' newest weights are the trainer's in every round."""
    runs = results(real, job["name"], world=2)
    check_whole(runs, job["prompts"])
    for run in runs:
        assert run["compared"][0] == [] and 0.0 < run["spot_check"] < 1e-3
        assert all(map(isfinite, losses(run)))
