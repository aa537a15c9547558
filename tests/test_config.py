"""Settings: the defaults that differ from TRL's, every rule with its cure, and TRL's own config taken literally."""

from dataclasses import FrozenInstanceError, fields, replace
from unittest import mock

import pytest
import torch
from datasets import Dataset
from transformers import TrainingArguments
from trl import GRPOConfig

import trl_multinode
from trl_multinode import engine_keys
from trl_multinode.call_checks import check_call, check_dynamic_sampling, check_in_flight, check_recorded
from trl_multinode.config import MultiNodeGRPOConfig, NodeFields
from trl_multinode.engine_keys import sampling_keys
from trl_multinode.errors import ConfigurationError
from trl_multinode.node_settings import NodeSettings, check_settings, is_node_mode
from trl_multinode.reporting import report_choices


def ours(tmp_path, **fields) -> MultiNodeGRPOConfig:
    return MultiNodeGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **fields)


def plain(tmp_path, **fields) -> GRPOConfig:
    return GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **fields)


def refusal(check, *args, **fields) -> str:
    with pytest.raises(ConfigurationError) as error:
        check(*args, **fields)
    return str(error.value)


def test_the_public_name_is_the_config():
    assert trl_multinode.GRPOConfig is trl_multinode.MultiNodeGRPOConfig is MultiNodeGRPOConfig


def test_exactly_three_of_trls_defaults_differ():
    theirs, mine = GRPOConfig.__dataclass_fields__, MultiNodeGRPOConfig.__dataclass_fields__
    changed = {name: (theirs[name].default, mine[name].default) for name in theirs}
    assert {name: pair for name, pair in changed.items() if pair[0] is not pair[1] and pair[0] != pair[1]} == {
        "use_vllm": (False, True),
        "vllm_mode": ("colocate", "node"),
        "vllm_gpu_memory_utilization": (0.3, None),
    }


def test_every_field_of_ours_has_help_and_a_line_in_the_docstring():
    ours = [name for name in NodeFields.__annotations__ if not name.startswith("_")]
    assert len(ours) > 15 and set(ours) <= set(MultiNodeGRPOConfig.__dataclass_fields__)
    for name in ours:
        assert NodeFields.__dataclass_fields__[name].metadata["help"], name
        assert f"{name} (" in NodeFields.__doc__ or f"`{name}=" in NodeFields.__doc__, name


def test_node_mode_is_the_default_and_leaves_the_gpu_share_to_the_devices(tmp_path):
    args = ours(tmp_path)
    assert is_node_mode(args) and args.vllm_gpu_memory_utilization is None


@pytest.mark.parametrize("given", [0.3, 0.55])
def test_a_gpu_share_that_the_user_gives_wins(tmp_path, given):
    assert ours(tmp_path, vllm_gpu_memory_utilization=given).vllm_gpu_memory_utilization == given


@pytest.mark.parametrize("fields", [{"vllm_mode": "colocate"}, {"vllm_mode": "server"}])
def test_trls_modes_get_trls_gpu_share(tmp_path, fields):
    args = ours(tmp_path, **fields)
    assert args.vllm_gpu_memory_utilization == 0.3 and not is_node_mode(args)


def test_engine_kwargs_may_be_json_as_on_a_command_line(tmp_path):
    assert ours(tmp_path, engine_kwargs='{"max_num_batched_tokens": 64}').engine_kwargs == {
        "max_num_batched_tokens": 64
    }


POSITIVE = ["engine_start_timeout", "engine_stall_timeout", "sync_bucket_mb", "save_minutes", "reward_timeout"]


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("value", [0, -1.5])
def test_times_and_sizes_must_be_positive(tmp_path, name, value):
    assert refusal(ours, tmp_path, **{name: value}) == f"`{name}` must be positive, got {value}."


@pytest.mark.parametrize("name", ["num_engines", "vllm_tensor_parallel_size"])
@pytest.mark.parametrize("value", [0, -2])
def test_counts_must_be_at_least_one(tmp_path, name, value):
    assert refusal(ours, tmp_path, **{name: value}) == f"`{name}` must be at least 1, got {value}."


