"""`trl-multinode timeline`: its table, the trace, and its errors."""

import json
import re

import pytest
from timeline import runs
from timeline.runs import STEPS, write_run

from trl_multinode.tools import main
from trl_multinode.tools.timeline import command, reading
from trl_multinode.tools.timeline.command import chosen_steps
from trl_multinode.tools.timeline.page import page_data
from trl_multinode.tools.timeline.reading import TAILS, TimelineError


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path)


def test_the_table_has_the_seconds_of_a_step_by_node(folder, capsys):
    assert main(["timeline", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 nodes, 4 ranks, 2 engines, steps 1 to 4")
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in out.splitlines()
        if line.startswith("│")
    ]
    # the evaluation at the end is not of a step, as in the log; the engines generate 5.5 s of a step
    assert rows[0] == ["0", "1.00", "0.00", "2.00", "5.00", "1.00", "51 %", "0", "0"]
    assert rows[1][:6] == ["1", "1.00", "0.00", "2.00", "6.00", "0.00"] and rows[1][-1] == "1"
    assert (folder / "_multinode" / "timeline" / "timeline.json").exists()
    assert main(["timeline", str(folder), "--steps", "-2:"]) == 0  # no flag
    assert "steps 3 to 4" in capsys.readouterr().out


# ---- the trace


def events(folder, *arguments) -> list[dict]:
    assert main(["timeline", str(folder), *arguments]) == 0
    return json.loads((folder / "_multinode" / "timeline" / "timeline.json").read_text())[
        "traceEvents"
    ]


def by_thread(found: list[dict]) -> dict[tuple[int, int], list[dict]]:
    threads: dict[tuple[int, int], list[dict]] = {}
    for event in found:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    return threads


@pytest.mark.parametrize("in_flight", [False, True])
def test_spans_of_a_trace_nest_and_never_overlap(tmp_path, in_flight):
    """Perfetto drops a span that begins inside another one and ends after it."""
    threads = by_thread(events(write_run(tmp_path, in_flight=in_flight)))
    assert len(threads) == 4 + 2 + 1
    assert (
        sum(event["dur"] for event in threads[1, 2] if event["name"] == "train")
        == STEPS * 9_000_000
    )
    for spans in threads.values():
        ends: list[int] = []
        for span in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
            while ends and ends[-1] <= span["ts"]:
                ends.pop()
            assert not ends or span["ts"] + span["dur"] <= ends[-1]
            ends.append(span["ts"] + span["dur"])


def test_a_trace_names_lanes_and_marks_and_counts_rows(folder):
    found = events(folder)
    names = {
        event["args"]["name"] for event in found if event["name"] in ("process_name", "thread_name")
    }
    assert names == {
        "node 0",
        "node 1",
        "optimizer steps",
        *(f"rank {i}" for i in range(4)),
        "engine 0",
    }
    assert [(event["name"], event["args"]["what"]) for event in found if event["ph"] == "i"] == [
        ("lost", "killed by SIGKILL"), ("restart", "restart 1"),
    ]  # fmt: skip
    rows = [event["args"]["rows"] for event in found if event["ph"] == "C" and event["pid"] == 0]
    assert rows == [0, *[0, 8, 2, 0] * STEPS, 0]


def test_agents_that_join_or_leave_are_marks_of_trace_table_and_page(folder, capsys):
    lines = [
        {"mark": text, "start": runs.BEGIN + at, "node": 0, "attempt": 1}
        for text, at in (("agent 2 leaves", 33.0), ("agent 2 joins", 12.0))
    ]
    runs.write_lines(folder / "_multinode/phases/rank0.jsonl", [*runs.rank_lines(0), *lines])
    found = [event for event in events(folder) if event["ph"] == "i" and event["name"] == "agent"]
    at = {event["args"]["what"]: event["ts"] for event in found}
    assert at["agent 2 leaves"] - at["agent 2 joins"] == 21_000_000
    # in the order of time
    printed = [line for line in capsys.readouterr().out.splitlines() if "agent 2" in line]
    assert [line.rpartition(": ")[2] for line in printed] == ["agent 2 joins", "agent 2 leaves"]
    assert printed[0].startswith("1970-01-12 13:46:52 UTC")
    run = reading.read_run([folder])
    lanes = page_data(run, range(1, STEPS + 1))["timeline"]["lanes"]
    assert [mark[0] for mark in lanes[0]["marks"]] == ["agent", "agent"]


def test_a_trace_of_some_steps_and_nodes(folder):
    found = events(folder, "--steps", "2:3", "--nodes", "1")
    assert {event["pid"] for event in found if event["ph"] == "X"} == {1, 1_000_000}
    assert {event["args"]["step"] for event in found if "step" in event.get("args", {})} == {2, 3}
    assert {
        event["name"] for event in found if event["pid"] == 1_000_000 and event["ph"] == "X"
    } == {
        "step 2",
        "step 3",
    }


# ---- steps


@pytest.fixture
def long_run(tmp_path, monkeypatch):
    """A run whose files are longer than the ends that are read first; one rank has ended in a line of step 550."""
    monkeypatch.setattr(runs, "STEPS", 600)
    folder = write_run(tmp_path)
    phases = folder / "_multinode" / "phases"
    for rank in (0, 2):
        lines = runs.rank_lines(rank) + runs.rank_lines(rank, attempt=2, begin=runs.BEGIN + 9000)
        runs.write_lines(phases / f"rank{rank}.jsonl", lines)
    path = phases / "rank2.jsonl"
    path.write_bytes(path.read_bytes()[:-16_000])
    (phases / "rank0.jsonl").rename(phases / "rank0.jsonl.1")
    runs.write_lines(
        phases / "rank0.jsonl", runs.rank_lines(0, attempt=2, begin=runs.BEGIN + 9000)[-9:]
    )
    assert all(path.stat().st_size > TAILS[0] for path in phases.glob("rank[123].jsonl"))
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "-3:"],
        ["--steps", "-60:-58", "--nodes", "1"],
        ["--steps", "-3:", "--nodes", "1"],
        ["--steps", "300"],
        ["--steps", "1:2"],
        ["--steps", "-2:", "--attempt", "1"],
        ["--steps", "700"],
    ],
    ids=" ".join,
)
def test_the_ends_of_files_show_the_same_as_the_whole_files(
    long_run, monkeypatch, capsys, arguments
):
    def shown(tails) -> tuple:
        monkeypatch.setattr(command, "TAILS", tails)
        code = main(["timeline", str(long_run), *arguments])
        path = long_run / "_multinode" / "timeline" / "timeline.json"
        return code, capsys.readouterr(), path.read_bytes() if path.exists() else b""

    assert shown((20_000, *TAILS)) == shown(TAILS) == shown(())


