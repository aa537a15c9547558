"""Rewards of a group before its round: TRL's own `_calculate_rewards` is the reference, in threads and processes."""

import importlib.util
import os
import signal
import threading
import time
from collections import defaultdict
from contextlib import suppress
from datetime import datetime
from functools import partial
from types import SimpleNamespace

import group_rewards
import pytest
import torch
from agents import GROUP, Seen, Speaker, chats, engines_here, keep_outputs, numbers, ours
from forks import FORK
from refusals import refused
from store_host import topology_of
from transformers import TrainerState
from trl.rewards import accuracy_reward, get_cosine_scaled_reward, reasoning_accuracy_reward
from trl.trainer import grpo_trainer
from waiting import HANG_S, until

from trl_multinode.errors import ConfigurationError, RolloutError
from trl_multinode.rollouts.recorded import Recorded
from trl_multinode.rollouts.reward_call import Call
from trl_multinode.rollouts.rewards import RewardCalls
from trl_multinode.rollouts.scoring import GroupScorer
from trl_multinode.rollouts.scoring_pool import ScoringProcess, is_importable
from trl_multinode.rollouts.scoring_process import Request
from trl_multinode.run.endings.exit_codes import USER_CODE, code_of
from trl_multinode.wire.process_end import start_time

REAL = pytest.mark.real  # tests that start a process for a reward function: 5 CPU s of imports
TEXTS = [
    ["a b", "bb abc", "", "dddd"],
    ["xyz", "y", "zz z", "x x x"],
    ["one", "two words", "3", "four"],
]


class Model(torch.nn.Module):
    """A reward model: `logits` are the sums of the tokens."""

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=input_ids.float().sum(1, keepdim=True))


def encode(text, **_):
    width = max(len(one) for one in text)
    return {
        "input_ids": torch.tensor(
            [[ord(one[i]) if i < len(one) else 0 for i in range(width)] for one in text]
        )
    }


@pytest.fixture(scope="module")
def loop():
    thread, loop, ready = grpo_trainer.start_event_loop_in_daemon(name="rewards")
    assert ready.wait(HANG_S)
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(HANG_S)


class Trainer:
    """What TRL's method needs of a trainer."""

    _log_completion_extra = grpo_trainer.GRPOTrainer._log_completion_extra
    _log_metric = grpo_trainer.GRPOTrainer._log_metric

    def __init__(self, loop, functions, environments=None):
        self.accelerator = SimpleNamespace(device=torch.device("cpu"), is_main_process=True)
        self.args = SimpleNamespace(report_to=[])
        self.state = TrainerState(global_step=3)
        self.async_loop, self.environments = loop, environments
        self.reward_funcs = list(functions)
        self.reward_func_names = [
            grpo_trainer.get_callable_name(function) for function in functions
        ]
        self.reward_processing_classes = [
            encode if isinstance(one, Model) else None for one in functions
        ]
        self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)


class Rewards(Trainer, grpo_trainer.GRPOTrainer):
    """The same with TRL's method, whose `super()` moves a reward model's rows to its device."""

    def calculate(self, groups: list[Recorded]) -> torch.Tensor:
        rows, prompts, texts, ids = (
            [one for group in groups for one in getattr(group, name)]
            for name in ("inputs", "prompts", "completions", "completion_ids")
        )
        return self._calculate_rewards(rows, prompts, texts, ids)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(grpo_trainer, "gather", lambda rewards: rewards)
    monkeypatch.setattr("transformers.Trainer._prepare_inputs", lambda self, inputs: inputs)


def group(
    number: int = 0, texts: list[str] | None = None, environments: bool = False, **columns
) -> Recorded:
    texts = TEXTS[number] if texts is None else texts
    inputs = [
        {"prompt": f"p{number}", "answer": number + 0.5 * row, "note": {"of": [number, "é"]}}
        | columns
        for row in range(len(texts))
    ]
    kept = [{"start": float(number + row)} for row in range(len(texts))] if environments else None
    ids = [[number, *map(ord, text)] for text in texts]
    return Recorded(
        inputs,
        [one["prompt"] for one in inputs],
        texts,
        ids,
        turns=[],
        environments=kept,
        fields=[{}] * len(texts),
    )