def test_a_copy_that_no_restart_would_use_is_refused(tmp_path):
    message = "`engine_restart_copy` needs `engine_restarts` of 1 at least, got 0. Leave it out."
    assert refusal(ours, tmp_path, engine_restart_copy=True, engine_restarts=0) == message


def test_a_negative_divergence_limit_is_refused_because_every_batch_would_trip_it(tmp_path):
    message = refusal(ours, tmp_path, logprob_divergence_limit=-0.1)
    assert "`logprob_divergence_limit`" in message and "-0.1" in message


def test_an_engine_dtype_that_torch_does_not_have_is_refused_before_the_model(tmp_path):
    message = refusal(ours, tmp_path, engine_dtype="bfloat61")
    assert "`engine_dtype`" in message and "bfloat61" in message


def test_an_unknown_mode_is_refused_with_the_known_ones(tmp_path):
    message = refusal(ours, tmp_path, vllm_mode="nodes")
    assert message == "`vllm_mode` must be 'node', 'server' or 'colocate', got 'nodes'."
    ours(tmp_path, vllm_mode="nodes", use_vllm=False)  # not read then


REFUSED = {
    "n": "`num_generations`", "seed": "`rollout_seed`", "logprobs": "sampled token's log-prob",
    "output_kind": "sets it for every request",
}  # fmt: skip
FOREIGN = {  # transformers' names and slips of the pen
    "do_sample": "change `temperature`", "num_beams": "no beam search", "min_new_tokens": "use `min_tokens`",
    "max_new_tokens": "use `max_completion_length`", "no_such_setting": "`SamplingParams` has no such setting.",
    "_eos_token_id": "no such setting", "presence_penality": "did you mean 'presence_penalty'?",
}  # fmt: skip


@pytest.mark.feature("Generation", "`n`, `seed` or `logprobs` in `generation_kwargs`", engine="none", refused=True)
@pytest.mark.parametrize("key", REFUSED)
def test_generation_kwargs_that_node_mode_sets_itself_are_refused_with_the_cure(tmp_path, key, record_property):
    message = refusal(ours, tmp_path, generation_kwargs={"top_k": 3, key: 1})
    record_property("message", message)
    assert f"`generation_kwargs` may not contain '{key}' in node mode" in message and REFUSED[key] in message


@pytest.mark.feature("Generation", "`generation_kwargs` that vLLM does not know", engine="none", refused=True)
@pytest.mark.parametrize("key", FOREIGN)
def test_generation_kwargs_that_vllm_does_not_know_are_refused_before_an_engine_starts(tmp_path, key, record_property):
    message = refusal(ours, tmp_path, generation_kwargs={"top_k": 3, key: 1})
    record_property("message", message)
    assert f"`generation_kwargs` may not contain '{key}' in node mode" in message and FOREIGN[key] in message


def test_without_vllms_source_only_known_slips_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_keys, "sampling_keys", frozenset)
    assert ours(tmp_path, generation_kwargs={"min_tokens": 1, "no_such_setting": 1})
    assert "no beam search" in refusal(ours, tmp_path, generation_kwargs={"num_beams": 2})
    monkeypatch.setattr(engine_keys, "find_spec", lambda name: None)
    assert engine_keys.sampling_keys() == sampling_keys.__wrapped__() == frozenset()


@pytest.mark.parametrize("fields", [{"vllm_mode": "colocate"}, {"vllm_mode": "server"}, {"use_vllm": False}])
def test_generation_kwargs_are_trls_own_business_in_trls_modes(tmp_path, fields):
    for mine in ({"seed": 1}, {"do_sample": False}):
        assert ours(tmp_path, generation_kwargs=mine, **fields).generation_kwargs == mine


