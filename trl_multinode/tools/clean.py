"""`trl-multinode clean`: remove what killed runs left on this machine."""

from ..wire.leftovers import Leftover, leftovers
from .text import Parser

DESCRIPTION = """\
Remove what killed runs of this user left on this machine: their folders in the temporary folder, and their shared
memory in /dev/shm. The start of a run does the same. Folders of running runs and of other users stay."""


def main(argv: list[str]) -> int:
    """Remove or list the leftovers, and print one line for each run folder.

    Returns:
        `int`: 0, or 1 if a folder could not be removed.
    """
    parser = Parser("trl-multinode clean", description=DESCRIPTION)
    parser.add_argument("--dry-run", action="store_true", help="only list what would be removed")
    dry_run = parser.parse_args(argv).dry_run
    verb = "would be removed" if dry_run else "removed"
    gone: list[Leftover] = []
    failed = False
    for each in leftovers(remove=not dry_run):
        done = f"kept: {each.kept}"
        if each.kept is None and not dry_run and each.folder.exists():
            done, failed = "failed", True
        elif each.kept is None:
            done = verb
            gone.append(each)
        print(f"{each.folder}  {each.num_bytes} bytes  {done}", *each.segments, sep="\n  ")
    segments, size = sum(len(each.segments) for each in gone), sum(each.num_bytes for each in gone)
    print(f"{verb}: {len(gone)} folder(s), {segments} segment(s) of shared memory, {size} bytes")
    return 1 if failed else 0
