"""`make release`: wheel, notes and tag of the version in trl_multinode/__init__.py. Publishes nothing.

Usage: python requirements/release.py [--dry-run] [--out dist]

The wheel is built from the commit, not from the folder, so that no file of an earlier build gets into it. Then the
section "(unreleased)" of CHANGELOG.md gets today's date in a commit of its own, which is tagged. With --dry-run there
is a wheel and there are notes, but no commit and no tag.
"""

import argparse
import datetime
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHANGELOG = ROOT / "CHANGELOG.md"
LIMIT_S = 300


def git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True, timeout=LIMIT_S
    )
    return done.stdout.strip()


def version() -> str:
    found = re.search(
        r'^__version__ = "(.*)"', (ROOT / "trl_multinode" / "__init__.py").read_text(), re.MULTILINE
    )
    if found is None:
        sys.exit("trl_multinode/__init__.py has no __version__.")
    return found[1]


def notes(wanted: str) -> str:
    """Return the text of the section of a version that is not released yet."""
    sections = re.split(r"^## (.*)\n", CHANGELOG.read_text(), flags=re.MULTILINE)
    titles = dict(zip(sections[1::2], sections[2::2], strict=True))
    if f"{wanted} (unreleased)" not in titles:
        found = ", ".join(titles) or "none"
        sys.exit(
            f"CHANGELOG.md has no section '{wanted} (unreleased)', only: {found}. Add it, or set __version__."
        )
    return titles[f"{wanted} (unreleased)"].strip() + "\n"


def obstacles(tag: str) -> list[str]:
    """Return why the checkout cannot be tagged."""
    found = []
    if changed := git("status", "--porcelain"):
        found.append(f"{len(changed.splitlines())} files are not committed: commit or remove them")
    if git("tag", "--list", tag):
        found.append(
            f"the tag {tag} exists: set a new __version__, and add its section to CHANGELOG.md"
        )
    return found


def build(out: Path) -> Path:
    """Build the wheel of the last commit."""
    with tempfile.TemporaryDirectory() as folder:
        git("archive", "--output", f"{folder}/source.tar", "HEAD")
        source = Path(folder) / "source"
        source.mkdir()
        subprocess.run(
            ["tar", "-xf", f"{folder}/source.tar", "-C", source], check=True, timeout=LIMIT_S
        )
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
        ]
        subprocess.run(
            [*command, "--wheel-dir", f"{folder}/wheel", source], check=True, timeout=LIMIT_S
        )
        (wheel,) = Path(folder, "wheel").glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, out))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="no commit and no tag")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="folder of the wheel and the notes"
    )
    options = parser.parse_args()
    number = version()
    tag, text = f"v{number}", notes(number)
    problems = obstacles(tag)
    for problem in problems:
        print(f"[release] {problem}", file=sys.stderr)
    if problems and not options.dry_run:
        sys.exit(1)
    wheel = build(options.out)
    (options.out / f"notes-{number}.md").write_text(text)
    print(f"[release] {wheel} and notes-{number}.md ({len(text.splitlines())} lines)")
    if options.dry_run:
        print(f"[release] dry run: no commit, no tag {tag}")
        return
    today = datetime.date.today().isoformat()
    CHANGELOG.write_text(
        CHANGELOG.read_text().replace(f"## {number} (unreleased)", f"## {number} ({today})")
    )
    git("commit", "--quiet", "--message", f"Release {number}", "--", "CHANGELOG.md")
    git(
        "tag",
        "--annotate",
        tag,
        "--file",
        str(options.out / f"notes-{number}.md"),
        "--cleanup=verbatim",
    )
    print(
        f"[release] tagged {tag}. To publish, and then to begin the next version in __init__.py and CHANGELOG.md:"
    )
    print(f"    git push origin HEAD {tag} && twine upload {wheel}")
    print(f"    gh release create {tag} {wheel} --notes-file {options.out}/notes-{number}.md")


if __name__ == "__main__":
    main()
