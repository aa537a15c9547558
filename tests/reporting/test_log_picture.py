"""The picture in the README shows today's log: drawn again from the recorded run, it has the same text."""

import html
import json
import re
from pathlib import Path

import pytest
from log_picture import DOCS, draw, record

pytestmark = pytest.mark.nightly


def text_of(picture: Path) -> list[str]:
    found = re.findall(r"<text [^>]*>(.*?)</text>", picture.read_text())
    return " ".join(html.unescape(part).replace("\xa0", " ") for part in found).split()


def test_the_picture_is_that_of_todays_lines(tmp_path):
    draw(json.loads((DOCS / "log.json").read_text()), tmp_path / "log.svg")
    again = "run `python benchmarks/log_picture.py` and commit docs/log.svg"
    assert text_of(tmp_path / "log.svg") == text_of(DOCS / "log.svg"), again


def test_the_last_steps_of_a_run_are_recorded(tmp_path):
    recorded = json.loads((DOCS / "log.json").read_text())
    (tmp_path / "checkpoint-9").mkdir()
    early = [{"step": step, "loss": 0.1, "perf/step_s": 1.0} for step in range(3)]
    history = {"log_history": [*early, *recorded["logs"]]}
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text(json.dumps(history))
    assert record(tmp_path) == recorded
