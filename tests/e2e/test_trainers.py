"""TRL's other trainers on two nodes under ZeRO-3, one after another in one launch, on the fake engine."""

import json

import pytest
from metric_names import documented, mine
from teacher_server import teacher_server

from multinode_kit.engines import FAKE
from multinode_kit.launch_files import ZERO3
from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from multinode_kit.nodes import Nodes

pytestmark = [pytest.mark.two_node, pytest.mark.zero3, pytest.mark.nightly]
TRAINERS = ["RLOO", "Distillation", "SDFT", "SDPO", "GOLD", "IWOPD", "GMPO", "ServerDistillation"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


UPDATES = {name: [1, 2, 3, 4, 5] for name in TRAINERS}  # of the weights that made each round
UPDATES |= {name: [1, 2, 3] for name in ("RLOO", "SDFT", "SDPO", "GMPO")}
UPDATES["GOLD"] = [1, 1, 2, 2, 3]  # with `vllm_sync_frequency=2`
ENVIRONMENT = {"TRL_MULTINODE_ENGINE_MODULE": FAKE, "TRL_EXPERIMENTAL_SILENCE": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a student and a teacher in it."""
    folder = tmp_path_factory.mktemp("trainers")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for name, seed in (("student", 0), ("teacher", 1)):
        tiny_qwen2(seed=seed).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def found(folder, request):
    """What both ranks wrote about every trainer."""
    script = request.path.parent / "scripts" / "trainers.py"
    with (
        teacher_server(folder / "teacher") as url,
        Nodes(
            2,
            1,
            folder=folder,
            env=ENVIRONMENT | {"TEACHER_URL": url},
            deepspeed=ZERO3,
            forked=True,
        ) as nodes,
    ):
        nodes.launch(script, str(folder), *TRAINERS)
        assert nodes.wait(timeout_s=800) == [0, 0], nodes.rank_log(0)[-4000:]
        (folder / "logs.json").write_text(json.dumps([nodes.rank_log(rank) for rank in range(2)]))
    return {
        name: [json.loads((folder / f"{name}_rank{rank}.json").read_text()) for rank in range(2)]
        for name in TRAINERS
    }


@pytest.mark.parametrize("name", TRAINERS)
def test_every_metric_of_this_library_is_documented(found, name):
    for rank in found[name]:
        logged = mine(rank["ours"]["metrics"])
        assert (
            logged <= documented()
            and {"perf/valid_tokens_per_device_hour", "node<k>/tokens"} <= logged
        )


@pytest.mark.parametrize("name", TRAINERS)
def test_every_round_comes_from_this_nodes_engine_with_the_weights_of_its_step(found, name):
    for rank in found[name]:
        ours, updates = rank["ours"], UPDATES[name]
        rows = 5 * 8 if len(updates) == 5 else 3 * 16  # of every optimizer step, or of two
        assert ours["world"] == 2 and ours["sharded"]
        assert ours["rows"] == rows and ours["tokens"] > ours["rows"]
        assert ours["versions"] == [[update] * (rows // len(updates)) for update in updates]
        assert ours["engines_left"] == 0


def test_no_engine_starts_twice_because_its_trainer_loads_another_model_than_expected(
    found, folder
):
    logs = json.loads((folder / "logs.json").read_text())
    for log in logs:
        assert "differs from its outline" not in log and "engines start after" not in log
        assert log.count("starting 1 engine(s)") == log.count("1 engine(s) ready") >= len(TRAINERS)


def test_the_engines_of_a_trainer_that_was_dropped_without_a_close_end_before_the_next_ones_start(
    found,
):
    assert [rank["ours"]["dropped_run"] for rank in found["RLOO"] + found["Distillation"]] == [
        [],
        [],
        [False],
        [False],
    ]


@pytest.mark.parametrize("name", TRAINERS)
def test_engine_and_trainer_agree_after_training_and_not_without_a_sync(found, name):
    for rank in found[name]:
        assert rank["ours"]["fresh"] < 1e-4 and rank["ours"]["healed"] < 1e-4
        assert rank["ours"]["stale"] > 0.1


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.feature("Trainers", f"`{name}Trainer`"))
        for name in TRAINERS
    ],
)
def test_losses_and_gradients_are_those_of_trls_own_trainer_given_the_same_completions(found, name):
    for rank in found[name]:
        ours, trls = rank["ours"], rank["trl"]
        # that they agree says something
        assert len(set(ours["grad_norm"])) == 5 and min(ours["grad_norm"]) > 0
        assert ours["grad_norm"] == pytest.approx(trls["grad_norm"], rel=1e-5)
        assert ours["loss"] == pytest.approx(trls["loss"], rel=1e-5, abs=1e-6)


def test_one_other_token_in_one_completion_would_show(found):
    for rank in found["Distillation"]:
        differences = [
            abs(a / b - 1)
            for a, b in zip(rank["ours"]["loss"], rank["tampered"]["loss"], strict=True)
        ]
        assert min(differences) > 1e-4


@pytest.mark.parametrize("name", TRAINERS)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(found, name):
    """RLOO, SDFT, SDPO and GMPO inside a generation round, and distillation across the end of an epoch."""
    for rank in found[name]:
        first = rank["resumed"]["from"]
        # a loss is a sum of terms of about 1 that cancel, in float32 (6e-8 each)
        for what in (
            "loss",
            "grad_norm",
        ):
            assert rank["resumed"][what] == pytest.approx(rank["ours"][what], rel=1e-6, abs=1e-6)
        assert len(rank["ours"]["loss"][first:]) >= 2


@pytest.mark.parametrize(
    "name", ["RLOO", "Distillation", "SDFT", "SDPO", "GMPO", "ServerDistillation"]
)
def test_two_evaluations_with_the_same_weights_see_the_same_completions(found, name):
    for rank in found[name]:
        first, second = rank["ours"]["evaluations"]
        assert first == second and len(first) == 8


@pytest.mark.parametrize("name", ["RLOO", "GOLD", "GMPO"])
def test_texts_that_trl_gathers_to_all_ranks_unasked_stay_where_they_are(found, name):
    for rank in found[name]:
        assert rank["ours"]["texts"] == 0 and rank["trl"]["texts"] > 0


def test_the_trainers_that_score_what_was_sampled_compare_log_probs_at_every_round(found):
    for name in TRAINERS:
        for rank in found[name]:
            monitor = rank["ours"]["monitor"]
            assert monitor is None if name not in ("RLOO", "GMPO") else 0 < monitor < 1e-3


def test_log_probs_are_returned_to_the_trainers_that_read_them(found):
    assert {name for name in TRAINERS if found[name][0]["ours"]["returns_logprobs"]} == {
        "IWOPD",
        "GMPO",
    }


def test_gmpos_gradients_were_those_of_regrouped_micro_batches_after_a_rehearsal(found, folder):
    """So the comparison above is of another split of the rows than TRL's."""
    for rank in found["GMPO"]:
        assert "balance/micro_steps" in rank["ours"]["metrics"]
        assert set(rank["ours"]["micro_rows"]) - {4}, "TRL's micro-batches have 4 rows"
    log = (
        json.loads((folder / "logs.json").read_text())[0]
        .split("TRAINER GMPO\n")[1]
        .split("TRAINER ")[0]
    )
    assert "rehears" in log, log[:2000]
