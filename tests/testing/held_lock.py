"""Forks while another thread holds the lock of the C library's resolver: `unshare --mount python held_lock.py FIFO`.

The thread holds the lock because it waits for the content of /etc/resolv.conf, which is a named pipe here.
"""

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

from trl_multinode.testing import thread_safe_fork

CONFIG = "/etc/resolv.conf"
forks = 0


def look_up() -> None:
    """Look up a name as torch does; Python's `getnameinfo` would not let other threads run."""
    address = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton("127.0.0.1"))
    name = ctypes.create_string_buffer(256)
    ctypes.CDLL(None).getnameinfo(address, len(address), name, len(name), None, 0, 0)


def opened_for_writing(pipe: str, reader: threading.Thread) -> int:
    """Open the pipe once the reader has opened it, which then waits for its content."""
    while reader.is_alive():
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            time.sleep(0.01)
    sys.exit("the lookup read no configuration")


def ends_itself() -> None:
    signal.alarm(600)
    socket.gethostbyname_ex("127.0.0.1")
    os._exit(3)


def main(pipe: str) -> None:
    subprocess.run(["mount", "--bind", pipe, CONFIG], check=True)
    thread = threading.Thread(target=look_up)
    thread.start()
    hold = opened_for_writing(pipe, thread)
    real = os.fork

    def fork() -> int:
        global forks
        forks += 1
        if forks == 2:  # the thread releases the lock
            subprocess.run(["umount", "--lazy", CONFIG], check=True)
            os.close(hold)  # the first fork, which has it too, has ended
            thread.join()
        return real()

    os.fork = fork
    thread_safe_fork.LOOKUP_LIMIT_S = 1
    _, status = os.waitpid(thread_safe_fork.fork_without_held_locks(ends_itself), 0)
    print(f"forks: {forks}, exit code: {os.waitstatus_to_exitcode(status)}")


main(sys.argv[1])
