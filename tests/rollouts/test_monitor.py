"""The alarm on log-probs: what it compares, what it leaves out, when it trips, when it is off."""

import logging
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl import GRPOConfig

from trl_multinode.config import MultiNodeGRPOConfig
from trl_multinode.engine.client import Rollout
from trl_multinode.errors import LogprobDivergenceError
from trl_multinode.host.updates import Updates
from trl_multinode.node_settings import NodeSettings
from trl_multinode.node_trainer import NodeTrainer
from trl_multinode.rollouts.monitor import DivergenceMonitor, settings_not_scored
from trl_multinode.rollouts.recorded import Turn
from trl_multinode.rollouts.staleness import StalenessMeter, summarize_rounds
from trl_multinode.rollouts.token_ages import TokenAges
from trl_multinode.run.topology import Topology
from trl_multinode.weights.probe import divergence_limit
from trl_multinode.wire.messages import WeightVersion


@pytest.fixture
def config(tmp_path):
    def make(kind=MultiNodeGRPOConfig, **fields):
        return kind(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **fields)

    return make


class Host:
    """The parts of a host that have to do with the limit; its model and engines are of `dtype`."""

    topology = Topology(3, 4, 0, 1, 1, 4, launched=True)
    divergence_limit = Updates.divergence_limit

    def __init__(self, args, dtype: torch.dtype):
        self._rank = self.updates = self
        self.settings, self.dtype, self.model = (
            NodeSettings.of(args),
            dtype,
            SimpleNamespace(dtype=dtype),
        )


def monitor(args, dtype=torch.float32) -> DivergenceMonitor:
    sampling = {
        name: getattr(args, name)
        for name in ("temperature", "repetition_penalty", "generation_kwargs")
    }
    generation = SimpleNamespace(
        version=WeightVersion(4, 12), used_version=made().rows[0].version, stale=False, **sampling
    )
    return DivergenceMonitor(Host(args, dtype), args, generation)


def batch(trainer, engine, mask=None, **more) -> dict:
    trainer, engine = torch.tensor(trainer), torch.tensor(engine)
    mask = torch.ones_like(trainer) if mask is None else torch.tensor(mask)
    return {
        "old_per_token_logps": trainer,
        "sampling_per_token_logps": engine,
        "completion_mask": mask,
        **{name: torch.tensor(value) for name, value in more.items()},
    }


def test_the_limit_fits_the_types_of_both_sides_and_the_users_own_wins(config):
    assert monitor(config()).limit == 0.02
    assert monitor(config(), torch.bfloat16).limit == 0.3
    assert monitor(config(logprob_divergence_limit=0.7)).limit == 0.7
    assert divergence_limit(None, torch.float32, torch.bfloat16) == 0.3
    assert divergence_limit(0.0, torch.float32, torch.float32) == 0.0


def test_the_limit_is_that_of_the_dtype_in_which_the_model_is_trained_in_the_end(config):
    """DeepSpeed casts the model after the trainer's `__init__`; autocast never does."""
    watcher = monitor(config(engine_kwargs={"dtype": "float32"}))
    watcher._host.updates.model.dtype = torch.bfloat16
    watcher.check(batch([[-1.0]], [[-1.1]]))
    assert watcher.limit == 0.3
    for precision in ({"bf16": True}, {"fp16": True}, {"mixed_precision": "bf16"}):
        args = config(engine_kwargs={"dtype": "float32"})
        for name, value in precision.items():
            setattr(args, name, value)  # on a machine without such a GPU, the config refuses them
        assert monitor(args).limit == 0.3, precision


def test_a_difference_above_the_limit_names_node_rank_version_and_cure(config):
    args = config(
        engine_kwargs={"hf_overrides": {"rope_theta": 5.0}, "max_num_batched_tokens": 512}
    )
    with pytest.raises(LogprobDivergenceError) as error:
        monitor(args).check(batch([[-1.0, -2.0]], [[-1.5, -1.9]]))
    message = str(error.value)
    for word in ["node 1, rank 3", "0.300", "limit 0.02", "update 4 (step 12)", "`logprob_divergence_limit`",
                 "`engine_kwargs` (hf_overrides, max_num_batched_tokens)", "`rollout_func`"]:  # fmt: skip
        assert word in message


