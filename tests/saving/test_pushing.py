"""Pushes that fail, into a hub on this machine's loopback: nothing is lost, and the message says how to push again."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from waiting import HANG_S

from multinode_kit.hub import LoopbackHub
from trl_multinode.errors import HubPushError, SavedWeightsError
from trl_multinode.saving import pushing
from trl_multinode.saving.pushing import CheckedHub, hide

TOKEN = "hf_SecretOfTheTest"
COMMIT, UPLOAD = "/commit/", "PUT /lfs/"


@pytest.fixture
def hub(loopback_hub, monkeypatch):
    monkeypatch.setattr(pushing, "WAITS_S", (0.01, 0.02, 0.04))
    return loopback_hub


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "run" / "_multinode").mkdir()
    (tmp_path / "run" / "_multinode" / "log").write_text("not to be pushed")
    return tmp_path / "run"


def connect(hub: LoopbackHub, folder: Path, **changes) -> CheckedHub:
    settings = {
        "where": "node 0, rank 0",
        "output_dir": folder,
        "must_succeed": False,
        "token": TOKEN,
    }
    settings |= {"check": lambda folder: None} | changes
    return CheckedHub(HfApi(endpoint=hub.endpoint), **settings)


def push(checked: CheckedHub, folder: Path, **changes):
    checked.create_repo("run", exist_ok=True)
    keywords = {
        "repo_id": "tester/run",
        "folder_path": str(folder),
        "commit_message": "End of training",
    }
    keywords |= {"ignore_patterns": ["_*", "checkpoint-*"], "revision": None, "token": None}
    return checked.upload_folder(**(keywords | changes))


@pytest.mark.parametrize(
    ("fault", "tries", "said"),
    [
        (lambda hub: hub.fail(401, on=COMMIT), 1, "hf auth login"),
        (lambda hub: hub.fail(403, on=COMMIT), 1, "403"),
        (lambda hub: hub.fail(409, on=COMMIT), 4, "409"),
        (lambda hub: hub.fail(500, on=COMMIT), 4, "500"),
        (lambda hub: hub.fail(500, on=UPLOAD), 4, "500"),
        (lambda hub: hub.cut_connection(on=COMMIT), 4, "Error: "),
        (lambda hub: hub.cut_connection(on=UPLOAD), 4, "Error: "),
    ],
    ids=["401", "403", "409", "500", "500 at an upload", "cut", "cut at an upload"],
)
@pytest.mark.fault("37")
def test_a_push_that_fails_is_told_with_the_command_that_repeats_it(
    hub, folder, capsys, fault, tries, said
):
    before = {path: path.read_bytes() for path in folder.glob("*.*")}
    hub.repos["tester/run"] = {}
    fault(hub)
    assert push(connect(hub, folder), folder) is None
    told = capsys.readouterr().out
    counted = "1 try" if tries == 1 else f"{tries} tries"
    assert f"({counted} in" in told and said in told and "node 0, rank 0" in told
    assert told.count("Next try") == tries - 1
    assert told.count("`trainer.push_to_hub()`") == 1
    command = (
        f"hf upload tester/run {folder} . --exclude '_*' --exclude 'checkpoint-*' "
        "--commit-message 'End of training'"
    )
    assert told.splitlines()[-1].strip() == command and TOKEN not in told
    assert hub.commits == [] and {path: path.read_bytes() for path in folder.glob("*.*")} == before


@pytest.mark.nightly  # starts a Python; the command's words are compared above
def test_the_command_of_the_message_pushes_the_same_files(hub, folder, capsys, tmp_path):
    hub.fail(401, on=COMMIT)
    assert push(connect(hub, folder), folder) is None
    (line,) = [line.strip() for line in capsys.readouterr().out.splitlines() if "hf upload" in line]
    hub.heal()
    environment = (
        os.environ | hub.environment | {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
    )
    run = subprocess.run(
        shlex.split(line), env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert run.returncode == 0, run.stderr
    assert hub.repos["tester/run"] == {"model.safetensors": b"weights", "config.json": b"{}"}
    assert hub.commits == ["End of training"]


@pytest.mark.parametrize(
    "fault",
    [
        lambda hub: None,
        lambda hub: hub.fail(500, times=2, on=COMMIT),
        lambda hub: hub.fail(409, times=1, on=COMMIT),
        lambda hub: hub.cut_connection(times=2, on=COMMIT),
        lambda hub: hub.fail(500, times=2, on="/repos/create"),
        lambda hub: hub.cut_connection(times=2, on="/repos/create"),
        lambda hub: hub.cut_connection(times=2, on=UPLOAD),
    ],
    ids=[
        "no fault",
        "500",
        "409",
        "cut",
        "500 at the creation",
        "cut at the creation",
        "cut at an upload",
    ],
)
def test_a_fault_that_passes_costs_tries_only(hub, folder, capsys, fault):
    fault(hub)
    assert push(connect(hub, folder), folder).oid
    assert hub.repos["tester/run"] == {"model.safetensors": b"weights", "config.json": b"{}"}
    assert len(hub.commits) == 1 and all(fault.times == 0 for fault in hub._faults)
    told = capsys.readouterr().out
    assert "failed" not in told and (hub._faults or told == "")


def test_a_checkpoint_that_is_deleted_while_the_folder_is_listed_costs_a_try_only(
    hub, folder, capsys, monkeypatch
):
    """The oldest checkpoint gives way while the newest one's push lists the folder, which contains both."""
    (folder / "checkpoint-1").mkdir()
    scan = os.scandir

    def deleted_before(path):
        if Path(path).name == "checkpoint-1":
            (folder / "checkpoint-1").rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", deleted_before)
    assert push(connect(hub, folder), folder).oid and not (folder / "checkpoint-1").exists()
    assert capsys.readouterr().out.count("Next try") == 1
    assert hub.repos["tester/run"] == {"model.safetensors": b"weights", "config.json": b"{}"}


