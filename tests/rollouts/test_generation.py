"""TRL's generation seam on stub engines: requests per run of equal rows, seeds per row, versions."""

import inspect
import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from refusals import refused
from stubs import A, B, C, asked, build
from trl.generation.vllm_generation import VLLMGeneration

from trl_multinode.errors import (
    ConfigurationError,
    PromptTooLongError,
    RolloutError,
    WeightVersionError,
)
from trl_multinode.node_trainer import NodeTrainer
from trl_multinode.rollouts.generation import OF_THE_START, SAMPLING
from trl_multinode.wire.messages import WeightVersion

# ---- requests


def test_a_group_that_straddles_ranks_is_cut_where_the_rank_begins():
    # num_generations=4 over ranks of 6 rows: rank 0 holds A A A A B B, rank 1 B B C C C C; a stride would mix them
    first, second = build(0), build(1)
    first.generate([A] * 4 + [B] * 2, None, num_generations=4)
    second.generate([B] * 2 + [C] * 4, None, num_generations=4)
    assert asked(first) == [(A, 4), (B, 2)] and asked(second) == [(B, 2), (C, 4)]
    whole = build()
    # a run of equal rows is one request
    whole.generate([A] * 2 + [B] * 3 + [C], None, num_generations=2)
    assert asked(whole) == [(A, 2), (B, 3), (C, 1)]


def test_equal_prompts_apart_are_requests_of_their_own_and_rows_keep_their_order():
    generation = build()
    prompts, completions, logprobs, ids = generation.generate([A, C, A], None, num_generations=1)
    assert asked(generation) == [(A, 1), (C, 1), (A, 1)]
    assert prompts == [A, C, A] and [row[1] for row in completions] == [2, 1, 2]
    assert all(type(token) is int for row in completions for token in row)
    assert logprobs == [[[-0.5], [None]]] * 3 and ids[1] == [[0], [1]]


def test_a_rehearsal_draws_no_random_number_of_the_run():
    """Without `rollout_seed`, an engine samples rows without a seed with random numbers of its own."""
    generation = build(temperature=0.7)
    before = vars(generation.seeds).copy()
    generation.rehearse([A, B, C], 16)
    (call,) = generation.engines.calls
    assert [request.seed for request in call.requests] == [0, 1, 2] and call.max_tokens == 16
    assert call.sampling["ignore_eos"] and call.sampling["temperature"] == 0.7
    assert vars(generation.seeds) == before and "ignore_eos" not in generation.sampling
    generation.generate([A], None, num_generations=1)
    assert generation.engines.calls[-1].requests[0].seed is None


def test_a_trainer_that_reads_no_log_probs_gets_none_and_the_engines_are_kept_for_the_alarm():
    generation = build(logprobs=None)
    _, completions, logprobs, ids = generation.generate([A, C], None, num_generations=1)
    assert logprobs is None and ids is None and len(completions) == 2  # as TRL's own class
    assert [row.logprobs[0] for row in generation.rows] == [-0.5, -0.5]


def test_a_round_knows_whether_anything_was_generated_in_it():
    generation = build()
    assert not generation.generated
    generation.generate([A], None, num_generations=1)
    assert generation.generated
    generation.begin_round("train", 1)
    assert not generation.generated


@pytest.mark.nightly  # e2e/test_sampling has images
def test_rows_with_other_images_are_other_requests():
    class Picture:
        mode, size = "L", (2, 1)

        def __init__(self, data: bytes):
            self.tobytes = lambda: data

    cat, dog = Picture(b"ca"), Picture(b"do")
    generation = build()
    generation.generate([A, A, A, A], [[cat], [cat], [dog], None], num_generations=4)
    requests = generation.engines.calls[-1].requests
    assert [request.num_completions for request in requests] == [2, 1, 1]
    assert [[image.data for image in request.images] for request in requests] == [
        [b"ca"],
        [b"do"],
        [],
    ]


