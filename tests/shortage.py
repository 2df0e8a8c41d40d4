"""Real shortages, of this process: nothing more of a kind can be had inside. And what it has open."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import threading
from collections.abc import Iterator

TOO_LARGE = 1 << 47
"""A stack of 128 TiB fits into no address space, so pthread_create fails as it does at the limit of processes."""


def open_files() -> set[tuple[str, str]]:
    """Descriptors with what they lead to. A test that leaves none open has no more (`<=`) after it than before: what
    earlier tests in the process have forgotten is closed at any time."""
    gc.collect()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the directory itself
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


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
    """All are taken inside; one that is given back can be had again."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def no_file_at_all() -> Iterator[None]:
    """No descriptor can be had inside, whatever is given back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
