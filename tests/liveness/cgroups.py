"""A memory cgroup with a limit, below that of the test itself; a skip, with its reason, where none can be had.

What is put into it counts against the limits of the test's own cgroup, too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastwords.liveness.endings import OomCounts


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """Its folder; empty again at the end."""
    where = OomCounts.around(os.getpid()).cgroup
    if where is None:
        pytest.skip("the memory cgroup of this process has no counter")
    folder = where.parent / f"lastwords-test-{os.getpid()}"
    limit = "memory.max" if where.name == "memory.events" else "memory.limit_in_bytes"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        try:
            (folder / limit).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"the memory of a cgroup cannot be limited here: {error}")
        yield folder
    finally:
        folder.rmdir()


def put(pid: int, folder: Path) -> None:
    """A process, and what it takes from now on, belongs there."""
    (folder / "cgroup.procs").write_text(str(pid))
