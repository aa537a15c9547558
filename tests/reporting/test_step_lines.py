"""The line of a step and the table of the nodes, from logged metrics; and the callback that prints them."""

import io
from types import SimpleNamespace

import pytest
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_callback import CallbackHandler

from trl_multinode.reporting import callbacks as module
from trl_multinode.reporting.callbacks import StepLines, report_steps
from trl_multinode.reporting.lines import (
    MOST_ROWS,
    marked,
    node_table,
    other_line,
    rendered,
    step_line,
)

pytestmark = pytest.mark.nightly  # details of the text; the numbers are those of test_step_metrics
SECONDS = {
    "perf/step_s": 41.2, "perf/generate_s": 20.1, "perf/sync_s": 1.23, "perf/train_s": 15.04, "perf/reward_s": 0.4,
    "perf/wait_s": 4.1,
}  # fmt: skip
LOGS = SECONDS | {
    "loss": 0.1, "reward": 0.5321, "kl": 0.0012, "perf/eta_s": 3723.4, "perf/tokens_per_s": 12345.0,
    "perf/tokens_per_s_per_device": 192.4, "perf/mfu": 0.314, "memory/gpu_gib/max": 71.23, "memory/gpu_share/max": 0.9,
    "memory/host_gib/max": 20.0, "engine/busy": 0.641, "engine/filled": 0.2, "engine/kv_use": 0.41,
    "completions/mean_length": 312.4, "completions/clipped_ratio": 0.12, "grad_norm": 0.934,
}  # fmt: skip


def node(
    number: int, generate=20.0, train=15.0, wait=4.0, tokens=1000.0, **more
) -> dict[str, float]:
    values = {"generate_s": generate, "train_s": train, "wait_s": wait, "sync_s": 1.0, "reward_s": 0.4,
              "tokens": tokens, "memory_gib": 70.0, "engine_busy": 0.6} | more  # fmt: skip
    return {f"node{number}/{name}": value for name, value in values.items()}


def table(*nodes: dict[str, float], step: int = 10) -> str:
    logs = SECONDS | {name: value for one in nodes for name, value in one.items()}
    return rendered(node_table(logs, step))


# ---- the line


def test_a_step_is_one_short_line_with_all_that_was_asked_for():
    line = step_line(LOGS, 12, 80)
    assert line == (
        "step 12/80, eta 1:02:03 | 41.2 s: generate 20.1, sync 1.23, train 15.0, reward 0.40, wait 4.10 | "
        "12.3k tokens/s, 192 per device | MFU 31 % | GPU 71.2 GiB (90 %) | engines busy 64 %, filled 20 %, "
        "KV 41 % | reward 0.532, KL 0.0012, gradient norm 0.934 | length 312, clipped 12 %"
    )
    assert len(line) < 280


def test_a_line_leaves_out_what_was_not_measured():
    line = step_line(SECONDS | {"loss": 0.25, "memory/host_gib/max": 1.5, "engine/busy": 0.5}, 1, 2)
    assert line.startswith("step 1/2 | 41.2 s: ") and line.endswith(
        "| memory 1.5 GiB | engines busy 50 % | loss 0.25"
    )
    assert "MFU" not in line and "KV" not in line and "tokens" not in line


def test_other_logs_are_one_line_too():
    line = other_line(
        {f"eval_x/{i}": 1.0 for i in range(20)} | {"eval_reward": 0.5, "epoch": 1.0}, 7
    )
    assert line.startswith("evaluation at step 7: reward 0.5, x/0 1, ") and line.endswith(
        ", and 13 more"
    )
    assert other_line({"train_runtime": 1.5, "train_loss": 0.1, "total_flos": 0}, 9) == (
        "end at step 9: loss 0.1, runtime 1.5"
    )
    assert other_line({"note": "hello"}, 3) == "step 3: note hello"


# ---- the table


def test_a_node_with_longer_completions_is_marked_with_its_reason():
    text = table(node(0), node(1, generate=34.0, wait=3.0, tokens=1900.0), node(2), node(3))
    lines = [line for line in text.splitlines() if line.split()[0] in "0123"]
    assert "34.0 (1.4 x)" in lines[1] and "node 1: generate: 1.6 x the tokens" in text
    assert not any(" x)" in line for line in (lines[0], lines[2], lines[3]))
    text = table(
        node(0),
        node(1, generate=34.0, wait=0.0, tokens=1900.0),
        node(2, wait=7.0),
        node(3, wait=1.0),
    )
    assert "wait: other nodes are slower" in text and text.isascii()


