"""`make trl-tests DIR=...`: TRL's own tests of GRPO and RLOO, from a checkout of TRL, under this library's classes.

The tests are copied, and `from trl import` becomes `from trl_multinode import`. Each test that fails runs again under
TRL's classes. The exit code is 1 if a test fails only under this library's, unless suite.toml has the reason.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from source_names import hub_ids, trl_imports
from stand_ins import build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = ("test_grpo_trainer.py", "test_rloo_trainer.py")
MODES = {
    "plain": "`use_vllm=False`",
    "node": "node mode, fake engine",
    "vllm": "node mode, vLLM on the CPU, tests of vLLM that TRL skips",
}
HEAD_DIMS = {"vllm": 32}  # the least of vLLM's CPU attention; elsewhere TRL's tiny sizes
TEST_LIMIT_S = 600
# glibc gives tensors as large as logits back to the kernel when they are freed. The kernel clears the same pages again
# for the next one, and that took more time than the computations.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
PYTEST_INI = (
    "[pytest]\nmarkers =\n    slow\n    low_priority\n    invariant\nfilterwarnings = ignore\n"
)
Results = dict[str, tuple[str, str]]  # test -> outcome, reason


@dataclass(frozen=True)
class Suite:
    """TRL's tests in a folder of this run: as they are, and with this library's import."""

    folder: Path
    config: dict
    arguments: tuple[str, ...]
    jobs: int
    prompts: int

    def prepare(self, checkout: Path) -> None:
        """Copy the tests, because a checkout in `sys.path` would also be imported instead of the installed TRL."""
        for classes in ("trl", "trl_multinode"):
            tests = self.folder / classes / "tests"
            tests.mkdir(parents=True)
            (tests.parent / "pytest.ini").write_text(PYTEST_INI)
            for path in checkout.joinpath("tests").glob("*.py"):
                if path.name in FILES or not path.name.startswith("test_"):
                    source = path.read_text()
                    if path.name in FILES and classes == "trl_multinode":
                        source = re.sub(
                            r"^(\s*)from trl import",
                            r"\1from trl_multinode import",
                            source,
                            flags=re.M,
                        )
                    (tests / path.name).write_text(source)

    def run(self, mode: str, head_dim: int, tests: list[str] | None = None) -> Results:
        """Run the chosen tests of a mode, or just `tests`, in a process of pytest, and return their results."""
        models = self.folder / f"models{head_dim}"
        models.mkdir(exist_ok=True)
        copies = self.folder / ("trl" if mode == "trl" else "trl_multinode")
        sources = [path.read_text() for path in (copies / "tests").glob("*.py")]
        named = {
            name for name in set().union(*map(hub_ids, sources)) if not (models / name).exists()
        }
        run = {
            "mode": mode,
            "chosen": self.config["chosen"].get(mode, [""]),
            "missing": build(named, models, head_dim, self.prompts, tuple(sources)),
            "unskipped": self.config["unskipped"]["reasons"] if mode in ("node", "vllm") else [],
            "imports": sorted(set().union(*map(trl_imports, sources))),
            "results": str(self.folder / f"{mode}.jsonl"),
        }
        Path(run["results"]).write_text("")
        command = self.command(
            mode, copies, tests or [f"tests/{f}" for f in FILES if (copies / "tests" / f).exists()]
        )
        code = subprocess.run(
            command, cwd=models, env=self.environment(run, self.jobs_of(mode))
        ).returncode
        if code not in (0, 1, 5):  # passed, failed, nothing chosen
            raise RuntimeError(
                f"pytest of mode {mode!r} ended with code {code}: {' '.join(command)}"
            )
        return read(Path(run["results"]))

    def command(self, mode: str, copies: Path, tests: list[str]) -> list[str]:
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "suite_plugin",
            "-p",
            "no:cacheprovider",
        ]
        words += [
            "-c",
            str(copies / "pytest.ini"),
            "--rootdir",
            str(copies),
            "--timeout",
            str(TEST_LIMIT_S),
        ]
        words += [
            "--basetemp",
            str(self.folder / f"{mode}-tmp"),
            "--continue-on-collection-errors",
            "--tb",
            "short",
        ]
        if (jobs := self.jobs_of(mode)) > 1:
            words += ["--numprocesses", str(jobs)]
        return [*words, *self.arguments, *(f"{copies}/{test}" for test in tests)]

    def jobs_of(self, mode: str) -> int:
        return 1 if mode == "vllm" else self.jobs

    def environment(self, run: dict, jobs: int) -> dict[str, str]:
        path = os.pathsep.join(
            [
                str(HERE),
                str(ROOT),
                str(ROOT / "tests"),
                *filter(None, [os.environ.get("PYTHONPATH")]),
            ]
        )
        home = {"HF_HOME": str(self.folder / "hf"), "HF_HUB_OFFLINE": "1"}
        own = {"PYTHONPATH": path, "TRL_SUITE": json.dumps(run), "TRL_EXPERIMENTAL_SILENCE": "1"}
        # a pytest with several processes may be the caller, and its variables are not for the one that starts here
        outer = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
        }
        threads = {
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // jobs)),
            "OMP_WAIT_POLICY": "passive",
        }
        return KEEP_MEMORY | threads | outer | home | own


def read(results: Path) -> Results:
    """Return the outcome of each test; of several lines the worst one counts (a test can fail in its teardown too)."""
    found: Results = {}
    for line in results.read_text().splitlines():
        row = json.loads(line)
        if row["test"] not in found or row["outcome"] == "failed":
            found[row["test"]] = (row["outcome"], row["why"])
    return found


@dataclass(frozen=True)
class Failure:
    """One test that failed under this library's classes."""

    mode: str
    test: str
    why: str
    trls: str  # outcome under TRL's classes
    reason: str | None  # from suite.toml

    @property
    def unexplained(self) -> bool:
        return self.trls != "failed" and self.reason is None


