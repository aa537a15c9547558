"""Exit codes of ranks and ending files of nodes."""

import errno
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from trl.generation.vllm_generation import VLLMGeneration

from trl_multinode import errors
from trl_multinode.run.begin import begin_run
from trl_multinode.run.endings import exit_codes
from trl_multinode.run.endings.ending import Ending
from trl_multinode.run.endings.error_text import described
from trl_multinode.run.endings.fatal import Fatal
from trl_multinode.run.topology import Topology
from trl_multinode.run.watch.watchdog import Watchdog
from trl_multinode.saving.checkpoint_files import newest_whole


def raised_in(
    *modules: str, error: BaseException | None = None, functions: tuple[str, ...] = ()
) -> BaseException:
    """An error with a traceback through functions of these modules; `mine` is a file of the user's."""
    call = "raise error"
    scope: dict = {"error": error or ValueError("bad")}
    for module, name in reversed(list(zip(modules, functions or modules, strict=True))):
        name = name.replace(".", "_")
        is_mine = module in ("mine", "__main__")
        path = (
            "/home/me/train.py" if is_mine else str(Path(os.__file__).parent / "site-packages/x.py")
        )
        scope = {"__name__": module, **{k: v for k, v in scope.items() if not k.startswith("__")}}
        exec(compile(f"def {name}():\n    {call}", path, "exec"), scope)  # noqa: S102
        call = f"{name}()"
    try:
        scope[name]()
    except BaseException as raised:
        raised.__traceback__ = raised.__traceback__.tb_next  # without this file
        return raised
    raise AssertionError


TRL, LIB = "trl.trainer.grpo_trainer", "transformers.trainer"
CODES = [
    (raised_in("__main__", LIB, TRL, "mine"), True, 6),  # a reward function
    (raised_in("__main__", LIB, TRL, "mine", "numpy.linalg"), True, 6),  # and what it calls
    (raised_in("__main__", LIB, TRL, "mine", "transformers.pipelines"), True, 6),
    (
        raised_in(
            "__main__", TRL, "judges.math", functions=("main", "_calculate_rewards", "score")
        ),
        True,
        6,
    ),
    (
        raised_in(
            "__main__", TRL, "trl.rewards.math", functions=("main", "_calculate_rewards", "score")
        ),
        True,
        6,
    ),
    (raised_in("__main__", LIB, TRL, "torch.nn"), True, 1),
    (
        raised_in("__main__", "trl_multinode.trainer", LIB, "deepspeed.runtime", "torch.cuda"),
        True,
        1,
    ),
    (raised_in("__main__"), True, 6),  # the script, beside the trainer
    (raised_in("__main__", LIB), False, 6),
    (
        raised_in("__main__", LIB, "torch.serialization", error=OSError(errno.ENOSPC, "full")),
        True,
        7,
    ),
    (raised_in("__main__", "trl_multinode.run", error=OSError(errno.EROFS, "read-only")), False, 7),
    (raised_in("__main__", LIB, "mine", error=OSError(errno.ENOSPC, "full")), True, 6),
    (
        raised_in(
            "__main__", LIB, "torch.distributed", error=RuntimeError("[gloo] Connection closed")
        ),
        True,
        4,
    ),
    (errors.ConfigurationError("x"), False, 3),
    (errors.PeerFailureError("x"), True, 4),
    (errors.EngineStalledError("x"), True, 5),
    (errors.HubPushError("x"), True, 8),
    (errors.WeightsNotFiniteError("x"), True, 1),
    (SystemExit(3), True, 6),
    (KeyboardInterrupt(), True, 1),
]


@pytest.mark.parametrize(("error", "has_trainer", "code"), CODES)
def test_row_exit_codes_of_errors(error, has_trainer, code):
    assert exit_codes.code_of(error, has_trainer) == code


def node(number: int, local: int = 0) -> Topology:
    return Topology(2 * number + local, 4, local, 2, number, 2, launched=True)


def test_row_ending_files_of_local_main_processes(tmp_path, monkeypatch):
    folder, copy = tmp_path / "_multinode", tmp_path / "copy.json"
    monkeypatch.setenv("TRL_MULTINODE_ENDING_FILE", str(copy))
    whole = tmp_path / "checkpoint-4"
    for name in ("checkpoint-4", "checkpoint-20", "checkpoint-best"):
        (tmp_path / name).mkdir()
    (whole / "trainer_state.json").write_text('{"epoch": 0}')
    for topology in (node(1, 1), node(1)):
        ending = Ending(topology)
        folder.mkdir(exist_ok=True)
        ending.begin(folder)
        ending.phase, ending.step, ending.resumes = lambda: "train", lambda: 5, True
        ending.checkpoint = lambda: newest_whole(tmp_path)
        ending.write(Fatal("node 0, rank 0: gone", 4))
        assert [path.name for path in folder.iterdir()] == [
            "ending-node1.json"
        ] * topology.is_local_main
    found = json.loads((folder / "ending-node1.json").read_text())
    assert found == json.loads(copy.read_text())
    assert time.strptime(found.pop("time"), "%Y-%m-%dT%H:%M:%SZ")
    assert found == {
        "code": 4, "cause": "node 0, rank 0: gone", "phase": "train", "step": 5, "checkpoint": str(whole),
        "continues": True, "node": 1,
    }  # fmt: skip
    ending.write_good()
    found = json.loads(copy.read_text())
    assert (found["code"], found["cause"], found["continues"]) == (0, "", False)
    ending.resumes = None
    ending.write(Fatal("node 0, rank 0: gone", 4))
    assert json.loads(copy.read_text())["continues"] is None, "the script has not called `train`"
    Ending(node(1)).begin(folder)
    assert not list(folder.iterdir())  # it would be taken for the end of the new run


def test_an_error_of_trls_own_trainer_with_a_config_of_node_mode_says_what_it_is():
    arguments = SimpleNamespace(mode="node", model=None, accelerator=None)
    with pytest.raises(ValueError, match="vllm_mode") as error:
        VLLMGeneration._init_vllm(arguments)
    assert "from trl_multinode import GRPOTrainer" in described(error.value)
    assert described(ValueError("a reward.")) == "ValueError: a reward."


def test_an_ending_that_cannot_be_written_disturbs_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_MULTINODE_ENDING_FILE", str(tmp_path / "no" / "folder" / "file"))
    (tmp_path / "no").touch()
    ending = Ending(node(0))
    ending.begin(tmp_path)
    ending.step = ending.checkpoint = lambda: 1 / 0
    ending.write(Fatal("gone", 4))
    assert json.loads((tmp_path / "ending-node0.json").read_text())["checkpoint"] is None


def test_a_run_of_one_process_writes_its_ending_too(tmp_path):
    watch = Watchdog(Topology(0, 1, 0, 1, 0, 1, launched=False))
    begin_run(watch, tmp_path / "_multinode", lambda: 3, 60.0)
    try:
        raise errors.EngineStalledError("no tokens")
    except errors.EngineStalledError:
        watch.close()  # as the trainer does after a failure
    found = json.loads((tmp_path / "_multinode/ending-node0.json").read_text())
    assert (found["code"], found["step"]) == (5, 3) and "EngineStalledError: no tokens" in found[
        "cause"
    ]
    assert not (tmp_path / "_multinode/owner.json").exists()