def test_a_node_that_is_slower_with_as_many_tokens_says_so():
    text = table(node(0), node(1, train=30.0, generate=41.0, memory_gib=110.0), node(2))
    assert "generate: slower engines at as many tokens" in text
    assert (
        "train: slower GPUs or host at as many tokens" in text
        and "GiB: more memory at as many tokens" in text
    )


def test_short_times_and_a_factor_of_less_than_1_3_are_not_marked():
    def values(generate: float, reward: float) -> dict[str, float]:
        return {"generate_s": generate, "reward_s": reward}

    nodes = {0: values(10.0, 0.01), 1: values(10.0, 0.01), 2: values(13.5, 0.5)}
    assert not any(marked(nodes, step_s=40.0).values())  # 1.2 x, and 0.3 s of 40 s
    found = marked(nodes | {2: values(19.0, 0.5)}, step_s=10.0)
    assert not found[0] and not found[1] and list(found[2]) == ["generate_s", "reward_s"]


def test_of_many_nodes_the_marked_ones_are_shown():
    nodes = [node(number) for number in range(64)]
    nodes[50] = node(50, generate=60.0)
    text = table(*nodes)
    rows = [
        line.split()[0]
        for line in text.splitlines()
        if line.split()[0].isdigit() and " more " not in line
    ]
    assert len(rows) == MOST_ROWS and "50" in rows and "48 more nodes, 1 of 64 marked" in text


def test_a_single_node_has_no_table():
    assert node_table(SECONDS, 10) is None and node_table(SECONDS | node(0), 10) is None


# ---- the callback


class OfTheScript(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        self.logs = logs


def handler(default: TrainerCallback, *own: TrainerCallback) -> CallbackHandler:
    """Callbacks as transformers' Trainer has them: the script's, then its own one that prints."""
    handler = CallbackHandler([*own, default], None, None, None, None)
    report_steps(handler.callbacks)
    return handler


def log(handler: CallbackHandler, logs: dict, step: int = 10, main: bool = True) -> None:
    state = TrainerState(
        global_step=step, max_steps=80, is_world_process_zero=main, is_local_process_zero=True
    )
    handler.on_log(SimpleNamespace(), state, TrainerControl(), logs)


@pytest.mark.parametrize("default", [PrinterCallback, ProgressCallback])
def test_transformers_printed_dict_gives_way_and_a_scripts_callbacks_stay(default, capsys):
    own, printer = OfTheScript(), PrinterCallback()
    found = handler(default(), own, printer)
    assert [type(one) for one in found.callbacks[-3:]] == [OfTheScript, PrinterCallback, StepLines]
    found.remove_callback(printer)
    log(found, dict(LOGS))
    assert own.logs == LOGS
    assert capsys.readouterr().out == step_line(LOGS, 10, 80) + "\n"
    found.remove_callback(default)  # as a script does that wants no lines
    log(found, dict(LOGS))
    assert capsys.readouterr().out == "" and own.logs == LOGS


def test_only_rank_0_prints(capsys):
    log(handler(PrinterCallback()), dict(LOGS), main=False)
    assert capsys.readouterr().out == ""


def test_the_table_comes_every_k_steps(capsys):
    found = handler(PrinterCallback())
    for step in (3, 9, 12, 18, 24):
        log(found, LOGS | node(0) | node(1), step=step)
    assert capsys.readouterr().out.count("nodes at step") == 2


def test_a_notebooks_own_callback_stays():
    class NotebookProgressCallback(TrainerCallback):
        pass

    assert type(handler(NotebookProgressCallback()).callbacks[-1]) is NotebookProgressCallback


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_line_is_printed_beside_a_progress_bar_which_is_only_on_a_terminal(
    is_terminal, monkeypatch, capsys
):
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(module.sys, "stderr", stream)
    found = handler(ProgressCallback())
    state = TrainerState(global_step=0, max_steps=80, is_world_process_zero=True)
    found.on_train_begin(SimpleNamespace(), state, TrainerControl())
    state.global_step = 10
    found.on_step_end(SimpleNamespace(), state, TrainerControl())
    log(found, dict(LOGS))
    found.on_train_end(SimpleNamespace(), state, TrainerControl())
    assert step_line(LOGS, 10, 80) in capsys.readouterr().out
    assert "10/80" in stream.getvalue() if is_terminal else stream.getvalue() == ""
