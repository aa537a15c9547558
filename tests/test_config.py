"""Settings: the defaults that differ from TRL's, every rule with its cure, and TRL's own config taken literally."""

import os
from collections.abc import Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin, get_type_hints
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from refusals import check, refusal, refused
from transformers import HfArgumentParser, TrainingArguments
from trl import GRPOConfig

from trl_multinode import engine_keys
from trl_multinode.call_checks import check_call, check_dynamic_sampling, check_in_flight
from trl_multinode.config import MultiNodeGRPOConfig, NodeFields
from trl_multinode.engine_keys import fields_in_vllm
from trl_multinode.node_settings import NodeSettings, check_settings, is_node_mode
from trl_multinode.reporting.setup import report_choices
from trl_multinode.run.topology import Topology
from trl_multinode.settings import OF_TRL, Number, Settings, check_value

TRLS_MODES = [{"vllm_mode": "colocate"}, {"vllm_mode": "server"}, {"use_vllm": False}]
IN_FLIGHT = {"max_staleness": 2}
SAMPLING = {"dynamic_sampling": 8, "score_groups": 0}


def ours(tmp_path, **fields) -> MultiNodeGRPOConfig:
    return MultiNodeGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **fields)


def plain(tmp_path, **fields) -> GRPOConfig:
    return GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **fields)


def test_exactly_three_of_trls_defaults_differ():
    theirs, mine = GRPOConfig.__dataclass_fields__, MultiNodeGRPOConfig.__dataclass_fields__
    changed = {name: (theirs[name].default, mine[name].default) for name in theirs}
    assert {
        name: pair
        for name, pair in changed.items()
        if pair[0] is not pair[1] and pair[0] != pair[1]
    } == {
        "use_vllm": (False, True),
        "vllm_mode": ("colocate", "node"),
        "vllm_gpu_memory_utilization": (0.3, None),
    }


def test_every_setting_has_a_help_that_argparse_can_show_and_a_line_in_the_docstring():
    for one in fields(Settings):
        assert one.metadata["help"] and "%" not in one.metadata["help"], one.name
        assert f"{one.name} (`" in NodeFields.__doc__, one.name


@pytest.mark.parametrize(
    ("fields", "share", "node_mode"),
    [
        ({}, None, True),
        ({"vllm_gpu_memory_utilization": 0.3}, 0.3, True),
        ({"vllm_gpu_memory_utilization": 0.55}, 0.55, True),
        ({"vllm_mode": "colocate"}, 0.3, False),
        ({"vllm_mode": "server"}, 0.3, False),
    ],
)
def test_node_mode_is_the_default_and_leaves_the_gpu_share_to_user_or_devices(
    tmp_path, fields, share, node_mode
):
    args = ours(tmp_path, **fields)
    assert args.vllm_gpu_memory_utilization == share and is_node_mode(args) is node_mode


# ---- refused values: the setting, the value and the way out are in the message

