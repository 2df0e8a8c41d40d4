"""Standard streams that the caller has closed, as some services and `>&-` do.

The next file that is opened would get the number of one of them: a pipe of ours would be a child's output, and what a
library prints would go into a socket.
"""

from __future__ import annotations

import os
import sys

_MODES = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_missing() -> None:
    """Open /dev/null for each that is closed, here and in the children to come. Before anything else is opened."""
    for fd, (name, mode) in enumerate(_MODES):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
