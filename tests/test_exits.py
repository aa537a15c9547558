"""How a script ends is noticed at exit, and the hooks for it go with their owner."""

import builtins
import subprocess
import sys

import pytest

from trl_multinode.run.watch.exits import ScriptExits, has_returned

# faults/test_ways_to_end.py has the ends of scripts, and test_watch_alone.py the removal of hooks
pytestmark = pytest.mark.nightly

BEGIN = """
import atexit, sys, threading
from trl_multinode.run.watch.exits import ScriptExits
exits = ScriptExits(lambda error: False)
exits.watch()
atexit.register(lambda: print("status", repr(exits.bad_status()), file=sys.stdout))
def leave(status):
    try:
        sys.exit(status)
    finally:
        print("left")
def leave_caught(status):
    try:
        leave(status)
    except SystemExit:
        pass
"""
SCRIPTS = {  # what a script does in the end: the status that is noticed
    "sys.exit(3)": "3",
    "leave('no data')": "'no data'",
    "exit(4)": "4",
    "quit(True)": "True",
    "with open('/dev/null'):\n    leave(5)": "5",
    "if True:\n    import argparse\n    argparse.ArgumentParser().error('bad')": "2",
    "print('the last line')": "None",
    "sys.exit(0)": "None",
    "sys.exit()": "None",
    "leave_caught(3)": "None",
    "leave_caught(3)\nsys.exit(0)": "None",
    "leave_caught(3)\ntry:\n    leave(4)\nexcept SystemExit:\n    pass": "None",
    "thread = threading.Thread(target=sys.exit, args=(3,))\nthread.start()\nthread.join()": "None",
    "exits.restore()\nsys.exit(3)": "None",
}


@pytest.mark.real
@pytest.mark.parametrize("end", SCRIPTS, ids=lambda end: end.splitlines()[-1].strip())
def test_a_script_that_ends_with_an_error_is_told_from_one_that_caught_it(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(BEGIN + end + "\n")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert f"status {SCRIPTS[end]}\n" in ran.stdout, ran.stderr


def test_hooks_are_removed_and_those_of_others_stay():
    before = sys.excepthook, sys.exit, builtins.exit, builtins.quit
    first, second = ScriptExits(lambda error: False), ScriptExits(lambda error: False)
    first.watch()
    second.watch()
    second.restore()
    first.restore()
    assert (sys.excepthook, sys.exit, builtins.exit, builtins.quit) == before

    first.watch()
    of_the_script = sys.excepthook = lambda *error: None
    try:
        first.restore()
        assert sys.excepthook is of_the_script and sys.exit is before[1]
    finally:
        sys.excepthook = before[0]


def test_a_frame_has_returned_or_was_left_by_an_exception():
    frames = []

    def ended(by_error: bool) -> None:
        frames.append(sys._getframe())
        if by_error:
            raise ValueError("bad")

    ended(False)
    with pytest.raises(ValueError, match="bad"):
        ended(True)
    assert [has_returned(frame) for frame in frames] == [True, False]
    assert not has_returned(sys._getframe())


@pytest.mark.real
def test_what_an_earlier_hook_prints_under_torchs_own_is_seen():
    """`init_process_group` installs a hook that calls the one before it with a buffer as stderr."""
    program = """
import os, sys, torch.distributed as dist
from trl_multinode.run.watch.exits import ScriptExits
ScriptExits(lambda error: (print("the cause", file=sys.stderr), os._exit(6))).watch()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
raise ValueError("bad")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 6 and "the cause" in ran.stderr
