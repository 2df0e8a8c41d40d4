"""Telling a rank's own failure from the echo of somebody else's, and holding a rank whose exception escaped."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator

import torch.distributed as dist

from lastwords.errors import named

_BACKEND = re.compile(r"\bgloo\b|\bNCCL|\bucc\b|\bmpi\b|ProcessGroup|TCPStore|recvValue|sendBytes")
"""What torch's backends call themselves in the RuntimeErrors that they raise, mostly in the path of a source file."""


_LOADER = re.compile(r"DataLoader worker \(pid.*\) (exited unexpectedly|is killed by signal)")


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def is_collective_error(error: BaseException) -> bool:
    """Whether an exception looks like the echo of a peer's death: it came out of a collective.

    torch raises a plain RuntimeError for most failures of gloo, also out of autograd's engine, where no frame tells:
    there the words decide, but only those of a backend. Words that any socket says ("Connection reset", "timed out")
    prove nothing: a user's own client says them too.

    >>> is_collective_error(RuntimeError("[gloo/transport/tcp/pair.cc:545] Connection closed by peer"))
    True
    >>> is_collective_error(ConnectionResetError(104, "Connection reset by peer"))
    False
    """
    return any(
        isinstance(link, dist.DistError)
        or (type(link) is RuntimeError and _BACKEND.search(str(link)) is not None)
        or (isinstance(link, ConnectionError | TimeoutError) and _raised_by_torch_distributed(link))
        for link in _chain(error)
    )


def is_loader_error(error: BaseException) -> bool:
    """Whether a worker of torch's DataLoader has ended; a signal for the whole process group ends them, too.

    >>> is_loader_error(RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"))
    True
    """
    return any(type(link) is RuntimeError and _LOADER.match(str(link)) is not None for link in _chain(error))


def _raised_by_torch_distributed(error: BaseException) -> bool:
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return innermost is not None and innermost.tb_frame.f_globals.get("__name__", "").startswith("torch.distributed")


def one_line(error: BaseException, chars_max: int = 300) -> str:
    """Type and message of an exception on one line, for reports to other ranks.

    >>> one_line(ValueError("a\\nb")), one_line(MemoryError())
    ('ValueError: a b', 'MemoryError')
    """
    text = " ".join(named(error).split())
    return text if len(text) <= chars_max else text[: chars_max - 3] + "..."


def exit_code_of(error: BaseException) -> int:
    """What Python makes the exit code of a process that ends with this exception.

    >>> exit_code_of(ValueError("x")), exit_code_of(SystemExit(3)), exit_code_of(SystemExit("no such file"))
    (1, 3, 1)
    >>> exit_code_of(SystemExit(-1)), exit_code_of(SystemExit(256))
    (255, 0)
    """
    if not isinstance(error, SystemExit):
        return 1
    # The system keeps eight bits of it.
    return 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1


class ExceptHook:
    """`sys.excepthook` that calls `fail` first, for scripts that do not use `with`."""

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self._fail = fail
        self._previous: Callable[..., object] | None = None

    def install(self) -> None:
        """Put the hook in front of the one that is there."""
        self._previous = sys.excepthook
        sys.excepthook = self

    def uninstall(self) -> None:
        """Take the hook out again, unless somebody has put another one on top."""
        if sys.excepthook is self and self._previous is not None:
            sys.excepthook = self._previous

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        previous = self._previous or sys.__excepthook__
        try:
            self._fail(error)
        finally:
            previous(kind, error, traceback)