@pytest.fixture
def scorer_of(loop):
    """Makes a scorer for functions; its `reports` has what the watch thread would end the run with."""
    made = []

    def make(*functions, timeout_s: float | None = None, **settings) -> GroupScorer:
        reports: list[tuple[str, int]] = []
        topology = topology_of(1)
        calls = RewardCalls(topology, timeout_s, lambda text, code: reports.append((text, code)))
        settings = {"score_with_batch": None, "score_groups": 0} | settings
        host = SimpleNamespace(topology=topology, settings=SimpleNamespace(**settings))
        scorer = GroupScorer(trainer_of(loop, functions), host, calls)
        scorer.reports, scorer.check = reports, calls.check
        made.append(scorer)
        return scorer

    yield make
    for scorer in made:
        scorer.close()


def trainer_of(loop, functions, environments=None) -> Rewards:
    trainer = Rewards.__new__(Rewards)
    Trainer.__init__(trainer, loop, functions, environments)
    return trainer


def equal(mine: torch.Tensor, its: torch.Tensor) -> bool:
    return torch.equal(mine.nan_to_num(-99.0), its.nan_to_num(-99.0))


# ---- as TRL ---------------------------------------------------------------------------------------------------------


class Keeps:
    """A reward function that keeps its arguments."""

    def __init__(self):
        self.calls: list[dict] = []

    def __call__(self, **arguments):
        self.calls.append(
            {name: value for name, value in arguments.items() if not name.startswith("log_")}
        )
        arguments["log_extra"]("kept", [f"{text}!" for text in arguments["completions"]])
        return [0.5] * len(arguments["completions"])


def test_a_function_gets_trls_arguments_of_its_group(scorer_of, loop):
    mine, its = Keeps(), Keeps()
    scorer, trl = scorer_of(mine), trainer_of(loop, [its], environments=[])
    groups = [group(0, environments=True), group(1, environments=True)]
    for one in groups:
        one.inputs = [row | {"completion": "dropped", "completion_ids": [0]} for row in one.inputs]
        scorer.score(one)
    trl.environments = [kept for one in groups for kept in one.environments]
    trl.calculate(groups)
    (whole,) = its.calls
    assert set(whole) == {
        "prompts", "completions", "completion_ids", "answer", "note", "trainer_state", "environments"
    }  # fmt: skip
    assert all(set(call) == set(whole) for call in mine.calls) and len(mine.calls) == 2
    assert mine.calls[0].pop("trainer_state") is scorer._trainer.state
    whole.pop("trainer_state"), mine.calls[1].pop("trainer_state")
    assert {name: mine.calls[0][name] + mine.calls[1][name] for name in whole} == whole
    trl.environments = None  # an agent without environments gets no such argument
    scorer.score(group(2)), trl.calculate([group(2)])
    assert "environments" not in mine.calls[2] and set(mine.calls[2]) == set(its.calls[1])


