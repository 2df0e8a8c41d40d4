"""A new file or directory that appears whole or not at all, whoever else makes the same one. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from lastwords.checkpoint.lock_file import alone
from lastwords.checkpoint.rank_transform import refuse_existing
from lastwords.checkpoint.system import (
    REAL_OS,
    Os,
    make_directories,
    make_directory,
    remove_tree,
    storage_errors,
    sync_directory,
)
from lastwords.errors import StorageError

__all__ = ["building", "refuse_existing"]


@contextlib.contextmanager
def building(out: Path, os: Os = REAL_OS) -> Iterator[Path]:
    """A hidden directory beside `out` to write into; renamed to `out` at the end, removed if anything goes wrong.

    What a killed process has left there is removed first. ConfigError if `out` exists, BusyError if another process is
    writing it.
    """
    refuse_existing(out, os)
    hidden = out.parent / f".tmp-{out.name}"
    make_directories(out.parent, os)
    with alone(out.parent / f"{hidden.name}.lock", out, os):
        refuse_existing(out, os)
        remove_tree(hidden, os)
        make_directory(hidden, os)
        try:
            yield hidden
            sync_directory(hidden, os)
            with storage_errors("writing", out):
                os.rename(hidden, out)
        except BaseException:
            with contextlib.suppress(StorageError):
                remove_tree(hidden, os)
            raise
        sync_directory(out.parent, os)
