"""A new directory that appears whole or not at all, and a source that is read only if it is sound. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from lastwords.checkpoint.load import Checkpoint, verify
from lastwords.checkpoint.partfile import check_unchanged
from lastwords.checkpoint.system import (
    REAL_OS,
    Os,
    make_directories,
    make_directory,
    remove_tree,
    storage_errors,
    sync_directory,
)
from lastwords.errors import ConfigError, FormatError, StorageError


def refuse_existing(out: Path, os: Os = REAL_OS) -> None:
    """ConfigError if there is anything at `out`."""
    if os.exists(out):
        raise ConfigError(f"{out} exists already and is left as it is; name a new directory, or remove it first")


@contextlib.contextmanager
def building(out: Path, os: Os = REAL_OS) -> Iterator[Path]:
    """A hidden directory beside `out` to write into; renamed to `out` at the end, removed if anything goes wrong.

    ConfigError if `out` exists, or if another process has been writing it (or died while it was).
    """
    refuse_existing(out, os)
    hidden = out.parent / f".tmp-{out.name}"
    if os.exists(hidden):
        raise ConfigError(
            f"{hidden} exists: another process is writing {out}, or was killed while it was; if none is, remove it"
        )
    make_directories(out.parent, os)
    make_directory(hidden, os)
    try:
        yield hidden
        sync_directory(hidden, os)
        refuse_existing(out, os)
        with storage_errors("writing", out):
            os.rename(hidden, out)
    except BaseException:
        with contextlib.suppress(StorageError):
            remove_tree(hidden, os)
        raise
    sync_directory(out.parent, os)


def check_source(checkpoint: Checkpoint, os: Os = REAL_OS) -> None:
    """FormatError or StorageError for the first byte of a checkpoint that is not as its checksums say."""
    problems = verify(checkpoint.path, deep=True, os=os)
    if problems:
        raise FormatError(problems[0].text)


def check_same(checkpoint: Checkpoint, os: Os = REAL_OS) -> None:
    """FormatError if a file has been replaced since the checkpoint was opened."""
    for entry in checkpoint.manifest.files:
        check_unchanged(checkpoint.path, entry, os)
