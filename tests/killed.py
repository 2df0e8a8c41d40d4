"""A process that is killed in front of each of its system calls in turn, for files that are written without an `Os`."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

CALLS = ("open", "write", "replace", "rename", "unlink", "close", "fsync", "utime")
"""Of the module `os`; pathlib takes them from there, too."""

PIECE_BYTES = 500
"""A kill may leave a write half done: no call writes more than this."""


def at_each_call(act: Callable[[], object], calls_max: int = 200) -> Iterator[int]:
    """After each kill its number; the last time `act` has come to its end."""
    for fatal in range(1, calls_max):
        code = _in_a_child(act, fatal)
        assert code in (0, -signal.SIGKILL), f"it ended with {code} instead of being killed"
        yield fatal
        if code == 0:
            return
    raise AssertionError(f"it makes more than {calls_max} calls")


def _in_a_child(act: Callable[[], object], fatal: int) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the child touches none of their locks
        child = os.fork()
    if child == 0:
        try:
            _armed(act, fatal)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _armed(act: Callable[[], object], fatal: int) -> None:
    seen = 0

    def armed(name: str) -> Callable[..., Any]:
        shipped = getattr(os, name)

        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "write":
                arguments = (arguments[0], arguments[1][:PIECE_BYTES])
            return shipped(*arguments, **named)

        return call

    with mock.patch.multiple(os, **{name: armed(name) for name in CALLS}):
        act()
