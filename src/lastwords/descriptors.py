"""File descriptors: as many as the system allows, and whether there are enough for gRPC.

gRPC begins with the first channel of a process, ends with the last one, and begins anew with the next. If there is no
descriptor for one of those that it opens then, it aborts the process. So whoever makes the first channel looks
beforehand.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource

from lastwords.errors import UnavailableError

_log = logging.getLogger(__name__)

GRPC_TAKES = 5
"""Four to begin with (an epoll and three eventfds, gRPC 1.85), and the socket of a connection."""


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


def look_for_grpc() -> None:
    """Right before a channel is made, with which gRPC may begin. UnavailableError if there are not enough for that."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        while len(found) < GRPC_TAKES:
            found.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    for one in found:
        os.close(one)
    if len(found) < GRPC_TAKES:
        raise UnavailableError(
            f"{len(found)} more files can be opened, and gRPC needs {GRPC_TAKES}: raise the limit (ulimit -n), or "
            "close some"
        ) from OSError(errno.EMFILE, os.strerror(errno.EMFILE))
