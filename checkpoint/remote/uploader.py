"""Uploads the checkpoints of a directory, and goes on as new ones are published: in a process of its own.

A store that refuses is asked again after growing pauses; it is said once that it refuses, and once that it takes
uploads again. Nobody waits for the uploader.
"""

from __future__ import annotations

import logging
import os as posix
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lastwords import clock
from lastwords.checkpoint import layout, load
from lastwords.checkpoint.appearing import refuse_checkpoint, write_file
from lastwords.checkpoint.codec import typed
from lastwords.checkpoint.document import decode_document, encode_document, read_document, told
from lastwords.checkpoint.lock_file import LockFile
from lastwords.checkpoint.manifest import Claimed, read_manifest
from lastwords.checkpoint.meta import UPLOADED_FORMAT
from lastwords.checkpoint.remote.store import OnBytes, RemotePath, Store, name_of
from lastwords.checkpoint.remote.transfer import upload
from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.errors import BusyError, CheckpointError, FormatError, ReplacedError, StorageError

# What of a directory is known to have been uploaded, so that nothing else is pruned: `.lastwords-uploaded.json`.
#
# A fallback directory has a copy, which also says what is in the store of the checkpoints of the other. Written by
# whoever uploads, read by whoever prunes. What cannot be read says that nothing has been uploaded.

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


LOCK_NAME = ".lastwords-upload.lock"
PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""After a refusal; then the last one again and again."""

LOOK_S = 60.0
"""A directory is looked at so often where nobody says that there is a new checkpoint."""

LAST_TRIES_S = 300.0
"""A store that has refused for so long, once nothing new will come, is given up."""

SAID_EVERY_S = 10.0
"""Progress of a long upload."""


@dataclass(frozen=True, slots=True)
class Local:
    """A complete checkpoint here. name: as it is, or will be, called in the store."""

    path: Path
    name: str
    said: Claimed


def complete_in(roots: Sequence[Path], os: Os = REAL_OS) -> list[Local]:
    """The complete checkpoints, newest first. StorageError where a directory cannot be listed."""
    found: dict[Path, Claimed] = {}
    for path in load.candidates(roots, os):
        seen, said = load.glance_or_examine(path, os, every_file=True)
        if said is not None and seen.status is load.DirectoryStatus.COMPLETE:
            found[path] = said
    named = [Local(path, name_here(path, os), found[path]) for path in load.newest_first(found)]
    return [one for one in named if one.name]


OnProgress = Callable[[str, int, int | None], None]


class Uploader:
    """Uploads what is missing from one store.

    roots: the record in the first one says what has been uploaded; the others have a copy. on_progress: takes the name
    of a checkpoint, bytes that were sent, and bytes in all.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        to: RemotePath,
        job: str | None,
        os: Os = REAL_OS,
        store: Store | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._on_progress = on_progress
        self._roots = roots
        self._to = to
        self._job = job
        self._os = os
        self._store = store
        self._left: set[str] = set()
        self._unwritten: StorageError | None = None

    def upload_missing(self, *, again: bool = False, verify: bool = False) -> list[Local]:
        """Uploads every checkpoint that is not there; returns those, the newest first.

        again: also what the record says is there, if it is not. verify: see `upload`.

        One that is damaged here, or removed meanwhile, is left out, with a line in the log. StorageError if the store,
        or the file system here, refuses; then what was uploaded before stays. A record that cannot be written (a full
        disk) is no obstacle: the error comes at the end, and the next call, which finds everything in the store, writes
        it. BusyError if another process uploads from this directory. ConfigError if a directory, or the
        one in the store, is a checkpoint or lies in one.
        """
        for root in (*self._roots, Path("/", *self._to.parts[1:])):  # what a store has is seen by its name
            refuse_checkpoint(root, self._os)
        with LockFile(self._roots[0] / LOCK_NAME, self._os).held() as mine:
            if not mine:
                raise BusyError(f"another process uploads the checkpoints in {self._roots[0]}")
            return self._upload_missing(again, verify)

    def _upload_missing(self, again: bool, verify: bool) -> list[Local]:
        if self._store is None:
            self._store = Store(self._to)
        known = read(self._roots[0], self._os)
        if known is None or known.url != str(self._to):
            known = Record(str(self._to))
        self._note(known)
        here = complete_in(self._roots, self._os)
        known = replace(known, names=known.names & {one.name for one in here})
        uploaded = []
        done = frozenset() if again else known.names
        for one in here:  # the newest first, since that is what a lost disk would need
            wanted = self._job in (None, one.said.job) and one.name not in done | self._left
            if wanted and self._uploaded(one, verify):
                uploaded.append(one)
                known = replace(known, names=known.names | {one.name})
                self._note(known)
        if self._unwritten is not None:
            raise self._unwritten
        return uploaded

    def _note(self, known: Record) -> None:
        """In every directory that there is, since each may be pruned by itself."""
        self._unwritten = None
        for root in self._roots:
            if root != self._roots[0] and not self._os.leads_to_directory(root):
                continue
            try:
                if read(root, self._os) != known:
                    write(root, known, self._os)
            except StorageError as error:
                self._unwritten = error

    def _uploaded(self, one: Local, verify: bool) -> bool:
        assert self._store is not None
        began_mono_s = clock.mono_s()
        try:
            there = upload(one.path, self._store, self._on_bytes(one), self._os, verify=verify)
        except StorageError:
            raise
        except (BusyError, ReplacedError) as error:
            logger.info("%s", error)
            return False
        except CheckpointError as error:
            self._left.add(one.name)
            logger.warning("%s", error)
            return False
        logger.info("uploaded %s to %s in %.1f s", one.path, there, clock.mono_s() - began_mono_s)
        return True

    def _on_bytes(self, one: Local) -> OnBytes:
        if self._on_progress is None:
            return _progress_of(one)
        on_progress, sent = self._on_progress, 0
        total = read_manifest(one.path, self._os).total_bytes

        def on_bytes(count: int) -> None:
            nonlocal sent
            sent += count
            on_progress(one.name, sent, total)

        return on_bytes


