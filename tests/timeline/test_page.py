"""The page of a run: its data, and the page itself in headless Chromium at two widths, without a network."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from timeline.runs import FATAL, STEPS, write_run

from trl_multinode.tools import main
from trl_multinode.tools.timeline import page
from trl_multinode.tools.timeline.lanes import STEP_PHASES
from trl_multinode.tools.timeline.page import page_data
from trl_multinode.tools.timeline.reading import read_run
from trl_multinode.tools.timeline.table import step_seconds

# what is drawn; test_reading.py and test_lanes.py have what it is drawn from
pytestmark = pytest.mark.nightly
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WIDTHS = {"desk": 1280, "phone": 390}
# Counts what goes wrong from before the page's own scripts, then uses the page as a reader would.
WATCH = """<script>
window.wrong = [], window.cut = [];
addEventListener("error", (event) => wrong.push(event.message || "an element could not be loaded"), true);
addEventListener("securitypolicyviolation", (event) => wrong.push(event.blockedURI));
const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const share = {left: 0, center: 0.5, right: 1}[this.textAlign], wide = this.measureText(text).width;
  const from = x - share * wide;
  if (/^(step )?[0-9.]+( s)?$/.test(text) && (from < -0.5 || from + wide > this.canvas.clientWidth + 0.5))
    cut.push(`${text} at ${from}`);
  write.call(this, text, x, y);
};
for (const kind of ["error", "warn"]) console[kind] = (...words) => wrong.push(words.join(" "));
</script>"""
USE = """<script>
const choice = document.getElementById("metric");
if (choice) { choice.value = "loss"; choice.onchange(); }
const window_of = () => document.getElementById("window").textContent;
const seen = [window_of()];
for (const id of ["all", "in", "right", "left", "out"]) {
  document.getElementById(id).click();
  seen.push(window_of());
}
const step = document.getElementById("step");
step.selectedIndex = 1; step.onchange(); seen.push(window_of());
const hints = [];
for (const canvas of document.querySelectorAll("canvas")) {
  const box = canvas.getBoundingClientRect();
  for (const share of [0.05, 0.3, 0.5, 0.8]) {
    canvas.dispatchEvent(new MouseEvent("mousemove", {clientX: box.left + box.width * share, clientY: box.top + 30}));
    const tip = document.getElementById("tip");
    if (!tip.hidden) hints.push(tip.textContent);
  }
}
const inked = [...document.querySelectorAll("canvas")].map((canvas) =>
  canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value));
const root = document.documentElement;
document.body.dataset.result = JSON.stringify({wrong, cut, seen, hints, inked, text: document.body.innerText,
  width: root.clientWidth, scroll: root.scrollWidth, resources: performance.getEntriesByType("resource").length});
</script>"""


def written(folder: Path, *arguments: str) -> str:
    assert main(["timeline", str(folder), "--html", *arguments]) == 0
    return (folder / "_multinode" / "timeline" / "run.html").read_text()


def shown(text: str, folder: Path, width: int) -> dict:
    """Show a page in a frame of that width, because a window of Chromium cannot be as narrow as a phone."""
    watched = text.replace("<head>", f"<head>{WATCH}", 1).replace("</body>", f"{USE}</body>")
    (folder / "page.html").write_text(watched)
    style = f"border:0;width:{width}px;height:900px"
    frame = f"""<body style="margin:0"><iframe id="f" src="page.html" style="{style}"></iframe>
