"""Two nodes under ZeRO-3, all weights and LoRA, into a hub that takes pushes, refuses them and cuts the connection."""

import json
import os
import subprocess
import sys

import deepspeed  # noqa: F401  sets a variable when `save_pretrained` imports it: let that be before the tests
import pytest
import torch
from safetensors.torch import load_file
from waiting import HANG_S

from multinode_kit.engines import FAKE
from multinode_kit.hub import LoopbackHub
from multinode_kit.launch_files import ZERO3
from multinode_kit.models import save_tiny
from multinode_kit.nodes import Nodes

TOKEN = "hf_SecretOfTheRun"
pytestmark = [pytest.mark.two_node, pytest.mark.zero3, pytest.mark.nightly]

LOAD = """
import sys
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

base, kind, target = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained("tester/full" if kind == "full" else base)
model = model if kind == "full" else PeftModel.from_pretrained(model, "tester/lora")
wanted = {n: p.detach().contiguous() for n, p in model.named_parameters() if kind == "full" or "lora_" in n}
save_file(wanted, target)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    """Both runs: exit codes, logs, results by rank, what the hub has then, and the weights that it gives back."""
    folder = tmp_path_factory.mktemp("pushing")
    script = request.path.parent / "scripts" / "pushing.py"
    save_tiny(folder / "model", tied=False)
    with LoopbackHub() as hub:
        env = hub.environment | {
            "TRL_MULTINODE_ENGINE_MODULE": FAKE,
            "HF_HOME": str(folder / "cache"),
        }
        found = {"folder": folder, "hub": hub}
        for kind in ("full", "lora"):
            first_checkpoint = (
                hub.fail(401, 1, "/commit/main")
                if kind == "full"
                else hub.fail(500, 2, "/commit/main")
            )
            if kind == "lora":
                first_checkpoint.cut_connection(4, "/repos/create")
            hub.fail(401, on="/commit/denied").fail(409, on="/commit/conflict")
            hub.fail(500, 2, "/commit/hiccup").cut_connection(on="/commit/cut")
            with Nodes(2, 1, folder=folder / f"{kind}-nodes", env=env, deepspeed=ZERO3) as nodes:
                nodes.launch(script, str(folder), kind, TOKEN)
                codes = nodes.wait(timeout_s=HANG_S)
                logs = [nodes.rank_log(rank) for rank in range(2)]
            hub.heal()
            assert (folder / f"{kind}_rank0.json").exists(), logs[0][-4000:]
            results = [
                json.loads((folder / f"{kind}_rank{rank}.json").read_text()) for rank in range(2)
            ]
            target = folder / f"{kind}-loaded.safetensors"
            load = [sys.executable, "-c", LOAD, str(folder / "model"), kind, str(target)]
            loaded = subprocess.run(
                load, env=os.environ | env, capture_output=True, text=True, timeout=HANG_S
            )
            assert loaded.returncode == 0, loaded.stderr[-2000:]
            found[kind] = {
                "codes": codes,
                "logs": logs,
                "results": results,
                "loaded": load_file(target),
            }
        yield found


both = pytest.mark.parametrize("kind", ["full", "lora"])


@pytest.mark.feature("Hub", "pushes from ZeRO-3, all weights and LoRA")
@both
def test_from_pretrained_gives_the_trained_tensors_and_not_the_initial_ones(runs, kind):
    loaded, trained = (
        runs[kind]["loaded"],
        load_file(runs["folder"] / f"{kind}-trained.safetensors"),
    )
    assert runs[kind]["results"][0]["world"] == 2 and runs[kind]["results"][0]["sharded"]
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(loaded[name], trained[name]) for name in trained)
    if kind == "full":
        initial = load_file(runs["folder"] / "model" / "model.safetensors")
        assert all(not torch.equal(loaded[name], initial[name]) for name in initial)
    else:  # PEFT begins with B = 0
        assert all(tensor.abs().max() > 0 for name, tensor in loaded.items() if "lora_B" in name)


@both
@pytest.mark.fault("37")
def test_pushes_that_fail_do_not_end_the_run_and_one_that_fails_twice_arrives(runs, kind):
    found = runs[kind]["results"][0]["found"]
    assert [found[name] for name in ("denied", "conflict", "hiccup", "cut", "main")] == [
        "not pushed", "not pushed", "pushed", "not pushed", "pushed",
    ]  # fmt: skip


def told(runs, kind) -> list[tuple[str, str]]:
    """What the main process says of failed pushes: the line, and the command below it."""
    lines = runs[kind]["logs"][0].replace(str(runs["folder"]), "").splitlines()
    pairs = zip(lines, lines[1:], strict=False)
    return [
        pair for pair in pairs if pair[0].startswith("[trl_multinode] node 0, rank 0: the push of ")
    ]


@both
def test_each_failure_is_told_once_with_the_command_that_repeats_it(runs, kind):
    for revision, reason in (("denied", "401"), ("conflict", "409"), ("cut", "Error: ")):
        (line,) = [
            line for line, command in told(runs, kind) if f"--revision {revision} " in command
        ]
        assert f" tester/{kind} " in line and "End of training" in line and reason in line
        assert "trainer.push_to_hub()" in line
        command = f"hf upload tester/{kind} /{kind} . --exclude '_*' --exclude 'checkpoint-*' --revision {revision}"
        assert command in [
            command.strip().partition(" --commit")[0] for _, command in told(runs, kind)
        ]
    assert len(told(runs, kind)) == (4 if kind == "full" else 3)


def test_a_push_in_the_background_that_fails_is_told_too(runs):
    """transformers looks at no outcome of such a push."""
    (line,) = [line for line, _ in told(runs, "full") if "'Training in progress, step 2'" in line]
    assert "401" in line and "hf auth login" in line
    assert runs["hub"].commits[0] == "End of training"


def test_a_push_in_the_background_is_tried_again(runs):
    assert "Training in progress, step 2" in runs["hub"].commits
    assert "a request to the Hub did not succeed: HfHubHTTPError: " in runs["lora"]["logs"][0]


def test_a_hub_that_is_away_at_the_start_is_told_and_asked_again_at_the_first_push(runs):
    assert (
        not runs["lora"]["results"][0]["created_at_start"]
        and runs["full"]["results"][0]["created_at_start"]
    )
    assert "the repository lora could not be created or found: " in runs["lora"]["logs"][0]


@both
def test_a_wrong_file_is_refused_on_the_main_process_and_no_rank_hangs(runs, kind):
    main, other = (result["found"]["wrong"] for result in runs[kind]["results"])
    assert (
        main.startswith("SavedWeightsError: ")
        and "tensors without data" in main
        and other == "not pushed"
    )


def test_an_error_at_a_checkpoint_ends_all_ranks_with_one_line(runs):
    assert all(runs["full"]["codes"])
    lines = [last_words(log) for log in runs["full"]["logs"]]
    assert lines[0] == lines[1] and "node 0, rank 0" in lines[0] and "SavedWeightsError" in lines[0]


def test_a_push_that_must_succeed_ends_all_ranks_with_one_line(runs):
    assert all(runs["lora"]["codes"])
    lines = [last_words(log) for log in runs["lora"]["logs"]]
    assert (
        lines[0] == lines[1] and "HubPushError" in lines[0] and "hf upload tester/lora" in lines[0]
    )


def last_words(log: str) -> str:
    (line,) = [
        line for line in log.splitlines() if line.startswith("[trl_multinode] the run failed: ")
    ]
    return line


@both
def test_the_token_is_in_no_log_and_no_file(runs, kind):
    assert runs[kind]["results"][0]["token_is_pickled"]  # which it would be without care
    assert "training_args.bin" in runs["hub"].repos[f"tester/{kind}"]
    files = [
        path for path in runs["folder"].rglob("*") if path.is_file() and "cache" not in path.parts
    ]
    assert len(files) > 20
    contents = [path.read_bytes() for path in files] + list(
        runs["hub"].repos[f"tester/{kind}"].values()
    )
    assert not any(TOKEN.encode() in content for content in contents)


@pytest.mark.feature("Hub", "the model card")
@both
def test_the_model_card_says_where_it_was_trained_and_how_fast(runs, kind):
    card = runs["hub"].repos[f"tester/{kind}"]["README.md"].decode()
    rows = dict(
        line.strip("| ").split(" | ")
        for line in card.splitlines()
        if line.startswith("| ") and len(line) > 8
    )
    assert rows["Nodes"] == "2" and rows["Training ranks"] == "2 (1 per node)"
    assert rows["Devices"] == "CPU only: no GPU trained, none was reserved"
    assert rows["vLLM engines"] == "2 (1 per node), on the CPU"
    assert {"trl_multinode", "TRL", "vLLM", "PyTorch", "DeepSpeed"} <= rows.keys()
    per_second, per_device = [float(part.split()[0]) for part in rows["Throughput"].split(", ")[:2]]
    assert per_second > 0 and per_device == pytest.approx(per_second / 4, rel=0.2, abs=0.1)
    assert card.index("## Machines and throughput") < card.index("## Citations")
    assert str(runs["folder"]) not in card


@both
def test_nothing_of_this_machine_is_pushed(runs, kind):
    files = runs["hub"].repos[f"tester/{kind}"]
    assert not [
        path
        for path in files
        if path.startswith(("checkpoint-", "_multinode/", "logs/", "phases/"))
    ]