MODE, CORRECTION = "vllm_importance_sampling_mode", "vllm_importance_sampling_correction"
NO_CORRECTION = {CORRECTION: False}
POSITIVE = [
    "engine_start_timeout",
    "engine_stall_timeout",
    "sync_bucket_mb",
    "save_minutes",
    "call_timeout",
]
HOST = SimpleNamespace(topology=Topology(0, 1, 0, 1, 0, 1, launched=False))
COUNTS = ["vllm_tensor_parallel_size"]
Row = tuple[dict[str, Any], str, Any]
REFUSED_FIELDS: list[Row] = [  # fields of the config, the setting that is named, its value
    *(({name: value}, name, value) for name in POSITIVE for value in (0, -1.5)),
    *(({name: value}, name, value) for name in COUNTS for value in (0, -2)),
    ({"num_engines": -1}, "num_engines", -1),
    ({"logprob_divergence_limit": -0.1}, "logprob_divergence_limit", -0.1),
    ({"engine_kwargs": {"dtype": "bfloat61"}}, "dtype", "bfloat61"),
    ({"vllm_mode": "nodes"}, "vllm_mode", "nodes"),
    ({"max_completion_length": None, "loss_type": "dr_grpo"}, "max_completion_length", None),
    # rounds ahead
    ({"max_staleness": 9}, "max_staleness", 9),
    ({"max_staleness": -1}, "max_staleness", -1),
    *(({"max_staleness": rounds} | NO_CORRECTION, CORRECTION, False) for rounds in (1, 2)),
    *(
        (setting | mode, name, None)
        for setting in ({"max_staleness": 1}, IN_FLIGHT, {"save_minutes": 30.0})
        for mode in TRLS_MODES
        for name in setting
    ),
    (IN_FLIGHT | {"max_age": 1}, "max_age", 1),
    (IN_FLIGHT | {MODE: "sequence_truncate"}, MODE, "sequence_truncate"),
    *(
        ({name: value, "max_staleness": rounds}, name, value)
        for name, value in {"max_age": 4, "recompute_kv": True}.items()
        for rounds in (0, 1)
    ),
    # what node mode sets itself
    ({"engine_kwargs": {"load_format": "auto"}}, "engine_kwargs", "load_format"),
    ({"engine_kwargs": '{"tensor_parallel_size": 2}'}, "engine_kwargs", "tensor_parallel_size"),
    ({"engine_kwargs": {"seed": 3}}, "engine_kwargs", "seed"),
]


@pytest.mark.parametrize(("fields", "setting", "got"), REFUSED_FIELDS)
def test_a_value_that_cannot_work_is_refused_with_a_way_out(tmp_path, fields, setting, got):
    error = refusal(ours, tmp_path, **fields)
    check(error, setting)
    assert error.cure or error.expected, "no way out"
    assert error.got == got or got is None


# ---- malformed values of every setting