FUNCTIONS = (
    group_rewards.letters, Model(), group_rewards.judged, group_rewards.ranked, group_rewards.by_step,
)  # fmt: skip


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=REAL)])
def test_rewards_and_logs_are_those_of_trls_call(processes, scorer_of, loop, capsys):
    scorer = scorer_of(*FUNCTIONS, score_with_batch=["ranked"], score_groups=processes)
    groups = [group(number) for number in range(3)]
    threads = [threading.Thread(target=keep_scores, args=(scorer, one)) for one in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    its = trainer_of(loop, FUNCTIONS)
    expected = its.calculate(groups)
    mine, functions = scorer._trainer, list(scorer._trainer.reward_funcs)
    with scorer.replaying(groups):
        found = mine.calculate(groups)
    assert mine.reward_funcs == functions
    assert equal(found, expected) and expected.isnan().any(dim=0).tolist() == [
        True,
        False,
        True,
        False,
        False,
    ]
    assert mine._pending_extra_logs == its._pending_extra_logs and len(its._pending_extra_logs) == 3
    means = mine._pending_metrics["letters/mean"]
    assert (
        its._pending_metrics["letters/mean"] == [pytest.approx(sum(means) / len(means))]
        and len(means) == 3
    )
    where = "in a process" if processes else "in the group's thread"
    assert scorer._plan().endswith(
        f"letters {where}, Model with the whole batch, judged on the event loop, ranked with the whole batch, "
        f"by_step {where}"
    )


def keep_scores(scorer: GroupScorer, one: Recorded) -> None:
    one.scores = scorer.score(one)


def keep_end(scorer: GroupScorer, one: Recorded) -> None:
    with suppress(RolloutError):  # of the function whose process the test ends
        keep_scores(scorer, one)


def test_a_column_that_only_some_groups_log_has_none_in_the_others(scorer_of):
    def log_some(completions, log_extra, **_):
        if "xyz" in completions:
            log_extra("seen", list(completions))
        return [1.0] * len(completions)

    scorer, groups = scorer_of(log_some), [group(number) for number in range(3)]
    for one in groups:
        keep_scores(scorer, one)
    with scorer.replaying(groups):
        scorer._trainer.calculate(groups)
    assert scorer._trainer._pending_extra_logs == {"seen": [None] * 4 + TEXTS[1] + [None] * 4}


LETTERS = Speaker({})


@pytest.mark.parametrize("ahead", [{}, {"max_staleness": 1}], ids=["sync", "ahead"])
def test_a_run_is_the_one_whose_rounds_are_scored_at_once(ahead, tmp_path):
    """Advantages, TRL's log and, without threads beside training, gradients to the bit: beside it the engine of this
    process computes other log-probs now and then, because transformers' forward pass has settings of the process."""
    found = []
    for settings in ({}, {"score_groups": 0}):
        seen = Seen("rate")
        with engines_here(LETTERS):
            trainer = ours(
                tmp_path / str(len(found)), [seen, group_rewards.no_log], chats(12, rate=list(range(12))),
                **settings, **ahead,
            )  # fmt: skip
            outputs = keep_outputs(trainer)
            trainer.train()
            trainer.close()
        found.append((seen, trainer, outputs))
    (at_once, plain, plain_outputs), (by_group, scored, outputs) = found
    assert [len(one["ids"]) for one in at_once.rounds] == [2 * GROUP] * 3
    assert {len(one["ids"]) for one in by_group.rounds} == {GROUP}
    rows = [sorted((str(ids), rate) for one in seen.rounds for ids, rate in zip(one["ids"], one["rate"], strict=True))
            for seen in (at_once, by_group)]  # fmt: skip
    assert set(rows[0]) <= set(rows[1])
    for mine, its in zip(outputs, plain_outputs, strict=True):
        assert mine["advantages"].equal(its["advantages"]) and mine["advantages"].abs().max() > 0
    for mine, its in zip(scored.gradients, plain.gradients, strict=True):
        assert mine.abs().max() > 0 and (ahead or mine.equal(its))
    names = NAMES - {"loss"} if ahead else NAMES
    logs = [[{key: value for key, value in one.items() if key in names} for one in numbers(each.state.log_history)]
            for each in (scored, plain)]  # fmt: skip
    assert logs[0] == logs[1] and logs[0][0].keys() == names


NAMES = {
    "loss",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "rewards/seen/mean",
    "rewards/no_log/std",
}


# ---- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.real
def test_a_process_has_a_main_thread_keywords_of_a_partial_and_logs_plain_data(scorer_of):
    functions = (
        group_rewards.in_main_thread,
        partial(group_rewards.by_factor, factor=3.0),
        group_rewards.diary,
    )
    scores = scorer_of(*functions, score_groups=1).score(group())
    assert scores.values == [[1.0] * 4, [9.0, 18.0, 0.0, 12.0], [1.0] * 4]
    assert scores.extras == {"path": ["a b", "bb abc", ".", "dddd"]}
    assert in_thread(scorer_of(group_rewards.in_main_thread), group()).values == [[0.0] * 4]


def in_thread(scorer: GroupScorer, one: Recorded):
    thread = threading.Thread(target=keep_scores, args=(scorer, one))
    thread.start()
    thread.join(HANG_S)
    return one.scores


@pytest.mark.real
def test_trls_accuracy_reward_gets_a_process_without_a_setting(scorer_of):
    scorer = scorer_of(accuracy_reward, group_rewards.letters)
    assert "accuracy_reward in a process, letters in the group's thread" in scorer._plan()
    reasoning = partial(reasoning_accuracy_reward, reasoning_delimiters=["</t>"])
    plan = scorer_of(reasoning, partial(accuracy_reward), get_cosine_scaled_reward(100))._plan()
    assert "reasoning_accuracy_reward in a process, accuracy_reward in a process" in plan
    assert "cosine_scaled_reward with the whole batch" in plan
    completions = [
        [{"role": "assistant", "content": text}]
        for text in (r"\boxed{2}", "no box", r"$\frac{4}{2}$")
    ]
    one = group(texts=["a", "b", "c"], solution="$2$")
    one.completions = completions
    scorer = scorer_of(accuracy_reward)
    if importlib.util.find_spec("math_verify"):
        assert scorer.score(one).values == [[1.0, 0.0, 1.0]]
        assert "answer_parsed" in scorer.score(one).extras
        return
    print("math-verify is not installed: what TRL's function says of that is all that is tested")
    with pytest.raises(RolloutError, match="`accuracy_reward`.*ImportError.*`math_veri"):
        scorer.score(one)


@pytest.mark.real
def test_a_process_has_no_place_in_the_world_and_what_it_prints_is_the_ranks(
    scorer_of, monkeypatch, capfd
):
    ranks = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "A_JUDGES_KEY": "k",
    }
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # which would print at once anyway
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    scorer = scorer_of(group_rewards.surroundings, score_groups=1)
    assert scorer.score(group()).values == [[1.0] * 4]
    printed = capfd.readouterr()
    assert "a line on standard output" in printed.err and "a line on standard error" in printed.err


