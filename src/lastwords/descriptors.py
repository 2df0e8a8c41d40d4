"""File descriptors: as many as the system allows, and some in reserve for gRPC.

gRPC begins with the first channel of a process, ends with the last one, and begins anew with the next. If there is no
descriptor for one of those that it opens then, it aborts the process. So whoever makes the first channel looks
beforehand; and where sessions follow each other in one process, descriptors are kept for the next one meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import threading
from collections.abc import Iterator

from lastwords.errors import UnavailableError

_log = logging.getLogger(__name__)

GRPC_TAKES = 5
"""Four to begin with (an epoll and three eventfds, gRPC 1.85), and the socket of a connection."""

KEPT = 2 * GRPC_TAKES
"""While gRPC runs on half of them, the others are there for its next beginning."""

_kept: list[int] = []
_lock = threading.Lock()


def allow(count: int, needed_by: str) -> None:
    """Raise this process's soft limit to the hard one if it may not open `count` files; said if it may not then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if resource.RLIM_INFINITY != hard < count:
            _log.warning(
                "this process may open %d files: too few for %s, which need %d; raise the hard limit (ulimit -Hn) "
                "where it is started",
                hard,
                needed_by,
                count,
            )


def keep() -> None:
    """Keep `KEPT` descriptors, or as many of them as there are."""
    with _lock:
        _fill()


def give_back() -> None:
    """Keep none any more."""
    with _lock:
        _empty()


@contextlib.contextmanager
def room_for_grpc() -> Iterator[None]:
    """Around the making of a channel, with which gRPC may begin. UnavailableError if there are not enough for that."""
    with _lock:
        keeps = bool(_kept)
        _fill()
        found = len(_kept)
        _empty()
    if found < GRPC_TAKES:
        if keeps:
            keep()
        raise UnavailableError(
            f"{found} more files can be opened, and gRPC needs {GRPC_TAKES}: raise the limit (ulimit -n), or close some"
        ) from OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    try:
        yield
    finally:
        if keeps:
            keep()


def _fill() -> None:
    with contextlib.suppress(OSError):
        while len(_kept) < KEPT:
            _kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _empty() -> None:
    while _kept:
        os.close(_kept.pop())


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that is not here may have held the other one


os.register_at_fork(after_in_child=_in_child)