def malformed() -> Iterator[tuple[str, Any]]:
    """Yield values of another type, NaN, infinity, and values beyond both ends of the range."""
    hints = get_type_hints(Settings, include_extras=True) | OF_TRL
    for name, hint in hints.items():
        kind, notes = (
            (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
        )
        alternatives = set(get_args(kind) or [kind])
        number = next((note for note in notes if isinstance(note, Number)), None)
        values: list[Any] = []
        if alternatives & {int, float}:
            low = number.above if number.above > float("-inf") else number.least - 1
            values = [float("nan"), float("inf"), "1", True, [1], low, number.most * 2]
            values += [1.5] if float not in alternatives else []
        elif bool in alternatives:
            values = ["no", "false", 1, None]
        elif name == "engine_kwargs":
            values = ["abc", "[1]", [1], {"no_such_setting": 1}, {"max_num_seq": 1}]
        elif name == "vllm_devices":
            values = [[], [1, 1], [-1], ["0"], [True], [0.5], "0", 0, [float("nan")]]
        elif name == "score_with_batch":
            values = [[], ["a", "a"], [1], "a"]
        else:
            values = ["other", 1, None]
        yield from ((name, value) for value in values)


MALFORMED = list(malformed())


@pytest.mark.parametrize(
    ("name", "value"), MALFORMED, ids=[f"{name}={value!r}" for name, value in MALFORMED]
)
def test_a_malformed_value_is_refused_by_name(tmp_path, name, value):
    error = refusal(ours, tmp_path, **{name: value})
    check(error, name)
    assert not str(error).endswith(("?.", ".."))
    args = plain(tmp_path, use_vllm=True, vllm_mode="node")
    setattr(args, name, value)
    check(refusal(check_settings, args), name)


def test_the_ends_of_each_range_and_numbers_of_numpy_are_taken():
    for name, hint in (get_type_hints(Settings, include_extras=True) | OF_TRL).items():
        for note in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
            if isinstance(note, Number) and name != "vllm_devices":
                low = note.least if note.least > float("-inf") else 0.5
                for value in (low, note.most):
                    check_value(name, int(value) if value == int(value) else value, hint)
    check_value("a", np.int64(3), Annotated[int, Number(least=1)])
    check_value("a", np.float32(0.5), Annotated[float | None, Number(above=0)])
    check_value("a", 3, Annotated[float, Number(above=0)])


@pytest.mark.parametrize("text", ["nan", "inf", "-1"])
def test_a_command_line_has_the_same_limits(tmp_path, text):
    parser = HfArgumentParser(MultiNodeGRPOConfig)
    words = [
        "--output_dir",
        str(tmp_path),
        "--use_cpu",
        "True",
        "--bf16",
        "False",
        f"--heartbeat_timeout={text}",
    ]
    with refused("heartbeat_timeout", expected="at least 0 and at most 1e7 s"):
        parser.parse_args_into_dataclasses(words)


def test_a_temperature_of_zero_is_refused_with_the_reason(tmp_path):
    check(refusal(ours, tmp_path, temperature=0), "temperature", got=0)
    check(refusal(ours, tmp_path, generation_kwargs={"temperature": 0.0}), "temperature", got=0.0)
    assert ours(tmp_path, temperature=0, use_vllm=False).temperature == 0  # TRL's own business


def test_settings_that_nothing_reads_in_this_mode_are_not_refused(tmp_path):
    ours(tmp_path, vllm_mode="nodes", use_vllm=False)
    ours(tmp_path, max_completion_length=None, loss_type="dr_grpo", use_vllm=False)
    settings = {"max_completion_length": None, "micro_batch_tokens": 64, "max_staleness": 1}
    assert ours(tmp_path, **settings).max_completion_length is None
    assert ours(tmp_path, max_staleness=0, **NO_CORRECTION).max_staleness == 0
    for mode in TRLS_MODES:
        for generation in ({"seed": 1}, {"do_sample": False}):
            assert (
                ours(tmp_path, generation_kwargs=generation, **mode).generation_kwargs == generation
            )


REFUSED = {
    "n": "`num_generations`", "seed": "`rollout_seed`", "logprobs": "log-prob", "output_kind": "every request",
}  # fmt: skip
FOREIGN = {  # transformers' names and slips of the pen
    "do_sample": "`temperature`", "num_beams": "beam search", "min_new_tokens": "`min_tokens`",
    "max_new_tokens": "`max_completion_length`", "no_such_setting": "`SamplingParams`",
    "_eos_token_id": "`SamplingParams`", "presence_penality": "'presence_penalty'",
}  # fmt: skip


def check_generation_key(tmp_path, key: str, cure: str, record_property) -> None:
    error = refusal(ours, tmp_path, generation_kwargs={"top_k": 3, key: 1})
    record_property("message", str(error))
    check(error, "generation_kwargs", cure, got=key)


@pytest.mark.feature(
    "Generation", "`n`, `seed` or `logprobs` in `generation_kwargs`", engine="none", refused=True
)
@pytest.mark.parametrize("key", REFUSED)
def test_generation_kwargs_that_node_mode_sets_itself_are_refused_with_the_cure(
    tmp_path, key, record_property
):
    check_generation_key(tmp_path, key, REFUSED[key], record_property)


@pytest.mark.feature(
    "Generation", "`generation_kwargs` that vLLM does not know", engine="none", refused=True
)
@pytest.mark.parametrize("key", FOREIGN)
def test_generation_kwargs_that_vllm_does_not_know_are_refused_before_an_engine_starts(
    tmp_path, key, record_property
):
    check_generation_key(tmp_path, key, FOREIGN[key], record_property)


@pytest.mark.nightly
def test_without_vllms_source_only_known_slips_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_keys, "fields_in_vllm", lambda *_: frozenset())
    assert ours(tmp_path, generation_kwargs={"min_tokens": 1, "no_such_setting": 1})
    check(
        refusal(ours, tmp_path, generation_kwargs={"num_beams": 2}),
        "generation_kwargs",
        got="num_beams",
    )
    assert ours(tmp_path, engine_kwargs={"no_such_setting": 1})
    monkeypatch.setattr(engine_keys, "find_spec", lambda name: None)
    assert fields_in_vllm.__wrapped__("sampling_params.py", "SamplingParams") == frozenset()


@pytest.mark.feature(
    "Generation", "caches outside of the engine (`kv_transfer_config`)", engine="none", refused=True
)
@pytest.mark.parametrize("key", ["kv_transfer_config", "kv_offloading_size", "ec_transfer_config"])
def test_a_cache_that_a_sync_does_not_empty_is_refused(tmp_path, key, record_property):
    error = refusal(ours, tmp_path, engine_kwargs={"max_num_seqs": 4, key: 1})
    record_property("message", str(error))
    check(error, "engine_kwargs", got=key)