def test_what_another_process_cannot_find_or_get_stays_in_the_thread(scorer_of):
    def local(completions, **_):
        return [2.0] * len(completions)

    functions = (local, partial(local), Seen(), group_rewards.same_place)
    scorer = scorer_of(*functions, score_groups=2)
    assert scorer._pool is None and not any(map(is_importable, functions[:3]))
    values = scorer.score(group(environments=True)).values
    assert values[0] == values[1] == [2.0] * 4 and values[3] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (datetime(2026, 1, 1), "datetime"),
        ((1, 2), "tuple"),
        ({"a": [{1.5: object()}]}, "object"),
        (1 << 70, "2**64"),
    ],
    ids=["a date", "a tuple", "an object inside", "a large number"],
)
def test_an_argument_that_a_process_would_not_get_as_it_is_is_refused(value, kind, scorer_of):
    with pytest.raises(ConfigurationError) as refused:
        scorer_of(group_rewards.letters, score_groups=1).score(group(when=value))
    for word in ["node 0, rank 1", "`when`", "`letters`", kind, "score_with_batch=['letters']"]:
        assert word in str(refused.value)


# ---- what fails -----------------------------------------------------------------------------------------------------

BAD = ["good", "bad", "good", "good"]
FAILURES = {
    "raises": ["`raises`", "row 1 ", "rows 0 to 3", "ValueError: cannot parse it"],
    "raises_later": ["`raises_later`", "row 1 ", "rows 0 to 3", "ValueError: cannot parse it"],
    "too_few": ["`too_few`", "3 rewards", "4 completions"],
    "no_rewards": ["`no_rewards`"],
    "dies": ["`dies`", "SIGKILL"],
    "leaves": ["`leaves`", "code 7"],
}


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        *(pytest.param(name, 1, marks=REAL) for name in FAILURES if name != "raises_later"),
        *((name, 0) for name in ("raises", "raises_later", "too_few", "no_rewards")),
    ],
)
def test_a_function_that_fails_is_named_with_node_rank_and_row(name, processes, scorer_of):
    scorer = scorer_of(getattr(group_rewards, name), score_groups=processes)
    with pytest.raises(RolloutError) as failed:
        scorer.score(group(texts=BAD))
    assert all(word in str(failed.value) for word in ["node 0, rank 1", *FAILURES[name]])
    assert code_of(failed.value) == USER_CODE
    if processes and name == "raises":
        assert 'raise ValueError("cannot parse it")' in str(failed.value)
        assert scorer.score(group()).values == [[1.0] * 4], (
            "the process is not there for the next group"
        )
    scorer.close()
    scorer.close()


@pytest.mark.real
def test_a_process_that_has_ended_between_two_groups_is_named(scorer_of):
    scorer = scorer_of(group_rewards.letters, score_groups=1)
    scorer.score(group())
    os.kill(scorer._pool.processes[0].pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RolloutError, match="`letters`.*SIGKILL"):
            scorer.score(group(1))
    scorer.close()


