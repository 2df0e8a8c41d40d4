"""Real shortages, of this process: nothing more of a kind can be had inside."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator

TOO_LARGE = 1 << 46
"""A stack of 64 TiB fits into no address space, so pthread_create fails as it does at the limit of processes."""


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """Python can start no thread inside."""
    before = threading.stack_size(TOO_LARGE)
    try:
        yield
    finally:
        threading.stack_size(before)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """No file can be opened inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
