"""Rules through a real launch: every rank ends with the same line, which has cause and cure."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from waiting import HANG_S

from multinode_kit.engines import FAKE
from multinode_kit.launch_files import DDP, FSDP2
from multinode_kit.nodes import Nodes
from trl_multinode.run.endings import exit_codes

SCRIPT = Path(__file__).parent / "scripts" / "errors.py"
pytestmark = [pytest.mark.zero3, pytest.mark.two_node]


def end_of_run(
    folder: Path, case: str, says: str, code: int, per_node: int = 2, **kind
) -> tuple[set[str], list[str]]:
    """The last lines of all ranks, and their logs. All ranks end with this code, and both nodes note it.

    The first rank of node 1 prints `says`.
    """
    files = [folder / f"ending{node}.json" for node in range(2)]
    env = {"TRL_MULTINODE_ENGINE_MODULE": FAKE}
    with Nodes(2, per_node, folder=folder, env=env, forked=True, **kind) as nodes:
        copy = {"env_of": lambda node: {"TRL_MULTINODE_ENDING_FILE": str(files[node])}}
        nodes.launch(SCRIPT, str(folder), case, **copy)
        nodes.wait_for(per_node, says, timeout_s=HANG_S)
        codes = nodes.wait(timeout_s=HANG_S)
        assert all(codes), codes
        logs = [nodes.rank_log(rank) for rank in range(2 * per_node)]
        ended = {
            found
            for node in range(2)
            for found in re.findall(r"exitcode +: (-?\d+)", nodes.launcher_log(node))
        }
        assert ended == {str(code)}
        endings = [json.loads(file.read_text()) for file in files]
        assert [ending["code"] for ending in endings] == [code, code]
        assert all(ending["cause"] in logs[0] for ending in endings)
        return {log.splitlines()[-1] for log in logs}, logs


@pytest.mark.fault("21")
def test_a_small_dataset_is_found_before_any_weights_file_is_opened(tmp_path):
    lines, _ = end_of_run(tmp_path, "small_dataset", "ConfigurationError", exit_codes.CONFIGURATION)
    assert len(lines) == 1
    line = lines.pop()
    assert "2 rows" in line and "4 prompts" in line


@pytest.mark.fault("disagreement")
def test_data_in_another_order_on_one_node_is_found_before_any_weights_file_is_opened(tmp_path):
    """As with a shuffle without a seed: the advantages of a group would compare completions of two prompts."""
    lines, _ = end_of_run(tmp_path, "shuffled", "ConfigurationError", exit_codes.CONFIGURATION)
    assert len(lines) == 1
    line = lines.pop()
    assert (
        "of `train_dataset` (" in line
        and "on ranks 0, 1 of node 0" in line
        and "on ranks 2, 3 of node 1" in line
    )


@pytest.mark.fault("disagreement")
def test_a_learning_rate_that_a_script_changed_on_some_ranks_is_found_before_the_first_step(
    tmp_path,
):
    lines, _ = end_of_run(tmp_path, "rates", "ConfigurationError", exit_codes.CONFIGURATION)
    assert len(lines) == 1
    assert "`learning_rate` (0.001 on rank 0 of node 0, 0.002 on rank 1" in lines.pop()


@pytest.mark.fault("leaves_alone")
def test_sys_exit_0_in_a_reward_of_one_rank_ends_the_run(tmp_path):
    """Before, the other ranks waited for ever: "1 of 4 ranks have finished"."""
    lines, _ = end_of_run(tmp_path, "leaves", "SystemExit", exit_codes.USER_CODE)
    assert len(lines) == 1
    assert "node 0, rank 1, phase reward: SystemExit: " in lines.pop()


@pytest.mark.fault("20")
def test_a_prompt_longer_than_the_context_names_its_row_on_all_ranks(tmp_path):
    lines, logs = end_of_run(tmp_path, "long_prompt", "PromptTooLongError", exit_codes.ENGINE)
    # In that round rank 2 generated until the others waited for it, and none of them was in a collective
    assert all("the slow round is done" in log for log in logs)
    assert len(lines) == 1
    line = lines.pop()
    assert "node 1, rank 2" in line and "Row 0 of rank 2" in line and "100 tokens" in line
    assert "vllm_max_model_length" in line


@pytest.mark.fault("script_error")
def test_a_script_that_fails_before_its_trainer_ends_all_nodes(tmp_path):
    """The watch begins with the import."""
    lines, _ = end_of_run(tmp_path, "early", "the run failed", exit_codes.USER_CODE, per_node=1)
    assert len(lines) == 1
    assert "node 1, rank 1, phase before the trainer: ValueError: on purpose" in lines.pop()


@pytest.mark.fault("9")
def test_a_nan_in_one_shard_ends_the_run_before_it_is_saved_and_the_last_checkpoint_stays(tmp_path):
    """Rank 3 finds it; the others wait in the gathering of the save. A limit of one deletes older checkpoints."""
    lines, _ = end_of_run(tmp_path, "nan", "the run failed", exit_codes.OTHER)
    assert len(lines) == 1
    line = lines.pop()
    assert "node 1, rank 3" in line and "WeightsNotFiniteError" in line
    assert "model.layers.0.mlp.up_proj.weight" in line and "nan" in line and "step 2" in line
    assert [path.name for path in tmp_path.rglob("trainer_state.json")] == ["trainer_state.json"]
    (kept,) = tmp_path.rglob("model.safetensors")
    assert kept.parent.name == "checkpoint-1"
    ending = json.loads((tmp_path / "_multinode/ending-node1.json").read_text())
    assert (ending["checkpoint"], ending["step"], ending["continues"]) == (
        str(kept.parent),
        2,
        False,
    )
    assert all(tensor.isfinite().all() for tensor in load_file(kept).values())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("diverges accumulated", {"accelerate": DDP}),
        ("diverges balanced accumulated", {"accelerate": FSDP2}),
        ("diverges", {"accelerate": FSDP2}),
        ("diverges balanced", {}),
    ],
)
def test_no_rank_makes_the_step_of_a_round_that_one_engine_sampled_from_other_weights(
    case, kind, tmp_path
):
    """The loss of rank 3 finds it, after its last forward pass; the others wait for its gradients."""
    lines, _ = end_of_run(tmp_path, case, "the run failed", exit_codes.OTHER, **kind)
    assert len(lines) == 1 and "LogprobDivergenceError" in lines.pop()
    made = [(tmp_path / f"steps{rank}").read_text().splitlines() for rank in range(4)]
    # only that of the first round; DeepSpeed makes another one of no gradients before
    assert [set(steps) for steps in made] == [{"0"}] * 4


@pytest.mark.nightly
@pytest.mark.fault("script_error")
def test_a_node_whose_script_fails_before_the_import_ends_the_others_soon(tmp_path):
    """It holds the assumption that each launcher of torchrun stays a client of the store of node 0."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise ModuleNotFoundError('only on node 1')\n"
        "import trl_multinode\n"
        f"time.sleep({HANG_S})\n"
    )
    with Nodes(2, 1, folder=tmp_path / "nodes") as nodes:
        nodes.launch(script)
        assert all(nodes.wait(timeout_s=HANG_S / 2))
        line = nodes.rank_log(0).splitlines()[-1]
    assert "PeerFailureError" in line and "rank 1 (node 1)" in line and "1 of 2 launchers" in line


@pytest.mark.nightly
@pytest.mark.fault("aborted")
def test_a_save_of_one_rank_ends_with_the_rank_that_its_collective_aborted(
    tmp_path,
):
    """Rank 1 gets the parameters of rank 0 where it expects a loss, and gloo aborts it: it can report nothing."""
    with Nodes(
        2, 2, folder=tmp_path, env={"TRL_MULTINODE_ENGINE_MODULE": FAKE}, forked=True
    ) as nodes:
        nodes.launch(SCRIPT, str(tmp_path), "alone")
        assert all(nodes.wait(timeout_s=HANG_S))
        lines = {
            line
            for line in (nodes.rank_log(rank).splitlines()[-1] for rank in range(4))
            if "failed: " in line
        }
    (line,) = lines
    assert re.search(
        r"phase (between steps|train): the process of rank \d .*killed by SIGABRT",
        line,
    )
    assert "only some ranks call" in line