@pytest.mark.parametrize(
    ("name", "processes"), [("hangs", 0), ("hangs_later", 0), pytest.param("hangs", 1, marks=REAL)]
)
def test_a_function_that_hangs_is_named_with_its_row_and_line(name, processes, scorer_of):
    scorer = scorer_of(getattr(group_rewards, name), score_groups=processes, timeout_s=0.3)
    one = group(texts=BAD)
    thread = threading.Thread(target=keep_end, args=(scorer, one), daemon=True)
    thread.start()
    if processes:
        until(lambda: "in row 1 " in scorer._pool.processes[0].ask(), "the function hangs")
    else:
        assert group_rewards.REACHED.wait(HANG_S)
    until(lambda: (scorer.check(), scorer.reports)[1], "a report of the function that hangs")
    text, code = scorer.reports[0]
    assert code == USER_CODE
    for word in [
        f"`{name}`",
        "row 1 ",
        "rows 0 to 3",
        f"({name})",
        "group_rewards.py:",
        "`call_timeout` (got 0.3 s)",
    ]:
        assert word in text
    pids = [process.pid for process in scorer._pool.processes] if processes else []
    scorer.close()  # also ends a function that runs
    assert [start_time(pid, running=True) for pid in pids] == [None] * processes
    if not processes:
        group_rewards.RELEASED.set()
        thread.join(HANG_S)
        group_rewards.RELEASED.clear()
        group_rewards.REACHED.clear()
        assert one.scores.values == [[1.0] * 4]


@pytest.mark.real
def test_a_process_ends_with_its_rank_while_a_function_runs(tmp_path):
    pid, runs = tmp_path / "pid", tmp_path / "runs"

    def rank() -> None:
        process = ScoringProcess()
        # as a worker of the dataloader: it has copies of the pipes, which stay open
        if not (child := os.fork()):
            time.sleep(HANG_S)
            os._exit(0)
        pid.write_text(f"{process.pid} {child}")
        process.call(Request("group_rewards", "touches", {"completions": [str(runs)]}, {}))

    killed = FORK.Process(target=rank)
    killed.start()
    until(runs.exists, "the function runs")
    process, child = map(int, pid.read_text().split())
    assert start_time(process, running=True) is not None
    killed.kill()
    killed.join()  # with a limit it would wait for its child's copy of a pipe
    try:
        until(lambda: start_time(process, running=True) is None, "the process ends with its rank")
    finally:
        os.kill(child, signal.SIGKILL)


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("functions", "named", "said"),
    [
        ([group_rewards.letters], ["leters"], ["`score_with_batch`", "['leters']"]),
        ([group_rewards.letters, Model()], ["letters"], ["`score_groups`", "['letters', 'Model']"]),
        ([Model()], None, ["['Model']", "`score_with_batch`", "`score_groups`"]),
    ],
    ids=["a wrong name", "all with the batch", "a reward model"],
)
def test_a_scorer_without_functions_and_wrong_names_are_refused(functions, named, said, scorer_of):
    with pytest.raises(ConfigurationError) as refused:
        scorer_of(*functions, score_with_batch=named)
    assert all(word in str(refused.value) for word in said)


def test_calls_of_many_threads_end_without_seeing_each_other():
    calls, failures = RewardCalls(topology_of(1), None, print), []

    def work() -> None:
        try:
            for _ in range(2000):
                with calls.open_call(Call("f")):
                    sum(range(40))
        except ValueError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert failures == [] and calls._open == []
    # else `list.remove` runs Python code between two threads
    assert Call("f", since=0.0, thread=1) != Call("f", since=0.0, thread=1)


def test_a_column_with_the_name_of_a_rollouts_text_is_refused(scorer_of):
    with refused("train_dataset", got=["completions"]):
        scorer_of(group_rewards.letters).score(group(completions="the right answer"))


@pytest.mark.real
def test_a_stop_signal_that_a_scheduler_sends_to_all_processes_leaves_the_rewards_alone(scorer_of):
    scorer = scorer_of(group_rewards.slow_letters, score_groups=1)
    (process,) = scorer._pool.processes
    os.kill(process.pid, signal.SIGTERM)  # while it starts
    thread = threading.Thread(target=lambda: found.append(scorer.score(group())))
    found: list = []
    thread.start()
    until(lambda: "in row" in process.ask(), "the function is called")
    os.kill(process.pid, signal.SIGTERM)
    thread.join(HANG_S)
    assert found[0].values == [[3.0, 4.0, None, 1.0]]