def test_a_rank_without_prompts_asks_for_nothing():
    assert build().generate([], None, num_generations=4) == ([], [], [], [])


def test_settings_reach_the_engine_and_generation_kwargs_win():
    generation = build(
        temperature=0.5, top_k=3, min_p=None, max_completion_length=9, structured_outputs_regex="a+",
        generation_kwargs={"stop": ["x"], "top_k": 4}, mode="node", max_num_seqs=8,
    )  # fmt: skip
    generation.generate([A], None, 1)
    call = generation.engines.calls[-1]
    assert call.max_tokens == 9
    assert call.sampling == {
        "repetition_penalty": 1.0, "temperature": 0.5, "top_p": 1.0, "top_k": 4, "min_p": 0.0, "stop": ["x"],
        "structured_outputs": {"regex": "a+"},
    }  # fmt: skip
    assert generation._host.keywords == {"mode": "node", "max_num_seqs": 8}
    assert build(generation_kwargs={"max_tokens": 3}).max_completion_length == 3


def test_what_a_callback_changes_of_trls_attributes_reaches_the_next_request():
    generation = build(temperature=0.5, generation_kwargs={"stop": ["x"]})
    generation.max_completion_length, generation.temperature, generation.min_p = 3, 0.9, None
    generation.generation_kwargs["stop"] = ["y"]
    generation.generate([A], None, 1)
    call = generation.engines.calls[-1]
    assert (call.max_tokens, call.sampling["temperature"], call.sampling["min_p"]) == (3, 0.9, 0.0)
    assert call.sampling["stop"] == ["y"]


@pytest.mark.parametrize("name", OF_THE_START)
def test_an_attribute_that_only_the_start_of_an_engine_reads_cannot_be_set(name):
    with refused(name):
        setattr(build(), name, 2)


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_cannot_change_while_rows_are_open(name):
    streams = SimpleNamespace(open_stream=lambda *limits: None)
    ahead, drained = build(max_staleness=1, ahead_engines=streams), build()
    if name == "max_completion_length":  # a shorter row needs no correction
        ahead.max_completion_length = 5
        # a row that is continued keeps its limit
        ahead = build(max_staleness=2, ahead_engines=streams)
    with refused(name, got=3):
        setattr(ahead, name, 3)
    setattr(ahead, name, getattr(ahead, name))
    setattr(drained, name, 3)


def test_every_attribute_of_trls_object_is_forwarded_or_refused_or_its_own():
    source = inspect.getsource(VLLMGeneration.__init__) + inspect.getsource(
        VLLMGeneration._init_vllm
    )
    theirs = set(re.findall(r"^ +self\.([a-z]\w*) = ", source, re.MULTILINE))
    # objects, which no callback replaces
    made_by_it = {
        "model",
        "accelerator",
        "llm",
        "vllm_client",
    }
    assert theirs - made_by_it <= {*SAMPLING, *OF_THE_START}
    assert {*SAMPLING, *OF_THE_START} <= theirs


def test_a_sampling_attribute_that_a_callback_changes_in_the_trainer_reaches_the_engines():
    """TRL's loss divides logits by `trainer.temperature`, and its engine would go on with the old one."""
    generation = build(temperature=0.5)
    trainer = SimpleNamespace(
        vllm_generation=generation, _sampled={"temperature": 0.5, "top_p": 1.0}, top_p=1.0
    )
    generation.top_p, trainer.temperature = 0.8, 0.7
    NodeTrainer._forward_sampling(trainer)
    assert (generation.temperature, generation.top_p, trainer._sampled["temperature"]) == (
        0.7,
        0.8,
        0.7,
    )
    generation.temperature = 0.6
    NodeTrainer._forward_sampling(trainer)
    assert generation.temperature == 0.6, "the trainer's has not changed since"