<script>f.onload = () => document.body.append(f.contentDocument.body.dataset.result)</script></body>"""
    (folder / "frame.html").write_text(frame)
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom",
        "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000",
        "--no-first-run", "--disable-background-networking", "--enable-logging=stderr", f"file://{folder}/frame.html",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r'</script>(\{"wrong".*\})</body>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr, done.stderr
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.mark.real
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian package `chromium`)")
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_the_page_of_a_failed_run_works_without_a_network_and_fits_its_window(tmp_path, width):
    found = shown(written(write_run(tmp_path / "run", failed=True)), tmp_path, width)
    assert found["wrong"] == [] and found["resources"] == 0
    assert found["cut"] == []
    assert width - 20 < found["width"] == found["scroll"]  # the scroll bar of the length takes 15
    assert found["inked"] == [True] * 7  # three at a glance, metric, bars of two nodes, timeline
    for text in ("completion tokens: completions/mean_length", "user: 1+1?", "it is 2", "10 of 12",
                 "a/model: 2 nodes, 4 ranks, 2 engines, steps 1 to 4", f"ended with code 6: {FATAL}", "max_staleness",
                 "killed by SIGKILL", "out/checkpoint-3", "1.16.0"):  # fmt: skip
        assert text in found["text"]
    first, all_, closer, *_, step = found["seen"]
    assert (
        all_ == "0 to 63 s"
        and closer == "15.75 to 47.25 s"
        and step == "30 to 40 s"
        and first == "20 to 63 s"
    )
    assert any(re.match("step 2.*sync 1 s.*train", hint) for hint in found["hints"])
    assert any(re.match("node 0, rank 0, .*train .* s, step 2", hint) for hint in found["hints"])


def test_nothing_in_the_page_is_loaded_from_elsewhere(tmp_path):
    text = written(write_run(tmp_path, failed=True))
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[
        1
    ]
    # a text of the run cannot end the page's script
    assert json.loads(data)["endings"][0]["cause"] == FATAL
    assert not re.findall(r"""(?:src|href)=["'](?!data:)|@import|url\(|fetch\(|https?://""", text)
    assert "default-src 'none'" in text and not re.findall(r"@(DATA|page\.\w+|\w+\.js)@", text)


def test_bars_are_the_seconds_of_the_table_and_metrics_those_of_the_log(tmp_path):
    run = read_run([write_run(tmp_path)])
    data = page_data(run, range(1, STEPS + 1))
    for node in (0, 1):
        ranks = [lane for lane in run.lanes if lane.node == node and lane.kind == "rank"]
        for place, phase in enumerate(STEP_PHASES):
            total = sum(step[place] for step in data["bars"]["nodes"][str(node)])
            seconds = [took for (_, each), took in step_seconds(ranks).items() if each == phase]
            assert total == pytest.approx(sum(seconds), abs=0.01)
    assert (
        data["metrics"]["reward"] == [[1, 0.1], [2, 0.2], [3, 0.3], [4, 0.4]]
        and "note" not in data["metrics"]
    )
    # a resume
    again = [
        {"step": 2, "reward": 0.2},
        {"step": 2, "reward": 0.9},
        {"step": 3, "reward": float("nan")},
    ]
    assert page.metrics(again) == {"reward": [[2, 0.9]]}
    assert sum(piece[1] for piece in data["timeline"]["lanes"][0]["pieces"]) == pytest.approx(
        15 + 9 * STEPS + 3
    )


def test_the_timeline_of_a_long_run_has_its_last_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MOST_PIECES", 90)
    data = page_data(read_run([write_run(tmp_path)]), range(1, STEPS + 1))
    assert [step for step, _ in data["timeline"]["steps"]] == [3, 4] and data["bars"]["steps"] == [
        1,
        2,
        3,
        4,
    ]


def test_a_run_started_with_its_first_phase_and_its_completions_begin_with_numbers(tmp_path):
    run = read_run([write_run(tmp_path)])
    data = page_data(run, range(1, STEPS + 1))
    assert data["started"] == run.begin != run.settings["time"]
    assert ("seconds per step", "perf/step_s") in data["overview"]
    assert data["completions"]["columns"] == [
        "accuracy_reward",
        "advantage",
        "prompt",
        "completion",
    ]


def test_a_page_of_a_run_without_logs_settings_or_endings(tmp_path):
    write_run(tmp_path)
    for name in ("log.jsonl", "settings.jsonl", "ending-node0.json", "ending-node1.json"):
        (tmp_path / "_multinode" / name).unlink()
    data = page_data(read_run([tmp_path]), range(1, STEPS + 1))
    assert (data["metrics"], data["settings"], data["endings"]) == ({}, {}, [])