def test_padding_and_tool_tokens_do_not_count(config):
    watcher = monitor(config())
    watcher.check(batch([[-1.0, -9.0]], [[-1.0, 0.0]], mask=[[1, 0]]))
    assert watcher.last == 0.0
    watcher.check(batch([[-1.0, -9.0]], [[-1.0, 0.0]], mask=[[1, 1]], tool_mask=[[1, 0]]))
    assert watcher.last == 0.0
    assert watcher.check(batch([[-1.0, NAN]], [[-1.0, NAN]], mask=[[1, 0]])) == (1, 0)
    assert watcher.check(batch([[-1.0, NAN]], [[-1.0, NAN]], tool_mask=[[1, 0]])) == (1, 0)
    assert watcher.check(batch([[-1.0, NAN]], [[-1.0, NAN]], mask=[[0, 0]])) == (0, 0)


NAN = float("nan")


def one_nan_in(tokens: int) -> list[list[float]]:
    return [[NAN] + [-1.01] * (tokens - 1)]


def test_single_tokens_that_vllm_could_not_score_do_not_count(config):
    watcher = monitor(config())
    assert watcher.check(batch([[-1.0] * 100], one_nan_in(100))) == (100, 1)
    assert watcher.last == pytest.approx(0.01, abs=1e-6)


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize(
    "fields", [{}, {"logprob_divergence_limit": 0}, {"repetition_penalty": 1.1}], ids=str
)
def test_more_than_one_nan_in_a_hundred_tokens_is_an_alarm_whatever_the_limit(
    config, fields, stale
):
    with pytest.raises(LogprobDivergenceError) as error:
        check_of_age(monitor(config(**fields)), batch([[-1.0] * 99], one_nan_in(99)), stale)
    message = str(error.value)
    for word in ["node 1, rank 3", "1.0 %", "1 of 99", "NaN", "limit 1 %", "the engine,", "update 3 (step 11)",
                 "`engine_kwargs={'dtype': 'bfloat16'}`"]:  # fmt: skip
        assert word in message


ALARMS = {  # log-probs of the trainer, if it computes any, and of the engine -> words of the error
    "nan of the trainer": (one_nan_in(2), [[-1.0] * 2], ["50.0 %", "1 of 2", "the trainer,", "update 4 (step 12)",
                                                        "`learning_rate`"]),
    "nan of both": ([[NAN, NAN]], [[NAN, NAN]], ["the engine and the trainer"]),
    "nan of the engine alone": (None, [[NAN]], ["NaN", "the engine,"]),  # no `vllm_importance_sampling_correction`
    "an infinite difference": ([[-1.0, -1.0]], [[-1.0, float("-inf")]], [" inf "]),
}  # fmt: skip


@pytest.mark.parametrize("case", ALARMS)
def test_log_probs_that_are_no_numbers_are_an_alarm(config, case):
    trainer, engine, words = ALARMS[case]
    output = batch(engine if trainer is None else trainer, engine)
    if trainer is None:
        del output["old_per_token_logps"]
    with pytest.raises(LogprobDivergenceError) as error:
        monitor(config()).check(output)
    assert all(word in str(error.value) for word in words), error.value


def test_a_batch_without_both_log_probs_is_not_looked_at(config):
    watcher = monitor(config())
    watcher.check({"completion_mask": torch.ones(1, 2), "old_per_token_logps": torch.ones(1, 2)})
    assert watcher.last == 0.0


def test_limit_zero_measures_and_never_trips(config):
    watcher = monitor(config(logprob_divergence_limit=0))
    watcher.check(batch([[-1.0]], [[-5.0]]))
    assert watcher.last == 4.0