def test_completions_without_a_limit_are_taken_unless_the_loss_divides_by_it(tmp_path):
    settings = {"max_completion_length": None, "micro_batch_tokens": 64, "max_staleness": 1}
    assert ours(tmp_path, **settings).max_completion_length is None
    message = refusal(ours, tmp_path, max_completion_length=None, loss_type="dr_grpo")
    assert "divides the loss by `max_completion_length`" in message
    ours(tmp_path, max_completion_length=None, loss_type="dr_grpo", use_vllm=False)


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
    assert NodeSettings.of(args) == replace(NodeSettings.of(ours(tmp_path)), vllm_gpu_memory_utilization=0.3)
    assert NodeSettings.of(args).engine_dtype == "auto" and NodeSettings.of(args).engine_stall_timeout == 300.0


def test_every_field_of_ours_is_read_and_those_of_the_mode_are_what_is_node_mode_reads():
    ours = {name for name in NodeFields.__annotations__ if not name.startswith("_")}
    assert ours - {one.name for one in fields(NodeSettings)} == {"use_vllm", "vllm_mode"}


def test_settings_are_typed_and_keep_what_they_were_read_from(tmp_path):
    args = ours(tmp_path, rollout_seed=3, vllm_devices=[1, 2], engine_kwargs='{"max_num_seqs": 4}', seed=7)
    settings = NodeSettings.of(args)
    args.rollout_seed = args.engine_kwargs["max_num_seqs"] = args.vllm_devices[0] = 9
    assert (settings.rollout_seed, settings.engine_kwargs, settings.vllm_devices) == (3, {"max_num_seqs": 4}, (1, 2))
    assert (settings.seed, settings.vllm_tensor_parallel_size) == (7, 1)
    with pytest.raises(FrozenInstanceError):
        settings.rollout_seed = 9  # type: ignore[misc]


def test_engine_kwargs_that_a_plain_config_holds_as_json_are_parsed(tmp_path):
    args = plain(tmp_path, use_vllm=True, vllm_mode="node")
    args.engine_kwargs = '{"max_num_seqs": 4}'
    assert NodeSettings.of(args).engine_kwargs == {"max_num_seqs": 4}
    args.engine_kwargs = '{"dtype": "float16"}'
    assert "`engine_kwargs` may not contain 'dtype'" in refusal(check_settings, args)


def test_the_rules_hold_for_a_plain_config_too(tmp_path):
    args = plain(tmp_path, use_vllm=True, vllm_mode="node", generation_kwargs={"seed": 3})
    assert "`rollout_seed`" in refusal(check_settings, args)
    args = plain(tmp_path, use_vllm=True, vllm_mode="nodes")
    assert "got 'nodes'" in refusal(check_settings, args)


# ---- one round ahead


@pytest.mark.parametrize("value", [2, -1])
def test_staleness_beyond_one_round_is_refused(tmp_path, value):
    assert refusal(ours, tmp_path, max_staleness=value) == f"`max_staleness` must be 0 or 1, got {value}."


def test_staleness_needs_the_importance_sampling_correction(tmp_path):
    message = refusal(ours, tmp_path, max_staleness=1, vllm_importance_sampling_correction=False)
    assert "`vllm_importance_sampling_correction=True`" in message and "`max_staleness=0`" in message
    assert ours(tmp_path, max_staleness=0, vllm_importance_sampling_correction=False).max_staleness == 0
    assert ours(tmp_path, max_staleness=1).max_staleness == 1


@pytest.mark.parametrize("fields", [{"vllm_mode": "colocate"}, {"vllm_mode": "server"}, {"use_vllm": False}])
@pytest.mark.parametrize("setting", [{"max_staleness": 1}, {"save_minutes": 30.0}])
def test_settings_need_node_mode(tmp_path, fields, setting):
    message = refusal(ours, tmp_path, **setting, **fields)
    assert "needs node mode" in message and "`vllm_mode='node'`" in message


