"""A process without pidfds: a seccomp filter as some containers have it, which its children inherit."""

import ctypes
import errno
import os

PIDFD_OPEN, PIDFD_SEND_SIGNAL = 434, 424  # on every architecture
NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


class Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("jt", ctypes.c_ubyte),
        ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    ]


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]


def forbid_pidfds() -> None:
    """Let `pidfd_open` and `pidfd_send_signal` fail in this thread and in what it starts."""
    steps = [
        (LOAD, 0, 0, 0),
        (JUMP_IF_EQUAL, 1, 0, PIDFD_OPEN),
        (JUMP_IF_EQUAL, 0, 1, PIDFD_SEND_SIGNAL),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
    program = Program(
        len(steps), (Instruction * len(steps))(*(Instruction(*step) for step in steps))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(
        SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "this kernel has no seccomp filters")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except PermissionError:
        return
    raise AssertionError("the filter has no effect")
