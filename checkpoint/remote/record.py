"""What of a directory is known to have been uploaded, so that nothing else is pruned: `.lastwords-uploaded.json`.

A fallback directory has a copy, which also says what is in the store of the checkpoints of the other.
Written by whoever uploads, read by whoever prunes. What cannot be read says that nothing has been uploaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lastwords.checkpoint import layout
from lastwords.checkpoint.appearing import write_file
from lastwords.checkpoint.codec import typed
from lastwords.checkpoint.document import decode_document, encode_document, read_document, told
from lastwords.checkpoint.manifest import Claimed
from lastwords.checkpoint.remote.address import name_of
from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.checkpoint.versions import UPLOADED_FORMAT
from lastwords.errors import ConfigError, FormatError, StorageError

logger = logging.getLogger(__name__)

FILE_NAME = ".lastwords-uploaded.json"
_REMEDY = "remove it; it is written again"


@dataclass(frozen=True, slots=True)
class Record:
    """url: the store. names: which checkpoints have arrived there, by their names in it."""

    url: str = ""
    names: frozenset[str] = frozenset()

    def encode(self) -> bytes:
        content = {"format_version": UPLOADED_FORMAT, "url": self.url, "names": sorted(self.names)}
        return encode_document(content)

    @staticmethod
    def decode(raw: bytes, where: Path) -> Record:
        """FormatError.

        >>> Record.decode(Record("s3://b/c", frozenset("x")).encode(), Path("f")).url
        's3://b/c'
        """
        content = decode_document(raw, where=where, version_max=UPLOADED_FORMAT, remedy=_REMEDY)
        with told(where, _REMEDY):  # a file has to say what has a default here
            return typed({"url": None, "names": None, **content}, Record, "")


def read(root: Path, os: Os = REAL_OS) -> Record | None:
    """None if nobody uploads from this directory."""
    path = root / FILE_NAME
    try:
        return Record.decode(read_document(path, os), path)
    except FileNotFoundError:
        return None
    except (FormatError, StorageError) as error:
        logger.warning("%s", error)
        return Record()


def refuse_checkpoint(root: Path, os: Os = REAL_OS) -> None:
    """ConfigError if it is a checkpoint, in which a record is a foreign file."""
    if layout.CheckpointName.parse(root.name) is not None or os.exists(root / layout.MANIFEST_NAME):
        raise ConfigError(f"{root} is a checkpoint; give the directory that holds it: {root.absolute().parent}")


def write(root: Path, record: Record, os: Os = REAL_OS) -> None:
    """Durable on return. StorageError."""
    write_file(root / FILE_NAME, record.encode(), os, replace=True)


def begin(roots: Sequence[Path], url: str, os: Os = REAL_OS) -> None:
    """For whoever starts an uploader: from now on nothing goes here before it has gone there.

    The uploader would do the same in a moment, or never, where no library knows the URL. StorageError.
    """
    for root in roots:
        if os.leads_to_directory(root):
            known = read(root, os)
            if known is None or known.url not in ("", url):
                write(root, Record(url), os)


def name_here(directory: Path, os: Os = REAL_OS) -> str:
    """The name that this checkpoint has in a store; "" if it cannot be read, and so not be uploaded either."""
    try:
        raw = read_document(directory / layout.MANIFEST_NAME, os)
    except (FileNotFoundError, FormatError, StorageError):
        return ""
    return name_of(Claimed.if_readable(directory, os).global_step, raw)


def not_uploaded(root: Path, url: str = "", os: Os = REAL_OS) -> Callable[[Path], bool]:
    """Whether a checkpoint still has to go to the store. url: which one; "": the one that the record in `root` names.

    Without either, nothing has to go anywhere.
    """
    known = read(root, os)
    if known is None and not url:
        return lambda _: False
    names = known.names if known is not None and url in ("", known.url) else frozenset()
    return lambda path: name_here(path, os) not in names