@pytest.mark.parametrize("name", ["rollout_func", "environment_factory"])
def test_whole_rollouts_ahead_have_no_images_in_their_requests(tmp_path, name):
    rows = Dataset.from_dict({"prompt": ["a"], "images": [[]]})
    message = refusal(check_recorded, ours(tmp_path, max_staleness=1), {name: print, "train_dataset": rows})
    assert f"whole rollouts of `{name}` ahead" in message and "(column 'images')" in message
    assert "Use `max_staleness=0`" in message
    check_recorded(ours(tmp_path, max_staleness=1), {name: print, "train_dataset": rows.select_columns("prompt")})
    check_recorded(ours(tmp_path, max_staleness=1), {"tools": [print], "train_dataset": rows})  # made when needed
    check_recorded(ours(tmp_path), {name: print, "train_dataset": rows})
    message = refusal(check_recorded, ours(tmp_path, score_groups=True), {"train_dataset": rows})
    assert "`score_groups=True`" in message and "(column 'images')" in message and "Leave it out" in message


# ---- rounds in flight

IN_FLIGHT = {"weight_update": "in_flight", "open_rounds": 2, "vllm_importance_sampling_mode": "token_truncate"}


def test_rounds_in_flight_are_off_by_default_and_taken_as_given(tmp_path):
    settings = NodeSettings.of(ours(tmp_path))
    assert not settings.in_flight and (settings.open_rounds, settings.recompute_kv) == (1, False)
    settings = NodeSettings.of(ours(tmp_path, **IN_FLIGHT))
    assert settings.in_flight and settings.oldest_rounds == 6
    assert NodeSettings.of(ours(tmp_path, **IN_FLIGHT, max_age=2, recompute_kv=True)).oldest_rounds == 2
    assert NodeSettings.of(plain(tmp_path)).weight_update == "drain"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"weight_update": "swap"}, ["must be one of ('drain', 'in_flight'), got 'swap'"]),
        ({"open_rounds": 1}, ["`open_rounds` must be 2 to 8", "got 1", "`max_staleness=1`"]),
        ({"open_rounds": 9}, ["`open_rounds` must be 2 to 8", "got 9"]),
        ({"max_age": 1}, ["`max_age` must be at least `open_rounds` (2), got 1"]),
        ({"max_staleness": 1}, ["`max_staleness` must stay 0", "`open_rounds`"]),
        ({"vllm_mode": "colocate"}, ["needs node mode"]),
        ({"vllm_importance_sampling_correction": False}, ["`vllm_importance_sampling_correction=True`"]),
        ({"vllm_importance_sampling_mode": "sequence_mask"}, ["'sequence_mask'", "the long ones", "'token_truncate'"]),
        ({"vllm_importance_sampling_mode": "sequence_truncate"}, ["'sequence_truncate'", "'token_truncate'"]),
    ],
)
def test_what_cannot_work_in_flight_is_refused_with_a_way_out(tmp_path, fields, words):
    message = refusal(ours, tmp_path, **IN_FLIGHT | fields)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("fields", [{"open_rounds": 2}, {"max_age": 4}, {"recompute_kv": True}])
def test_settings_of_rounds_in_flight_have_no_meaning_when_syncs_drain(tmp_path, fields):
    assert "needs `weight_update='in_flight'`" in refusal(ours, tmp_path, **fields)


def test_a_group_in_flight_may_not_straddle_ranks_and_the_nearest_batches_are_named(tmp_path):
    """2 nodes x 7 ranks and groups of 8: TRL takes 4 rows a rank, and then every second group is on two ranks."""
    with mock.patch.object(TrainingArguments, "world_size", 14):
        sizes = {"num_generations": 8, "steps_per_generation": 1}
        assert ours(tmp_path, per_device_train_batch_size=4, **sizes).generation_batch_size == 56
        message = refusal(ours, tmp_path, per_device_train_batch_size=4, **sizes, **IN_FLIGHT)
        assert "must be a multiple of `num_generations` (8), got 4 x 1 = 4. The nearest is 8" in message
        assert "`steps_per_generation=2`" in message and "`per_device_train_batch_size=8`" in message
        message = refusal(ours, tmp_path, per_device_train_batch_size=12, **sizes, **IN_FLIGHT)
        assert "12 x 1 = 12. The nearest is 8 or 16" in message
        assert ours(tmp_path, per_device_train_batch_size=8, **sizes, **IN_FLIGHT).open_rounds == 2