# ---- a config of TRL's


def test_a_plain_config_is_taken_literally(tmp_path):
    args = plain(tmp_path)
    check_settings(args)
    assert not is_node_mode(args) and args.vllm_mode == "colocate"
    assert not is_node_mode(plain(tmp_path, vllm_mode="node"))  # `use_vllm` is off


def test_a_plain_config_can_ask_for_node_mode_and_has_our_defaults(tmp_path):
    args = plain(tmp_path, use_vllm=True, vllm_mode="node")
    check_settings(args)
    assert is_node_mode(args)
    assert args.vllm_gpu_memory_utilization == 0.3  # TRL's, literally
    assert NodeSettings.of(args) == replace(
        NodeSettings.of(ours(tmp_path)), vllm_gpu_memory_utilization=0.3
    )
    assert NodeSettings.of(args).engine_stall_timeout == 300.0
    args.engine_kwargs = '{"max_num_seqs": 4}'  # as on a command line
    assert NodeSettings.of(args).engine_kwargs == {"max_num_seqs": 4}


def test_settings_are_typed_and_keep_what_they_were_read_from(tmp_path):
    args = ours(
        tmp_path, rollout_seed=3, vllm_devices=[1, 2], engine_kwargs='{"max_num_seqs": 4}', seed=7
    )
    settings = NodeSettings.of(args)
    assert args.engine_kwargs == {"max_num_seqs": 4}
    args.rollout_seed = args.engine_kwargs["max_num_seqs"] = args.vllm_devices[0] = 9
    assert (settings.rollout_seed, settings.engine_kwargs, settings.vllm_devices) == (
        3,
        {"max_num_seqs": 4},
        [1, 2],
    )
    assert (settings.seed, settings.vllm_tensor_parallel_size) == (7, 1)


def test_the_rules_hold_for_a_plain_config_too(tmp_path):
    args = plain(tmp_path, use_vllm=True, vllm_mode="node", generation_kwargs={"seed": 3})
    check(refusal(check_settings, args), "generation_kwargs", "`rollout_seed`", got="seed")
    args = plain(tmp_path, use_vllm=True, vllm_mode="nodes")
    check(refusal(check_settings, args), "vllm_mode", got="nodes")
    args = plain(tmp_path, use_vllm=True, vllm_mode="node")
    args.engine_kwargs = '{"dtype": "half"}'
    check(refusal(check_settings, args), "dtype", got="half")


# ---- rounds in flight, rewards of a group before its round, dynamic sampling


def test_settings_of_rounds_and_groups_are_off_by_default_and_taken_as_given(tmp_path):
    settings = NodeSettings.of(ours(tmp_path))
    assert not settings.in_flight and (settings.max_staleness, settings.recompute_kv) == (0, False)
    assert (settings.score_groups, settings.score_with_batch, settings.dynamic_sampling) == (
        None,
        None,
        0,
    )
    assert NodeSettings.of(plain(tmp_path)).max_staleness == 0
    assert not NodeSettings.of(ours(tmp_path, max_staleness=1)).in_flight
    settings = NodeSettings.of(ours(tmp_path, **IN_FLIGHT))
    assert settings.in_flight and settings.oldest_rounds == 6
    assert (
        NodeSettings.of(ours(tmp_path, **IN_FLIGHT, max_age=2, recompute_kv=True)).oldest_rounds
        == 2
    )
    for processes in (0, 2):
        scored = NodeSettings.of(
            ours(tmp_path, score_groups=processes, score_with_batch=["diversity"])
        )
        assert scored.scores_groups and scored.score_with_batch == ["diversity"]
    checked_again(tmp_path, **SAMPLING | {"dynamic_sampling": 3})