def failures(mode: str, ours: Results, trls: Results, known: list[dict]) -> list[Failure]:
    """Return the failures of a mode, with what happened to the same tests under TRL's classes."""
    found = []
    for test, (_, why) in (
        (test, result) for test, result in ours.items() if result[0] == "failed"
    ):
        under_trls = trls.get(test, ("not run", ""))[0]
        rows = [row for row in known if row["mode"] == mode and re.search(row["test"], test)]
        reasons = [row["reason"] for row in rows if under_trls == "failed" or not row.get("both")]
        found.append(Failure(mode, test, why, under_trls, next(iter(reasons), None)))
    return found


def page(modes: dict[str, Results], failed: list[Failure], trl: str) -> str:
    """Return the table of the results as Markdown."""
    lines = [
        f"TRL's tests of version {trl}, on TRL {version('trl')} and transformers {version('transformers')}:", "",
        "| mode | tests | passed | failed as under TRL's classes | failed only here | skipped |",
        "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for mode, results in modes.items():
        count = Counter(outcome for outcome, _ in results.values())
        only = sum(failure.trls != "failed" for failure in failed if failure.mode == mode)
        total = count["passed"] + count["failed"]
        row = [MODES[mode], total, count["passed"], count["failed"] - only, only, count["skipped"]]
        lines.append(f"| {' | '.join(map(str, row))} |")
    lines += ["", "| failed | mode | under TRL's classes | reason |", "|---|---|---|---|"]
    for failure in failed:
        test, reason = failure.test.partition("::")[2], failure.reason or f"`{failure.why[:160]}`"
        lines.append(
            f"| `{test}` | {failure.mode} | {failure.trls} | {reason.replace('|', chr(92) + '|')} |"
        )
    lines += ["", "| skipped | tests | reason |", "|---|---:|---|"]
    for mode, results in modes.items():
        reasons = Counter(why for outcome, why in results.values() if outcome == "skipped")
        lines += [f"| {mode} | {number} | {why} |" for why, number in sorted(reasons.items())]
    return "\n".join([*lines, ""])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="folder of a checkout of TRL, at any tag")
    parser.add_argument("--mode", action="append", choices=MODES, help="default: all")
    parser.add_argument("--jobs", type=int, default=2, help="processes of pytest without vLLM")
    parser.add_argument(
        "--prompts", type=int, default=4, help="training prompts; TRL's own data has 17"
    )
    parser.add_argument(
        "--suite", type=Path, default=HERE / "suite.toml", help="chosen tests and known failures"
    )
    parser.add_argument("--page", type=Path, help="file for the table; default: only printed")
    options, pytests = parser.parse_known_args(arguments)
    if not (options.checkout / "tests").is_dir():
        parser.error(
            f"{options.checkout} has no folder `tests`: give the root of a checkout of TRL"
        )
    config = tomllib.loads(options.suite.read_text())
    folder = Path(tempfile.mkdtemp(prefix="trls-"))
    try:
        suite = Suite(folder, config, tuple(pytests), options.jobs, options.prompts)
        suite.prepare(options.checkout.resolve())
        return compare(suite, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compare(suite: Suite, options: argparse.Namespace) -> int:
    """Run the modes, then the failed tests under TRL's classes; print and save the table; return the exit code."""
    modes, failed = {}, []
    for mode in options.mode or MODES:
        head_dim = HEAD_DIMS.get(mode, 4)
        modes[mode] = suite.run(mode, head_dim)
        again = [test for test, (outcome, _) in modes[mode].items() if outcome == "failed"]
        trls = suite.run("trl", head_dim, again) if again else {}
        failed += failures(mode, modes[mode], trls, suite.config.get("failure", []))
    trl = (
        (options.checkout / "VERSION").read_text().strip()
        if (options.checkout / "VERSION").exists()
        else "unknown"
    )
    text = page(modes, failed, trl)
    print(text)
    if options.page:
        options.page.write_text(text)
    if not any(
        outcome == "passed" for results in modes.values() for outcome, _ in results.values()
    ):
        print("No test passed: is this a checkout of TRL, and do its tests have these names?")
        return 1
    for failure in (unexplained := [failure for failure in failed if failure.unexplained]):
        print(f"fails only under trl_multinode ({failure.mode}): {failure.test}: {failure.why}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