# ---- rewards of a group before its round


def test_groups_are_scored_only_if_asked_for(tmp_path):
    settings = NodeSettings.of(ours(tmp_path))
    assert (settings.score_groups, settings.score_with_batch, settings.score_processes) == (False, None, 0)
    given = {"score_groups": True, "score_with_batch": ["diversity"], "score_processes": 2}
    assert NodeSettings.of(ours(tmp_path, **given)).score_with_batch == ["diversity"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"score_with_batch": ["a"]}, ["`score_with_batch` needs `score_groups=True`, got ['a']. Set that, or leave"]),
        ({"score_processes": 2}, ["`score_processes` needs `score_groups=True`, got 2"]),
        ({"score_groups": True, "score_processes": -1}, ["`score_processes` must not be negative, got -1"]),
        ({"score_groups": True, "vllm_mode": "colocate"}, ["`score_groups=True` needs node mode"]),
        ({"score_groups": True, "num_generations": 3}, ["With `score_groups=True` a group may not straddle ranks"]),
    ],
)
def test_settings_that_cannot_score_groups_are_refused_with_a_way_out(tmp_path, fields, words):
    message = checked_again(tmp_path, **fields)
    assert words and all(word in message for word in words), message


# ---- dynamic sampling


def checked_again(folder, config=ours, **fields) -> str:
    """The refusal of a config in which `score_groups` and what needs it are set; none is empty."""
    scored = {name: fields.pop(name) for name in ("score_groups", "score_with_batch") if name in fields}
    args = config(folder)
    for name, value in (fields | scored).items():
        setattr(args, name, value)
    try:
        check_settings(args)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_dynamic_sampling_is_off_by_default_and_taken_as_given(tmp_path):
    settings = NodeSettings.of(ours(tmp_path))
    assert (settings.dynamic_sampling, settings.max_resample_rounds) == (False, 8)
    assert checked_again(tmp_path, dynamic_sampling=True, score_groups=True, max_resample_rounds=3) == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"score_groups": False}, ["`dynamic_sampling=True` needs `score_groups=True`, got False", "Set it."]),
        ({"score_with_batch": ["diversity"]}, ["got ['diversity'] in `score_with_batch`", "Leave them out"]),
        ({"max_resample_rounds": 0}, ["`max_resample_rounds` must be at least 1, got 0"]),
        ({"dynamic_sampling": False, "max_resample_rounds": 3}, ["needs `dynamic_sampling=True`, got 3", "at 8"]),
        ({"vllm_mode": "colocate"}, ["`score_groups=True` needs node mode"]),
        ({"num_generations": 3}, ["With `score_groups=True` a group may not straddle ranks"]),
    ],
)
def test_what_cannot_be_sampled_again_is_refused_with_a_way_out(tmp_path, fields, words):
    message = checked_again(tmp_path, **{"dynamic_sampling": True, "score_groups": True} | fields)
    assert words and all(word in message for word in words), message


def test_reward_models_and_streams_are_not_sampled_again(tmp_path):
    args, rows = ours(tmp_path), Dataset.from_dict({"prompt": ["a"]})
    call = {"reward_funcs": [len], "train_dataset": rows}
    streams = call | {"train_dataset": rows.to_iterable_dataset()}
    check_dynamic_sampling(args, streams | {"reward_funcs": "a/model"})
    args.dynamic_sampling = True
    check_dynamic_sampling(args, call)
    assert "got a stream (IterableDataset)" in refusal(check_dynamic_sampling, args, streams)
    for model, name in ("a/model", "a/model"), ([len, torch.nn.Linear(1, 1)], "Linear"):
        message = refusal(check_dynamic_sampling, args, call | {"reward_funcs": model})
        assert f"reward model ({name}) is a collective" in message


