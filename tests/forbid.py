"""`python -m tests.forbid NAME=ERROR[,...] COMMAND...`: a command in whose processes some system calls fail.

As under a container's seccomp profile, or on a kernel that does not have them. See seccomp(2) and bpf(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

X86_64, AARCH64 = {"pidfd_open": 434, "process_vm_readv": 310}, {"pidfd_open": 434, "process_vm_readv": 270}
NUMBERS = X86_64 if platform.machine() == "x86_64" else AARCH64
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, FILTER_MODE = 22, 38, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ERRNO, ALLOW = 0x00050000, 0x7FFF0000


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def main() -> None:
    code = [(LOAD, 0, 0, 0)]  # the number of the call
    for rule in sys.argv[1].split(","):
        name, _, error = rule.partition("=")
        code += [(EQUAL, 0, 1, NUMBERS[name]), (RETURN, 0, 0, ERRNO | getattr(errno, error))]
    code.append((RETURN, 0, 0, ALLOW))
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    program = Program(len(code), ctypes.addressof(instructions))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, FILTER_MODE, ctypes.byref(program))):
        if prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