class Unscored(NodeTrainer):
    """A trainer that never scores its completions, in the middle of a run; `make` is TRL's method."""

    def __init__(self, logprobs: list[float]):
        self.host = SimpleNamespace(
            topology="node 1, rank 3", updates=SimpleNamespace(align=lambda: None)
        )
        self.accelerator = SimpleNamespace(gather=None)
        self.model = SimpleNamespace(training=True)
        self._meter = StalenessMeter(SimpleNamespace())
        rows = [
            Rollout(
                np.zeros(len(logprobs), np.int32),
                np.array(logprobs, np.float32),
                WeightVersion(4, 12),
                0,
            )
        ]
        self.vllm_generation = SimpleNamespace(
            rows=rows,
            version=WeightVersion(4, 12),
            ages=TokenAges(),
            generated=True,
            recovering=nullcontext,
        )

    def _begin_round(self) -> None:
        pass

    def run(self, make=dict) -> dict[str, float]:
        self._one_round(make)
        return summarize_rounds([self._meter.take((0.0, 0.0), np.zeros((0, 4)))], [0.0])


def test_a_trainer_that_compares_nothing_still_stops_at_an_engines_nan_and_logs_its_share():
    assert Unscored([NAN] + [-1.0] * 199).run()["logprobs/nan_share"] == 1 / 200
    assert Unscored([]).run().get("logprobs/nan_share") is None
    with pytest.raises(LogprobDivergenceError, match="rank 3: 50.0 % .* the engine, .*update 4"):
        Unscored([NAN, -1.0]).run()


CHANGED = [
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"generation_kwargs": {"logit_bias": {3: 1.0}, "top_k": 5}}, "generation_kwargs['logit_bias']"),
    ({"generation_kwargs": {"temperature": 0.5}}, "generation_kwargs['temperature']"),
    ({"generation_kwargs": {"presence_penalty": 0.5, "frequency_penalty": -0.5}},
     "generation_kwargs['presence_penalty'], generation_kwargs['frequency_penalty']"),
    ({"repetition_penalty": 1.1, "top_p": 0.9, "generation_kwargs": {"extra_args": {}}},
     "repetition_penalty, generation_kwargs['extra_args']"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "names"), CHANGED, ids=str)
def test_settings_that_change_the_engines_probabilities_turn_it_off_with_one_line_that_names_them(
    config, fields, names, caplog
):
    with caplog.at_level(logging.WARNING):
        # the user turned it off: no line says so
        monitor(config(**fields, logprob_divergence_limit=0))
        watcher = stale_monitor(config(**fields), engines := Engines())
    (line,) = caplog.messages
    assert f"without {names}." in line
    assert watcher.limit == 0.0
    watcher.check(batch([[-1.0]], [[-5.0]]))
    watcher._generation.on_stale(made())
    assert engines.asked == []


def test_a_setting_that_a_callback_changes_turns_it_off_from_then_on(config, caplog):
    watcher = monitor(config())
    watcher.check(batch([[-1.0]], [[-1.01]]))
    watcher._generation.repetition_penalty = 1.2
    watcher.check(batch([[-1.0]], [[-5.0]]))
    assert watcher.limit == 0.0 and "without repetition_penalty." in caplog.text


SCORED = [
    {},
    {"temperature": 0.7},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.1},
    {"vllm_structured_outputs_regex": "[0-9]+"},
    {"temperature": 0.7, "generation_kwargs": {"temperature": 0.7}},
    {
        "repetition_penalty": 1.1,
        "generation_kwargs": {"repetition_penalty": 1.0, "logit_bias": None},
    },
    {"generation_kwargs": {"stop": ["x"], "ignore_eos": True, "max_tokens": 3}},
    {
        "generation_kwargs": {
            "min_tokens": 8,
            "bad_words": ["x"],
            "allowed_token_ids": [1, 2],
            "top_p": 0.5,
        }
    },
    {"generation_kwargs": {"structured_outputs": {"regex": "a"}}},
]


@pytest.mark.parametrize("fields", SCORED, ids=str)
def test_temperature_and_settings_that_only_forbid_tokens_or_end_rows_leave_it_on(
    config, fields, caplog
):
    assert (
        settings_not_scored(config(**fields))
        == settings_not_scored(config(kind=GRPOConfig, **fields))
        == []
    )
    with caplog.at_level(logging.WARNING):
        watcher = monitor(config(**fields))
    assert not caplog.messages
    with pytest.raises(LogprobDivergenceError, match="0.100 "):
        watcher.check(batch([[-1.0]], [[-1.1]]))


