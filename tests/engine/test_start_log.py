"""What a rank reports while an engine starts, and the error if it does not."""

import importlib.util
import os
import re
from pathlib import Path

import pytest
from waiting import HANG_S, until

from trl_multinode.engine import process, start_log
from trl_multinode.engine.process import EngineProcess, wait_until_ready
from trl_multinode.engine.run_folder import RunFolder
from trl_multinode.engine.start_log import STAGES, StartLog
from trl_multinode.errors import EngineStartError
from trl_multinode.wire.messages import EngineSpec

CORE = "(EngineCore pid=20) ERROR 11-22 11:59:59 [core.py:1433] "
WORKER = "(Worker_TP1 pid=21) ERROR 11-22 11:59:59 [multiproc_executor.py:948] "
FAILED = [
    f"{WORKER}Traceback (most recent call last):",
    f'{WORKER}  File "torch/cuda.py", line 1, in empty',
    f"{WORKER}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    f"{CORE}Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace "
    "for root cause.",
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}",
]


def add(path: Path, *lines: str) -> None:
    with open(path, "a") as log:
        log.writelines(f"{line}\n" for line in lines)


def test_the_stages_follow_the_lines_of_this_start_even_if_a_line_comes_in_two_parts(tmp_path):
    path = tmp_path / "engine0.log"
    add(path, "(MainProcess pid=1) INFO [model.py:699] Resolved architecture: Old")
    log = StartLog(path)
    log.follow()
    assert log.stage == "imports"  # the line above is an earlier run's
    with open(path, "a") as file:
        file.write("(MainProcess pid=2) INFO [model.py:699] Resolved archi")
    log.follow()
    add(path, "tecture: Qwen2ForCausalLM")
    log.follow()
    assert log.stage == "config"
    with open(path, "a") as file:  # a progress bar writes no line
        file.write("\rCapturing CUDA graphs (decode, FULL):  40%|####      | 14/35")
    log.follow()
    assert log.stage == "graphs"
    add(path, "Model loading took 2 GiB")  # another worker's line comes late
    log.follow()
    assert log.stage == "graphs" and log.seconds() == "imports 0 s, config 0 s, graphs 0 s"


def test_the_cause_of_a_failed_start_is_the_exception_that_the_others_refer_to(tmp_path):
    path = tmp_path / "engine0.log"
    add(path, *FAILED[:1], f"{WORKER}ValueError: an earlier run's")
    log = StartLog(path)
    assert log.cause() is None and log.last_lines() == []
    add(path, *(f"line {number}" for number in range(30)), *FAILED)
    assert log.cause() == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert log.last_lines() == [f"line {number}" for number in range(15, 30)] + FAILED


@pytest.mark.nightly  # the lock pins vLLM
@pytest.mark.engine
def test_the_installed_vllm_still_writes_the_phrases_that_begin_a_stage():
    files = {
        "Resolved architecture:": ["config/model.py"],
        "Initializing a V1 LLM engine": ["v1/engine/core.py"],
        "Starting to load model": [
            "v1/worker/gpu_model_runner.py",
            "v1/worker/cpu_model_runner.py",
        ],
        "Loading model from scratch": ["v1/worker/gpu/model_runner.py"],
        "Model loading took": ["v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"],
        "vLLM's torch.compile": ["compilation/backends.py"],
        "KV cache size:": ["v1/core/kv_cache_utils.py"],
        "Capturing CUDA graphs": [
            "v1/worker/gpu_model_runner.py",
            "v1/worker/gpu/cudagraph_utils.py",
        ],
        "See root cause above": ["v1/engine/utils.py"],
        "exception in a background process": ["v1/executor/multiproc_executor.py"],
        "EngineCore failed to start": ["v1/engine/core.py"],
        "WorkerProc failed to start": ["v1/executor/multiproc_executor.py"],
    }
    assert {
        *(phrase for _, phrases in STAGES for phrase in phrases),
        *start_log.FAILED,
    } <= files.keys()
    package = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    moved = [(phrase, name) for phrase, names in files.items() for name in names
             if phrase not in " ".join((package / name).read_text().replace('"', "").split())]  # fmt: skip
    assert not moved, "reworded in this vLLM: correct `STAGES` in engine/start_log.py"


@pytest.fixture
def starting(tmp_path):
    """Start a process that runs lines of Python as the module of an engine."""
    folder, started = RunFolder(0), []
    (tmp_path / "modules").mkdir()

    def start(code: str, log: Path = tmp_path / "engine0.log") -> EngineProcess:
        name = f"engine_{len(started)}_{os.getpid()}"
        (tmp_path / "modules" / f"{name}.py").write_text(code)
        environment = {"PYTHONPATH": str(tmp_path / "modules")}
        spec = EngineSpec(len(started), str(folder.path), os.getpid(), {})
        started.append(EngineProcess(spec, log, environment, module=name))
        return started[-1]

    yield start
    for engine in started:
        engine.kill()
    folder.remove()


@pytest.mark.real
@pytest.mark.fault("6")
def test_the_error_of_a_failed_start_begins_with_its_cause_and_shows_the_end_of_the_log(starting):
    written = "\n".join([*(f"line {number}" for number in range(30)), *FAILED])
    engine = starting(f"""
import json, pathlib, sys
print({written!r}, flush=True)
spec = json.loads(pathlib.Path(sys.argv[-1]).read_text())
(pathlib.Path(spec["folder"]) / "engine0.failure").write_text({FAILED[-1]!r})
sys.exit(1)
""")
    with pytest.raises(EngineStartError) as caught:
        wait_until_ready([engine], HANG_S, print)
    assert str(caught.value) == (
        "engine 0 of node 0 did not start: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
        f"Log: {engine.log_path} (stage of its start: imports)"
    )
    # Python prints it with the traceback, and the other ranks do not repeat it
    (note,) = caught.value.__notes__
    assert note.splitlines() == [
        f"Last 20 lines of {engine.log_path}:",
        *written.splitlines()[-20:],
    ]


@pytest.mark.real
@pytest.mark.fault("6")
def test_a_start_that_failed_ends_the_wait_although_a_process_stays(starting, monkeypatch):
    """A thread or a driver keeps vLLM's core after its last words. The limit of the start would be 15 minutes."""
    monkeypatch.setattr(process, "FAILED_S", 0.5)
    words = "\n".join([*FAILED[:3], f"{CORE}EngineCore failed to start."])
    engine = starting(f"import time; print({words!r}, flush=True); time.sleep({HANG_S})")
    with pytest.raises(
        EngineStartError,
        match=r"engine 0 of node 0 failed to start: torch.OutOfMemoryError: .*stay",
    ):
        wait_until_ready([engine], HANG_S, print)
    assert engine.is_alive()


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.fault("7")
def test_progress_names_the_stage_of_each_engine_and_the_time_that_is_left(starting, monkeypatch):
    monkeypatch.setattr(process, "PROGRESS_EVERY_S", 0.5)
    lines: list[str] = []
    slow = starting(
        f"import time; print('INFO Starting to load model x...', flush=True); time.sleep({HANG_S})"
    )
    until(
        lambda: slow.log_path.exists() and "Starting" in slow.log_path.read_text(),
        "the engine writes its stage",
    )
    with pytest.raises(EngineStartError, match=r"engine 0 .* 2 s \(imports \d+ s, weights \d+ s\)"):
        wait_until_ready([slow], 2.0, lines.append)
    assert any(re.fullmatch(r"1 engine.* \d of 2 s: engine 0 weights", line) for line in lines)