def test_of_the_last_steps_only_the_ends_of_the_files_are_read(long_run, monkeypatch):
    sizes = []
    texts = reading._texts

    def counted(path, *tail):
        found, is_whole = texts(path, *tail)
        sizes.append(sum(map(len, found)))
        return found, is_whole

    monkeypatch.setattr(reading, "_texts", counted)
    assert main(["timeline", str(long_run), "--steps", "-3:"]) == 0
    num_files = len([*(long_run / "_multinode" / "phases").glob("*.jsonl")])
    # settings too, once
    assert len(sizes) == num_files + 1 and max(sizes) < TAILS[0] + 1000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, range(5, 21)), ("7:9", range(7, 10)), ("7", range(7, 8)), ("18:", range(18, 21)), (":6", range(5, 7)),
        ("-3:", range(18, 21)), ("1:6", range(5, 7)), ("-1", range(20, 21)), (":-15", range(5, 7)),
    ],
)  # fmt: skip
def test_steps_are_those_of_the_log(text, expected):
    assert chosen_steps(text, range(5, 21)) == expected


@pytest.mark.parametrize("text", ["x", "", "1:2:3", "3-5", "30:40", "9:7"])
def test_steps_that_are_no_range_or_not_there_are_refused(text):
    with pytest.raises(TimelineError, match="--steps"):
        chosen_steps(text, range(5, 21))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], r"none/_multinode/phases/rank<r>.jsonl"),
        (["RUN", "--attempt", "7"], r"--attempt 7.*\[1\]"),
        (["RUN", "--nodes", "5"], r"--nodes 5.*\[0, 1\]"),
        (["RUN", "--nodes", "a"], "--nodes"),
        (["RUN", "--steps", "9"], "--steps 9.* 1 to 4"),
    ],
)
def test_errors_are_one_line_with_what_was_expected(folder, capsys, arguments, message):
    assert main(["timeline", *(str(folder) if word == "RUN" else word for word in arguments)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trl-multinode timeline: ") and re.search(message, line)