# ---- completions that older weights made: an engine scores one of them anew


class Engines:
    """Two engines that score every token with -1; what is asked of them, and of which."""

    max_model_len = 16

    def __init__(self, logprob: float = -1.0):
        self.logprob = logprob
        self.asked: list[tuple[list[int], int]] = []
        self.temperatures: list[float] = []
        self.answered: set[int] = set()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, engine: int) -> SimpleNamespace:
        score, scored = partial(self.post_score, engine), partial(self.scored, engine)
        return SimpleNamespace(
            post_score=score, scored=scored, lost=None, loss_accepted=nullcontext
        )

    def post_score(
        self, engine: int, tokens, temperature: float, images: tuple, min_update: int
    ) -> int:
        assert (
            min_update == 4
        )  # or an engine that has not begun this update would score with the one before
        self.asked.append((list(tokens), engine))
        self.temperatures.append(temperature)
        return len(self.asked) - 1

    def scored(self, engine: int, request_id: int) -> Rollout:
        tokens, asked = self.asked[request_id]
        assert engine == asked and request_id not in self.answered, "an answer is given once"
        self.answered.add(request_id)
        logprobs = np.array([-50.0] * len(tokens[1:]), dtype=np.float32)
        logprobs[len(PROMPT) - 1 :] = self.logprob  # what the prompt scores is no matter of ours
        return Rollout(np.array(tokens[1:], dtype=np.int32), logprobs, WeightVersion(4, 12), engine)


PROMPT = [5, 6, 7]
LENGTHS = (2, 4)  # of the completions
FRESH = [[-1.0, -1.0, 0.0, 0.0], [-1.0] * 4]  # the trainer's log-probs
OLD = [[-3.0, -3.0, 0.0, 0.0], [-3.0] * 4]  # the older weights'
MASK = [[1, 1, 0, 0], [1] * 4]


def made(prompt=PROMPT) -> Turn:
    old = WeightVersion(3, 11)
    rows = [
        Rollout(np.arange(10, 10 + n, dtype=np.int32), np.full(n, -3.0, np.float32), old, 0)
        for n in LENGTHS
    ]
    return Turn([prompt] * 2, rows)


def check_of_age(watcher: DivergenceMonitor, output: dict, stale: bool = True) -> tuple[int, int]:
    """Check completions that older weights may have made."""
    watcher._generation.stale = stale
    try:
        return watcher.check(output)
    finally:
        watcher._generation.stale = False


def stale_monitor(args, engines: Engines) -> DivergenceMonitor:
    watcher = monitor(args)
    watcher._generation.engines = engines
    return watcher


def test_stale_completions_may_differ_as_long_as_the_engines_present_weights_agree(config):
    watcher = stale_monitor(config(), engines := Engines())
    for _ in range(3):
        watcher._generation.on_stale(made())
        check_of_age(watcher, batch(FRESH, OLD, MASK))
        assert watcher.last == 0.0
    first, second = [*PROMPT, 10, 11], [*PROMPT, 10, 11, 12, 13]
    assert engines.asked == [(first, 0), (second, 1), (first, 0)]  # rows and engines in turn
    with pytest.raises(LogprobDivergenceError, match="2.000 "):
        watcher.check(batch(FRESH, OLD, MASK))  # the same rows, were they fresh


@pytest.mark.parametrize(
    ("logprob", "words"),
    [(-3.0, "2.000 .*update 4"), (NAN, "100.0 % .*the engine, .*update 4")],
    ids=["old", "nan"],
)
def test_an_engine_that_holds_older_weights_or_scores_nan_trips_the_alarm_on_a_stale_round(
    config, logprob, words
):
    # old: it still agrees with its old completions
    watcher = stale_monitor(config(), Engines(logprob=logprob))
    watcher._generation.on_stale(made())
    with pytest.raises(LogprobDivergenceError, match=words):
        check_of_age(watcher, batch(FRESH, OLD, MASK))


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.7}, {"temperature": 1.5, "top_p": 0.9, "top_k": 5}], ids=str
)
def test_the_score_is_asked_for_at_the_temperature_at_which_trl_scores(config, fields):
    watcher = stale_monitor(config(**fields), engines := Engines(logprob=-1.5))
    watcher._generation.on_stale(made())
    assert engines.temperatures == [fields.get("temperature", 1.0)]
    with pytest.raises(LogprobDivergenceError, match="0.500 "):
        check_of_age(watcher, batch(FRESH, OLD, MASK))