@pytest.mark.fault("37")
def test_a_hub_that_is_silent_is_given_up(hub, folder, capsys, monkeypatch):
    monkeypatch.setattr(pushing, "STALL_S", 0.3)
    monkeypatch.setattr(pushing, "WAITS_S", (0.01,))
    hub.repos["tester/run"] = {}
    hub.stall(on=COMMIT)
    assert push(connect(hub, folder), folder) is None
    # The hub resets the connection after 30 s, which would be another error
    assert "ReadTimeout" in capsys.readouterr().out


def test_no_try_begins_after_the_limit(hub, folder, capsys, monkeypatch):
    monkeypatch.setattr(pushing, "WAITS_S", (0.01, 1000.0))
    hub.fail(500, on=COMMIT)
    assert push(connect(hub, folder), folder) is None
    assert "(2 tries in" in capsys.readouterr().out


@pytest.mark.nightly  # test_hub decides
def test_a_push_that_must_succeed_raises_with_the_same_message(hub, folder):
    hub.fail(500, on=COMMIT)
    with pytest.raises(HubPushError, match=r"500 .*(\n.*)*hf upload tester/run") as caught:
        push(connect(hub, folder, must_succeed=True), folder)
    # a traceback would show addresses
    assert caught.value.__context__ is None and caught.value.__cause__ is None


@pytest.mark.parametrize("run_as_future", [False, True])
def test_wrong_weights_are_refused_before_a_single_request(hub, folder, run_as_future):
    def refuse(folder):
        raise SavedWeightsError("wrong")

    checked = connect(hub, folder, check=refuse)
    checked.create_repo("run", exist_ok=True)
    hub.fail(599)  # any request after this would say so
    with pytest.raises(SavedWeightsError, match="wrong"):
        checked.upload_folder(
            repo_id="tester/run",
            folder_path=str(folder),
            commit_message="m",
            run_as_future=run_as_future,
        )
    assert hub.repos == {"tester/run": {}}


def test_tokens_and_signed_addresses_are_hidden():
    text = hide(
        "PUT https://storage/x?X-Signature=abc&y failed for hf_1 and hf_2", "hf_1", None, "hf_2"
    )
    assert text == "PUT https://storage/x?*** failed for *** and ***"


def test_the_token_of_a_message_would_be_hidden(hub, folder, capsys, monkeypatch):
    """A server that repeats the token in its answer."""
    monkeypatch.setattr(
        HfApi,
        "upload_folder",
        lambda self, token, **_: (_ for _ in ()).throw(OSError(f"bad {token}")),
    )
    assert push(connect(hub, folder), folder) is None
    told = capsys.readouterr().out
    assert "OSError: bad ***" in told and TOKEN not in told
