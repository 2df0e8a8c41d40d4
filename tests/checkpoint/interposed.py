"""An `Os` that asks a hook before each system call: to count, crash or fail it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lastwords.checkpoint.system import REAL_OS, Os

CALLS = tuple(name for name in vars(Os) if not name.startswith("_"))
"""Names of all system calls."""


class Crash(BaseException):
    """The process died here. A BaseException, so that nothing that tidies up after errors runs in its way."""


class InterposedOs(Os):
    """Calls `before(number, name, args)` and then the inner Os; numbers start at 1 and are unique across threads."""

    def __init__(self, before: Callable[[int, str, tuple[Any, ...]], None], inner: Os = REAL_OS) -> None:
        self._before = before
        self._inner = inner
        self._lock = threading.Lock()
        self.count = 0
        self.open_fds: set[int] = set()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self.count += 1
            self._before(self.count, name, args)
        result = getattr(self._inner, name)(*args, **kwargs)
        if name in ("create", "open_read", "open_lock", "open_directory"):
            self.open_fds.add(result)
        if name == "close":
            self.open_fds.discard(args[0])
        return result

    def close_leaked(self) -> None:
        """What the kernel does for a process that died."""
        for fd in sorted(self.open_fds):
            self._inner.close(fd)
        self.open_fds.clear()


def _interposed(name: str) -> Callable[..., Any]:
    def call(self: InterposedOs, *args: Any, **kwargs: Any) -> Any:
        return self._call(name, *args, **kwargs)

    return call


for _name in CALLS:
    setattr(InterposedOs, _name, _interposed(_name))


def counting() -> Callable[[int, str, tuple[Any, ...]], None]:
    """A hook that lets everything pass."""
    return lambda number, name, args: None


def crashing_at(fatal: int) -> Callable[[int, str, tuple[Any, ...]], None]:
    """A hook that ends the process at call `fatal`: that call and every later one does nothing."""

    def before(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number >= fatal:
            raise Crash(f"call {number}: {name}{args}")

    return before


def failing(error: OSError, only: str, at: int = 1) -> Callable[[int, str, tuple[Any, ...]], None]:
    """A hook that fails the `at`-th call of this name, once."""
    seen = 0

    def before(number: int, name: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if name == only:
            seen += 1
            if seen == at:
                raise error

    return before
