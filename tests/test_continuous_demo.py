"""The pieces of `make demo MODE=continuous`, which itself takes some minutes."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trl_multinode.engine.row_stream import RowRequest

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def demo_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "demo"))
    yield
    for name in ("rows", "task"):
        sys.modules.pop(name, None)  # short names, which others may use


def test_a_completion_that_does_not_end_scores_nothing():
    from task import EOS_ID, answer, ended_reward, make_tokenizer

    prompts = ["c a j e"] * 3
    right = " ".join(answer(prompts[0]))
    completions = [right, f"{right} a a", f"{right} a"]
    a = make_tokenizer()("a")["input_ids"]
    ids = [[EOS_ID], [*a, EOS_ID], a]
    assert ended_reward(prompts, completions, completion_ids=ids) == [1.0, 1.0, 0.0]


def test_every_row_is_recorded_and_the_picture_has_the_rows_of_some_steps(tmp_path, monkeypatch):
    import rows

    requests = [RowRequest((number, 0), 0, [5], None, 1) for number in range(2)]
    rollout = SimpleNamespace(tokens=[5, 1], versions=(1, 2))
    stream = SimpleNamespace(added=[], rows_left=2)
    stream.add, stream.poll = stream.added.extend, lambda: [(stream.added.pop(0), rollout)]
    recorded = rows.RecordedStream(stream, tmp_path / "rows" / "rank0.jsonl")
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(rows.time, "time", lambda: now.seconds)
    recorded.add(requests)
    for end in (101.0, 107.0):
        now.seconds = end
        assert recorded.poll()[0][1] is rollout
    assert recorded.rows_left == 2
    phases = tmp_path / "_multinode" / "phases" / "rank0.jsonl"
    phases.parent.mkdir(parents=True)
    lines = [{"phase": "sync", "start": 102.0 + 2 * i, "seconds": 0.5} for i in range(3)]
    phases.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"phase": "train", "start": 1}]))
    record = rows.read(tmp_path)
    assert record["syncs"] == [[0.0, 0.5], [2.0, 0.5]]  # of the second step and the third
    assert record["rows"] == [{"round": 1, "begin": -4.0, "end": 3.0, "tokens": 2, "updates": 2}]
    rows.draw(record, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 5_000