@pytest.mark.parametrize(
    ("ranks", "asked"),
    [
        (1, [{0: [0]}, {0: [1]}, {0: [0]}, {0: [1]}]),
        (2, [{0: [0], 1: [1]}, {0: [1], 1: [0]}] * 2),
        (5, [{0: [0], 1: [1]}, {0: [1], 4: [0]}, {3: [0], 4: [1]}, {2: [0], 3: [1]}]),
    ],
)
def test_each_engine_is_asked_by_one_rank_of_its_node_and_the_ranks_take_turns(
    config, ranks, asked
):
    watchers, engines = [], []
    for rank in range(ranks):
        engines.append(Engines())
        watchers.append(stale_monitor(config(), engines[-1]))
        topology = Topology(rank, ranks, rank, ranks, 0, 1, launched=True)
        watchers[-1]._host.topology = topology
    for expected in asked:
        for watcher, own in zip(watchers, engines, strict=True):
            own.asked.clear()
            watcher._generation.on_stale(made())
        found = {rank: [engine for _, engine in own.asked] for rank, own in enumerate(engines)}
        assert {rank: which for rank, which in found.items() if which} == expected


def test_a_row_is_scored_as_far_as_the_context_reaches(config):
    watcher = stale_monitor(config(), engines := Engines())
    engines.max_model_len = len(PROMPT) + 2
    trainer = [[-1.0, -9.0, 0.0, 0.0], [-1.0] * 4]  # the second token was not scored
    watcher._generation.on_stale(made())
    check_of_age(watcher, batch(trainer, OLD, MASK))
    assert engines.asked == [([*PROMPT, 10], 0)] and watcher.last == 0.0
    engines.max_model_len = len(PROMPT) + 1  # vLLM makes one token more: no room for a completion's
    watcher._generation.on_stale(made())
    check_of_age(watcher, batch(trainer, OLD, MASK))
    assert len(engines.asked) == 1


def test_a_completion_that_is_masked_out_does_not_count(config):
    watcher = stale_monitor(config(), Engines())
    watcher._generation.on_stale(made())
    check_of_age(watcher, batch([[-9.0] * 4, [-1.0] * 4], OLD, [[0] * 4, [1] * 4]))
    assert watcher.last == 0.0
    watcher._generation.on_stale(made())
    tools = [[1] * 4, [1, 1, 0, 0]]
    check_of_age(watcher, batch([[-1.0] * 4, [-1.0, -1.0, -9.0, -9.0]], OLD, MASK, tool_mask=tools))
    assert watcher.last == 0.0


def test_a_score_belongs_to_one_round(config):
    """A round that is fresh after one that was not looked at."""
    watcher = stale_monitor(config(), engines := Engines())
    watcher._generation.on_stale(made())
    check_of_age(watcher, batch(FRESH, OLD, MASK))
    check_of_age(watcher, batch(FRESH, OLD, MASK))  # nothing was asked: nothing is compared
    assert len(engines.asked) == 1


@pytest.mark.parametrize(("rate", "trains"), [(0.3, True), (0.3, False), (0.0, True)])
def test_the_alarm_names_dropout_of_the_trainers_forward(config, rate, trains):
    """An adapter with a dropout of 0.3 differs by 0.128 per token with equal weights."""
    found = monitor(config())
    found._host.updates.model = torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.Dropout(rate)
    ).train(trains)
    found._host.updates.model.dtype = torch.float32
    with pytest.raises(LogprobDivergenceError) as error:
        found.check(batch([[-1.0, -2.0]], [[-1.5, -2.5]]))
    assert ("`disable_dropout=True`" in str(error.value)) == (rate > 0 and trains)