def test_a_group_in_flight_may_not_straddle_ranks_and_the_nearest_batches_are_named(tmp_path):
    """2 nodes x 7 ranks and groups of 8: TRL takes 4 rows a rank, and then every second group is on two ranks."""
    with mock.patch.object(TrainingArguments, "world_size", 14):
        sizes = {"num_generations": 8, "steps_per_generation": 1}
        assert ours(tmp_path, per_device_train_batch_size=4, **sizes).generation_batch_size == 56
        small = refusal(ours, tmp_path, per_device_train_batch_size=4, **sizes, **IN_FLIGHT)
        check(small, "per_device_train_batch_size", "`steps_per_generation=2`", got=4)
        assert "`per_device_train_batch_size=8`" in small.cure
        check(refusal(ours, tmp_path, per_device_train_batch_size=12, **sizes, **IN_FLIGHT),
              "per_device_train_batch_size", "8 or 16", got=12)  # fmt: skip
        assert (
            ours(tmp_path, per_device_train_batch_size=8, **sizes, **IN_FLIGHT).max_staleness == 2
        )


@pytest.mark.parametrize(
    ("given", "mode", "clip"),
    [
        ({}, "token_truncate", 2.0),
        ({"vllm_importance_sampling_clip_max": 5.0}, "token_truncate", 5.0),
        ({"vllm_importance_sampling_mode": "token_truncate"}, "token_truncate", 3.0),
        ({"vllm_importance_sampling_mode": "token_mask"}, "token_mask", 3.0),
    ],
)
def test_in_flight_tokens_are_corrected_one_by_one_unless_the_user_chose_a_mode(
    tmp_path, given, mode, clip
):
    args = ours(tmp_path, **IN_FLIGHT, **given)
    again = replace(args, generation_batch_size=None)  # as a script that changes one field does
    for one in (args, again):
        assert (
            one.vllm_importance_sampling_mode == mode
            and one.vllm_importance_sampling_clip_max == clip
        )
    drained = ours(tmp_path, max_staleness=1)
    assert (drained.vllm_importance_sampling_mode, drained.vllm_importance_sampling_clip_max) == (
        "sequence_mask",
        3.0,
    )


def checked_again(folder, **fields) -> None:
    """Check a config in which `score_groups` and what needs it are set last."""
    scored = {
        name: fields.pop(name) for name in ("score_groups", "score_with_batch") if name in fields
    }
    args = ours(folder)
    for name, value in (fields | scored).items():
        setattr(args, name, value)
    check_settings(args)


@pytest.mark.parametrize(
    ("fields", "setting", "got"),
    [
        ({"score_with_batch": ["a"]}, "score_with_batch", ["a"]),
        ({"score_groups": -1}, "score_groups", -1),
        ({"score_groups": True}, "score_groups", True),
        ({"score_groups": 2, "vllm_mode": "colocate"}, "score_groups", "colocate"),
        ({"score_groups": 0, "num_generations": 3}, "per_device_train_batch_size", 8),
        ({"dynamic_sampling": 8}, "score_groups", None),
        (SAMPLING | {"score_with_batch": ["diversity"]}, "score_with_batch", ["diversity"]),
        (SAMPLING | {"dynamic_sampling": -1}, "dynamic_sampling", -1),
        (SAMPLING | {"dynamic_sampling": True}, "dynamic_sampling", True),
        (SAMPLING | {"vllm_mode": "colocate"}, "score_groups", "colocate"),
        (SAMPLING | {"num_generations": 3}, "per_device_train_batch_size", 8),
    ],
)
def test_groups_that_cannot_be_scored_or_sampled_again_are_refused_with_a_way_out(
    tmp_path, fields, setting, got
):
    error = refusal(checked_again, tmp_path, **fields)
    check(error, setting, got=got)
    assert error.cure or error.expected, "no way out"


# ---- calls


def test_reward_models_and_streams_are_not_sampled_again(tmp_path):
    args, rows = ours(tmp_path), Dataset.from_dict({"prompt": ["a"]})
    call = {"reward_funcs": [len], "train_dataset": rows}
    check_dynamic_sampling(args, call | {"reward_funcs": "a/model"})
    args.dynamic_sampling = 8
    check_dynamic_sampling(args, call)
    stream = refusal(check_in_flight, args, rows.to_iterable_dataset())
    check(stream, "dynamic_sampling", got="IterableDataset")
    for model, name in ("a/model", "a/model"), ([len, torch.nn.Linear(1, 1)], "Linear"):
        refused_model = refusal(check_dynamic_sampling, args, call | {"reward_funcs": model})
        check(refused_model, "dynamic_sampling", got=name)