def _progress_of(one: Local) -> OnBytes:
    sent = 0
    said_mono_s = clock.mono_s()

    def on_bytes(count: int) -> None:
        nonlocal sent, said_mono_s
        sent += count
        if clock.mono_s() - said_mono_s >= SAID_EVERY_S:
            said_mono_s = clock.mono_s()
            logger.info("uploading %s: %.1f MiB", one.path, sent / 2**20)

    return on_bytes


Wait = Callable[[float], bool]
"""Waits for so many seconds, or until there may be something new; False once nothing new will come."""


def follow(missing: Callable[[], object], wait: Wait) -> bool:
    """Uploads (`missing`) again and again until `wait` says that nothing new comes; whether all that is there went.

    What the store refuses is tried until then, and LAST_TRIES_S longer.
    """
    refused, tries = "", 0
    comes = True
    ends_mono_s = 0.0
    while True:
        last = not comes
        try:
            missing()
        except BusyError as error:  # the uploader of the controller before is about to end
            tries, refused = 1, refused or str(error)
            logger.info("%s", error)
        except CheckpointError as error:
            if not refused:
                logger.warning("%s. It is tried again; training is not affected", error)
            refused, tries = str(error), tries + 1
        else:
            if refused:
                logger.info("uploads work again")
            refused, tries = "", 0
        if last and not refused:
            return True
        if last and clock.mono_s() >= ends_mono_s:
            logger.error("not everything was uploaded: %s", refused)
            return False
        comes_before = comes
        comes = wait(PAUSES_S[min(tries, len(PAUSES_S)) - 1] if refused else LOOK_S)
        if comes_before and not comes:
            ends_mono_s = clock.mono_s() + LAST_TRIES_S


def wait_on(fd: int) -> Wait:
    """Of a descriptor: a line means that there is something new, its end that nothing new comes."""
    ended = False

    def wait(seconds: float) -> bool:
        nonlocal ended
        if ended:
            REAL_OS.pause(seconds)
        elif select.select([fd], [], [], seconds)[0]:
            ended = not posix.read(fd, 65536)
        return not ended

    return wait