@pytest.mark.parametrize("settings", [{}, {"generation_kwargs": {"max_tokens": None}}])
def test_without_a_limit_of_completions_the_engines_context_is_the_limit(settings):
    generation = build(max_completion_length=None, **settings)
    generation.generate([A], None, 1)
    limit = generation.engines.max_model_len
    assert generation.engines.calls[-1].max_tokens == generation.max_completion_length == limit == 8


def test_more_than_the_sampled_tokens_log_prob_is_refused():
    with refused("logprobs", got=5):
        build(logprobs=5)


@pytest.mark.parametrize(
    "settings", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"structured_outputs_regex": "a"},
                 *({"generation_kwargs": {name: value}} for name, value in
                   {"min_tokens": 2, "bad_words": ["a"], "allowed_token_ids": [1]}.items())],
)  # fmt: skip
def test_settings_that_truncate_are_refused_if_log_probs_would_be_truncated_too(settings):
    build(
        truncated_logprobs="no hook",
        temperature=0.7,
        repetition_penalty=1.1,
        generation_kwargs={"stop": ["a"]},
    )
    build(truncated_logprobs="no hook", logprobs=None, **settings)  # the trainer reads none
    build(**settings)
    with pytest.raises(ConfigurationError, match=r"Rank 3 \(node 1\).*engine 0 of node 1.*no hook"):
        build(truncated_logprobs="no hook", **settings)


def test_a_prompt_that_fills_the_context_names_row_rank_and_cure():
    generation = build(rank=3)
    generation.generate([[1] * 7], None, 1)
    with pytest.raises(PromptTooLongError) as error:
        generation.generate([A, [1] * 8, [1] * 9], None, 1)
    for word in ["Row 1 of rank 3", "8 tokens", "context is 8", "`vllm_max_model_length`"]:
        assert word in str(error.value)
    assert len(generation.engines.calls) == 1


def test_a_prompt_without_a_token_names_row_and_rank():
    generation = build(rank=3)
    with pytest.raises(RolloutError, match=r"Row 1 of rank 3: .*no tokens"):
        generation.generate([A, []], None, 1)
    assert not generation.engines.calls


# ---- weights


def test_every_sync_is_a_new_version_that_generation_waits_for():
    generation = build()
    entered = []

    @contextmanager
    def profiler():
        entered.append("profiled")
        yield

    for update in (1, 2):
        generation.weights_changed()
        generation.sync_weights()
        generation.generate([A], None, 1, profiler())
        assert generation.engines.calls[-1].min_update == update
    assert generation._host.synced == [WeightVersion(1, 17), WeightVersion(2, 17)]
    assert generation.last_sync.num_buckets == 2 and entered == ["profiled"] * 2
    assert generation._phases.take_sums()[0] > 0


def test_the_weights_of_a_step_are_sent_once_and_again_only_if_they_changed_or_the_sync_failed():
    generation = build()
    collectives = []
    generation.accelerator.wait_for_everyone = lambda: collectives.append("barrier")
    for must_sync in (True, False, False):
        assert generation.must_sync == must_sync
        generation.sync_weights()
    assert collectives == ["barrier"] and generation._host.synced == [WeightVersion(1, 17)]
    sync, generation._host.step = generation._host.updates.sync, lambda: 18
    generation._host.updates.sync = lambda version: 1 / 0
    with pytest.raises(ZeroDivisionError):
        generation.sync_weights()
    generation._host.updates.sync = sync
    generation.sync_weights()
    assert generation._host.synced[1:] == [WeightVersion(3, 18)]
    generation.weights_changed()
    assert generation.must_sync and generation._host.whole == 1
    generation.sync_weights()
    assert generation._host.synced[2:] == [WeightVersion(4, 18)] and len(collectives) == 4


def test_a_row_that_other_weights_made_is_an_error_that_names_engine_and_versions():
    generation = build()
    generation.sync_weights()
    generation.engines.version = WeightVersion(7, 3)
    with pytest.raises(WeightVersionError, match="engine 0 of node 1 .*update 7 .*update 1"):
        generation.generate([A], None, 1)
