"""A release in a copy of the checkout: its tag and notes; its wheel, installed beside the stack, runs the command."""

import datetime
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import trl_multinode

pytestmark = [pytest.mark.real, pytest.mark.nightly]
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = trl_multinode.__version__
COPIED = ("trl_multinode", "accelerate_configs", "examples", "requirements")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", ".gitignore")
AUTHOR = {
    f"GIT_{role}_{field}": "tester@localhost"
    for role in ("AUTHOR", "COMMITTER")
    for field in ("NAME", "EMAIL")
}


def run(*command: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env=os.environ | AUTHOR | variables, capture_output=True, text=True,
    )  # fmt: skip


def git(folder: Path, *arguments: str) -> str:
    done = run("git", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def release(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return run(sys.executable, "requirements/release.py", *arguments, cwd=folder)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A repository with the files of this checkout and a changelog of its own, after a dry run and a release."""
    folder = tmp_path_factory.mktemp("release") / "repository"
    for name in COPIED:
        shutil.copytree(
            ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    changelog = folder / "CHANGELOG.md"
    changelog.write_text(
        f"# Changelog\n\n## {VERSION} (unreleased)\n\n- One `thing`.\n\n## 0.0.1 (2026-01-01)\n\n- Old.\n"
    )
    (folder / "build").mkdir()
    (folder / "build" / "stale.py").write_text("")  # an ignored folder of an earlier build
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "all")
    dry = release(folder, "--dry-run", "--out", "dry")
    state = (
        git(folder, "tag"),
        git(folder, "log", "--oneline").count("\n"),
        sorted(os.listdir(folder / "dry")),
    )
    shutil.rmtree(folder / "dry")
    return {"folder": folder, "dry": dry, "after_dry": state, "done": release(folder)}


@pytest.fixture(scope="module")
def wheel(released) -> zipfile.ZipFile:
    (path,) = (released["folder"] / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel in a folder of its own, before the stack on the path, and a folder outside of the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    options = ("--quiet", "--no-deps", "--no-index", "--target", folder / "site")
    done = run(sys.executable, "-m", "pip", "install", *options, wheel.filename, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "work").mkdir()

    def command(*words: str) -> subprocess.CompletedProcess:
        return run(
            folder / "site" / "bin" / "trl-multinode",
            *words,
            cwd=folder / "work",
            PYTHONPATH=str(folder / "site"),
        )

    command.folder = folder
    return command


# ---- make release


def test_a_dry_run_builds_wheel_and_notes_and_tags_nothing(released):
    assert released["dry"].returncode == 0, released["dry"].stderr
    tags, _, files = released["after_dry"]
    assert tags == "" and files == [
        f"notes-{VERSION}.md",
        f"trl_multinode-{VERSION}-py3-none-any.whl",
    ]


def test_a_release_dates_the_changelog_and_tags_that_commit(released):
    folder = released["folder"]
    assert released["done"].returncode == 0, released["done"].stderr
    today = datetime.date.today().isoformat()
    assert f"## {VERSION} ({today})\n" in git(folder, "show", f"v{VERSION}:CHANGELOG.md") + "\n"
    assert (
        git(folder, "tag", "--list", "--format=%(contents)", f"v{VERSION}").strip()
        == "- One `thing`."
    )
    assert git(folder, "rev-parse", f"v{VERSION}^{{commit}}") == git(folder, "rev-parse", "HEAD")
    assert (folder / "dist" / f"notes-{VERSION}.md").read_text() == "- One `thing`.\n"
    assert f"git push origin HEAD v{VERSION}" in released["done"].stdout


def test_a_second_release_of_a_version_is_refused(released):
    again = release(released["folder"])
    assert again.returncode == 1 and f"'{VERSION} (unreleased)'" in again.stderr


def test_an_uncommitted_change_and_a_tag_that_exists_are_named(released):
    folder = released["folder"]
    before = (folder / "CHANGELOG.md").read_text()
    (folder / "CHANGELOG.md").write_text(f"## {VERSION} (unreleased)\n")
    refused = release(folder)
    (folder / "CHANGELOG.md").write_text(before)
    assert refused.returncode == 1
    assert "1 files" in refused.stderr and f"v{VERSION}" in refused.stderr


# ---- the wheel


def test_the_wheel_has_the_files_that_a_run_needs(wheel):
    names = set(wheel.namelist())
    for folder in ("accelerate_configs", "trl_multinode/tools/templates"):
        for path in (ROOT / folder).iterdir():
            name = f"trl_multinode/{path.relative_to(ROOT)}".replace(
                "trl_multinode/trl_multinode", "trl_multinode"
            )
            assert wheel.read(name) == path.read_bytes()
    assert {"trl_multinode/py.typed", "trl_multinode/examples/grpo.py"} <= names
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "trl_multinode").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources


def test_the_metadata_is_complete_and_no_link_of_the_readme_is_relative(wheel):
    metadata = message_from_bytes(wheel.read(f"trl_multinode-{VERSION}.dist-info/METADATA"))
    assert metadata["Version"] == VERSION and metadata["License-Expression"] == "Apache-2.0"
    assert len(metadata.get_all("Project-URL")) >= 4 and "Typing :: Typed" in metadata.get_all(
        "Classifier"
    )
    links = re.findall(r"\]\(([^)\s]+)\)", metadata.get_payload())
    assert len(links) > 15 and [link for link in links if not link.startswith("https://")] == []
    scripts = wheel.read(f"trl_multinode-{VERSION}.dist-info/entry_points.txt").decode()
    assert (
        "trl-multinode = trl_multinode.tools:main" in scripts
        and "[vllm.general_plugins]" in scripts
    )


def test_config_and_check_run_from_the_wheel(installed):
    assert installed("--version").stdout == f"trl-multinode {VERSION}\n"
    wrote = installed("config", "4x8", "--out", "mine.yaml")
    assert wrote.returncode == 0, wrote.stderr
    flags = ("--machine_rank", "1", "--main_process_ip", "node0")
    checked = installed("check", "mine.yaml", *flags)
    assert checked.returncode == 0 and "ok: mine.yaml" in checked.stdout, (
        checked.stdout + checked.stderr
    )
    assert installed("check", "mine.yaml", *flags, "--num_processes", "30").returncode == 1
    (installed.folder / "work" / "train.py").write_text("print()\n")
    job = installed("render", "slurm", "mine.yaml", "--script", "train.py")
    assert "#SBATCH --nodes=4\n" in job.stdout, job.stderr


def test_grpo_runs_from_the_wheel(installed):
    shown = installed("grpo", "--help")
    assert shown.returncode == 0, shown.stderr
    assert "usage: trl-multinode grpo" in shown.stdout and "--max_staleness" in shown.stdout
    code = "from importlib.util import find_spec; print(find_spec('trl_multinode.examples.grpo').origin)"
    site = installed.folder / "site"
    where = run(sys.executable, "-c", code, cwd=installed.folder, PYTHONPATH=str(site))
    assert where.stdout.strip() == str(site / "trl_multinode" / "examples" / "grpo.py")
