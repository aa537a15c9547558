"""The stages of the gate, and the judgement of their failures. Standard library only.

A failed test runs once more, alone and in a fresh process; at most three tests of a gate may need it. One that
passes then is printed as `FLAKY`, which is a fault to be found. A nightly test that fails twice and fails on the
parent commit too is printed as `INHERITED`. All other failures refuse the change.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
MOST_FAILED = 3
STAGES = ("test", "test-real", "test-e2e", "nightly-part")
FIRST_WITH_PACKAGES = "test-real"
PYTEST = ("python", "-m", "pytest", "-q", "-p", "no:xdist")


def main() -> None:
    """Run the stages in order; exit at the first one that refuses the change."""
    # A skipped test that is marked engine, zero3 or two_node fails its stage
    os.environ["TRL_MULTINODE_NO_SKIPS"] = "1"
    packages = subprocess.Popen(ROOT / ".ci" / "packages")
    make(".venv/.installed")
    # The linters need no extension of DeepSpeed and no byte code, which are made meanwhile
    with subprocess.Popen(["make", "setup"], cwd=ROOT) as warming:
        checked = make("check")
    if not checked or warming.returncode:
        sys.exit("::: `make check` or `make setup` failed")
    chances = MOST_FAILED
    for stage in STAGES:
        if stage == FIRST_WITH_PACKAGES and packages.wait():
            print(
                "::: Debian packages are missing; the tests that need them are skipped", flush=True
            )
            os.environ["TRL_MULTINODE_NO_SKIPS"] = "without-packages"
        LAST_FAILED.unlink(missing_ok=True)
        if not make(stage):
            failed = failed_tests()
            print(f"::: failed in `make {stage}`:", *failed, sep="\n:::   ", flush=True)
            if not 0 < len(failed) <= chances:
                sys.exit(f"::: {len(failed)} failed, at most {chances} run once more")
            chances -= len(failed)
            judge(failed, inherited=stage == "nightly-part")


def make(target: str) -> bool:
    """Run a target, print its seconds, and return whether it succeeded."""
    print(f"::: make {target}", flush=True)
    start = time.monotonic()
    code = subprocess.run(["make", target], cwd=ROOT).returncode
    print(f"::: make {target} took {time.monotonic() - start:.0f} s", flush=True)
    return code == 0


def failed_tests() -> list[str]:
    """Return the tests that failed in the last run of pytest; empty if it failed for another reason."""
    return sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []


def judge(failed: list[str], inherited: bool) -> None:
    """Repeat each test alone. Exit if one fails again, unless it fails on the parent commit too and may do so."""
    refused = []
    for test in failed:
        if passes(test, ROOT):
            print(f"FLAKY {test}: failed in the first run, passed alone", flush=True)
        elif inherited and fails_on_parent(test):
            print(
                f"INHERITED {test}: failed in the first run, alone, and on the parent commit",
                flush=True,
            )
        else:
            print(f"::: {test}: failed in the first run and alone", flush=True)
            refused.append(test)
    if refused:
        sys.exit(1)


def passes(test: str, tree: Path) -> bool:
    """Run one test of a tree in a fresh process, in the environment that the Makefile gives it."""
    # PYTHONPATH makes the tests of another tree import that tree's package
    scripts, extensions = ROOT / ".venv" / "bin", ROOT / ".venv" / "torch_extensions"
    environment = {
        **os.environ,
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "TORCH_EXTENSIONS_DIR": str(extensions),
        "PYTHONPATH": str(tree),
    }
    return subprocess.run([*PYTEST, test], cwd=tree, env=environment).returncode == 0


def fails_on_parent(test: str) -> bool:
    """Return whether the parent commit has the test and fails it too."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "parent"
        git = ["git", "-C", str(ROOT), "worktree"]
        if subprocess.run(
            [*git, "add", "--detach", str(tree), "HEAD^"], capture_output=True
        ).returncode:
            return False  # a shallow checkout has no parent
        try:
            file, _, name = test.partition("::")
            function = name.partition("[")[0].rpartition("::")[2]
            known = (tree / file).exists() and f"def {function}(" in (tree / file).read_text()
            return known and not passes(test, tree)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], capture_output=True)


if __name__ == "__main__":
    main()
