"""`trl-multinode clean`: remove what killed runs left on this machine."""

import argparse

from ..wire.leftovers import Leftover, leftovers

DESCRIPTION = """\
Remove what killed runs of this user left on this machine: their folders in the temporary folder, and their shared
memory in /dev/shm. The start of a run does the same. Folders of running runs and of other users stay."""


def main(argv: list[str]) -> int:
    """Remove or list the leftovers, and print one line for each run folder.

    Returns:
        `int`: 0, or 1 if a folder could not be removed.
    """
    parser = argparse.ArgumentParser("trl-multinode clean", description=DESCRIPTION)
    parser.add_argument("--dry-run", action="store_true", help="only list what would be removed")
    dry_run = parser.parse_args(argv).dry_run
    found = list(leftovers(remove=not dry_run))
    failed = [each for each in found if not dry_run and each.kept is None and each.folder.exists()]
    for each in found:
        print(_line(each, "failed" if each in failed else "would be removed" if dry_run else "removed"))
    gone = [each for each in found if each.kept is None and each not in failed]
    segments, size = sum(len(each.segments) for each in gone), sum(each.num_bytes for each in gone)
    verb = "would be removed" if dry_run else "removed"
    print(f"{verb}: {len(gone)} folder(s), {segments} segment(s) of shared memory, {size} bytes")
    return 1 if failed else 0


def _line(found: Leftover, done: str) -> str:
    what = done if found.kept is None else f"kept: {found.kept}"
    return "\n  ".join([f"{found.folder}  {found.num_bytes} bytes  {what}", *map(str, found.segments)])
