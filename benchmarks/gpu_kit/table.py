"""Table of `docs/evidence/gpu.md` and GPU column of `docs/evidence/executed.md`, from `gpu.json` alone."""

from .record import FAILED, PASSED

BEGIN, END = "<!-- table from benchmarks/results/gpu.json: begin -->", "<!-- table: end -->"
NEVER = "No run on a GPU is recorded. `make gpu` makes one."
# First cell of a row of executed.md -> the stages, or the beginnings of their keys, that must all have passed
EVIDENCE = {
    "engine start, generation, TP 2, several engines": ("a", "j"),
    "weights through host shared memory (`host`)": ("b",),
    "weights by broadcast (`nccl`, experimental)": ("j",),
    "weights through CUDA IPC (`ipc`, experimental)": ("c",),
    "balanced micro-batches, ZeRO-3 and one process": ("e balanced",),
    "LoRA, rsLoRA: the adapter alone, or merged bucket by bucket; DoRA merged": ("g",),
    "choice of reserved GPUs": ("j",),
}


def rows(runs: list[dict]) -> str:
    """Return Markdown with a table per recorded run, the newest first: one line per stage with its figures."""
    return "\n".join(map(one_run, reversed(runs))) or NEVER + "\n"


def one_run(found: dict) -> str:
    meta = found["meta"]
    versions = ", ".join(f"{name} {version}" for name, version in meta["versions"].items())
    kind = (
        "**A rehearsal on a CPU: no figure says anything about a GPU.** "
        if meta["rehearsal"]
        else ""
    )
    head = (
        f"{kind}{meta['num_gpus']} x {meta['device']} ({meta['memory_gib']} GiB), driver {meta['driver']}, CUDA "
        f"{meta['cuda']}, Python {meta['python']}, {versions}, {meta['cores']} cores, commit {meta['commit']}.\n\n"
        "| stage | result | s | figures |\n|---|---|---:|---|\n"
    )
    return head + "".join(line(key, stage) for key, stage in sorted(found["stages"].items()))


def line(key: str, stage: dict) -> str:
    figures = ", ".join(f"{name} {value}" for name, value in stage["figures"].items())
    said = (
        "; ".join(filter(None, [stage.get("why"), figures])).replace("|", "\\|").replace("\n", " ")
    )
    return f"| {key} | {stage['result']} | {stage['seconds']} | {said} |\n"


def replaced(page: str, runs: list[dict]) -> str:
    """Return `page` with a new table between its two markers."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{rows(runs)}\n{END}{after}"


def evidence(row: str, runs: list[dict]) -> str:
    """Return the cell "ran on GPU" of a row of the evidence table: empty, or a tick with devices and vLLM versions."""
    on: dict[str, None] = {}
    for name in EVIDENCE.get(row, ()):
        stages = [
            (
                stage["result"],
                f"{run['meta']['device']}, vLLM {run['meta']['versions'].get('vllm')}",
            )
            for run in runs
            if not run["meta"]["rehearsal"]
            for key, stage in run["stages"].items()
            if key.startswith(name)
        ]
        if not shows({result for result, _ in stages}):
            return ""
        on |= dict.fromkeys(machine for result, machine in stages if result == PASSED)
    return f"✓ {'; '.join(on)}" if on else ""


def shows(results: set[str]) -> bool:
    """Return whether at least one stage passed and none failed; a skipped one, such as 7B, shows nothing."""
    return PASSED in results and FAILED not in results


def with_evidence(page: str, runs: list[dict]) -> str:
    """Return `page`, the evidence page, with new cells in the GPU column of the rows in `EVIDENCE`."""
    lines = page.split("\n")
    for index, text in enumerate(lines):
        cells = text.split("|")
        if len(cells) > 3 and (row := cells[1].strip()) in EVIDENCE:
            cell = evidence(row, runs)
            cells[2] = f" {cell} " if cell else " "
            lines[index] = "|".join(cells)
    return "\n".join(lines)