def test_streams_and_images_are_not_in_flight(tmp_path):
    rows = Dataset.from_dict({"prompt": ["a"], "images": [[]]})
    args = ours(tmp_path, **IN_FLIGHT)
    assert "got a stream (IterableDataset)" in refusal(check_in_flight, args, rows.to_iterable_dataset())
    assert "a column 'images'" in refusal(check_in_flight, args, rows)
    pixel = [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "a"}]}]
    in_messages = refusal(check_in_flight, args, Dataset.from_dict({"prompt": [pixel]}))
    assert "images in their messages" in in_messages and "weight_update='drain'" in in_messages
    check_in_flight(args, rows.select_columns("prompt"))
    check_in_flight(ours(tmp_path), rows.to_iterable_dataset())


@pytest.mark.parametrize("given", [{"load_format": "auto"}, '{"tensor_parallel_size": 2}', {"dtype": "float16"}])
def test_engine_kwargs_may_not_replace_what_node_mode_sets(tmp_path, given):
    assert "`engine_kwargs` may not contain" in refusal(ours, tmp_path, engine_kwargs=given)


@pytest.mark.feature("Generation", "caches outside of the engine (`kv_transfer_config`)", engine="none", refused=True)
@pytest.mark.parametrize("key", ["kv_transfer_config", "kv_offloading_size", "ec_transfer_config"])
def test_a_cache_that_a_sync_does_not_empty_is_refused(tmp_path, key, record_property):
    message = refusal(ours, tmp_path, engine_kwargs={"max_num_seqs": 4, key: 1})
    record_property("message", message)
    assert f"may not contain '{key}'" in message and "leave it out" in message


def test_that_is_checked_of_every_call_before_the_model(tmp_path):
    call = {"model": "no/such/model", "rollout_func": print, "train_dataset": Dataset.from_dict({"images": [[]] * 8})}
    with pytest.raises(ConfigurationError, match="whole rollouts of `rollout_func` ahead"):
        check_call(None, ours(tmp_path, max_staleness=1), call)


# ---- choices with another result than their author may expect


class Derived(GRPOConfig):
    pass


def choices(capsys, args, rank: int = 0) -> list[str]:
    with mock.patch.object(TrainingArguments, "process_index", rank):
        report_choices(args, MultiNodeGRPOConfig, isinstance(args, NodeFields))
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_mode_of_trls_is_reported_because_vllm_is_on_by_default_here(tmp_path, capsys, mode):
    (line,) = choices(capsys, ours(tmp_path, vllm_mode=mode))
    assert f"node mode is off: with vllm_mode='{mode}' TRL's own vLLM generates" in line
    assert "leave vllm_mode out" in line and "use_vllm=False" in line


@pytest.mark.parametrize("fields", [{}, {"vllm_mode": "colocate", "use_vllm": True}])
def test_a_config_of_trls_and_one_derived_from_it_are_reported_with_the_way_to_node_mode(tmp_path, capsys, fields):
    (line,) = choices(capsys, plain(tmp_path, **fields))
    assert "node mode is off: a plain trl.GRPOConfig has TRL's defaults. For node mode use trl_multinode" in line
    (line,) = choices(capsys, Derived(str(tmp_path), use_cpu=True, bf16=False, **fields))
    assert "off: Derived is derived from trl.GRPOConfig and has TRL's defaults. For node mode derive it from" in line


@pytest.mark.parametrize("fields", [{}, {"vllm_mode": "colocate"}])
def test_transformers_continuous_batching_beside_vllm_is_reported(tmp_path, capsys, fields):
    *_, line = choices(capsys, ours(tmp_path, use_transformers_continuous_batching=True, **fields))
    assert "use_transformers_continuous_batching has no effect: vLLM generates" in line and "use_vllm=False" in line


def test_every_other_choice_is_silent_and_only_the_main_process_prints(tmp_path, capsys):
    batching = {"use_transformers_continuous_batching": True}
    for args in (ours(tmp_path), ours(tmp_path, use_vllm=False), ours(tmp_path, use_vllm=False, **batching)):
        assert choices(capsys, args) == []
    assert choices(capsys, plain(tmp_path, use_vllm=True, vllm_mode="node")) == []
    for args in (ours(tmp_path, vllm_mode="colocate"), plain(tmp_path), ours(tmp_path, **batching)):
        assert choices(capsys, args, rank=1) == []