def test_streams_are_not_in_flight(tmp_path):
    rows = Dataset.from_dict({"prompt": ["a"]})
    stream = refusal(check_in_flight, ours(tmp_path, **IN_FLIGHT), rows.to_iterable_dataset())
    check(stream, "max_staleness", "`max_staleness=1`", got="IterableDataset")
    check_in_flight(ours(tmp_path), rows.to_iterable_dataset())
    check_in_flight(ours(tmp_path, **IN_FLIGHT), rows)


PIXEL = [
    {
        "role": "user",
        "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "a"}],
    }
]
TEXT = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": ["a", "b"], "images": [["a"], []]},
        {"prompt": ["a", "b"], "image": ["a", None]},
        {"prompt": [PIXEL, TEXT]},
    ],
)
def test_in_flight_all_rows_or_none_have_images_where_weights_are_sharded(tmp_path, columns):
    some = Dataset.from_dict(columns)
    args, fsdp = ours(tmp_path, **IN_FLIGHT), {"ACCELERATE_USE_FSDP": "true"}
    # another row may take the place of one with images
    drawn = ours(tmp_path, score_groups=0, dynamic_sampling=8)
    one_ahead = ours(tmp_path, max_staleness=1)
    check_in_flight(args, some)
    with mock.patch.dict(os.environ, fsdp):
        check(refusal(check_in_flight, args, some), "max_staleness", "`max_staleness=1`", got=2)
        check(refusal(check_in_flight, drawn, some), "dynamic_sampling", "`max_staleness=1`", got=8)
        for works in (some.select([0]), some.select([1])):
            check_in_flight(args, works)
        check_in_flight(one_ahead, some)
    check(refusal(check_call, HOST, args, {"model": "no/such/model", "train_dataset": some.to_iterable_dataset()}),
          "max_staleness")  # fmt: skip


# ---- choices with another result than their author may expect


class Derived(GRPOConfig):
    pass


def choices(capsys, args, rank: int = 0) -> list[str]:
    with mock.patch.object(TrainingArguments, "process_index", rank):
        report_choices(args, MultiNodeGRPOConfig, isinstance(args, NodeFields))
    return capsys.readouterr().out.splitlines()


BATCHING = "use_transformers_continuous_batching"
OFF = "node mode is off"


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        (ours, {"vllm_mode": "colocate"}, [OFF, "vllm_mode='colocate'", "use_vllm=False"]),
        (ours, {"vllm_mode": "server"}, [OFF, "vllm_mode='server'", "use_vllm=False"]),
        (plain, {}, [OFF, "trl.GRPOConfig", "trl_multinode"]),
        (
            plain,
            {"vllm_mode": "colocate", "use_vllm": True},
            [OFF, "trl.GRPOConfig", "trl_multinode"],
        ),
        (Derived, {"use_cpu": True, "bf16": False}, [OFF, "Derived", "trl.GRPOConfig"]),
        (ours, {BATCHING: True}, [BATCHING, "use_vllm=False"]),
        (ours, {BATCHING: True, "vllm_mode": "colocate"}, [BATCHING, "use_vllm=False"]),
    ],
)
def test_a_choice_that_may_surprise_is_reported_by_the_main_process(
    tmp_path, capsys, config, fields, words
):
    args = config(str(tmp_path), **fields)
    lines = choices(capsys, args)
    both = BATCHING in fields and "vllm_mode" in fields
    assert len(lines) == 1 + both and all(word in lines[-1] for word in words), lines
    assert choices(capsys, args, rank=1) == []


def test_every_other_choice_is_silent(tmp_path, capsys):
    for silent in ({}, {"use_vllm": False}, {"use_vllm": False, BATCHING: True}):
        assert choices(capsys, ours(tmp_path, **silent)) == []
    assert choices(capsys, plain(tmp_path, use_vllm=True, vllm_mode="node")) == []
