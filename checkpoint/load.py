"""Finding checkpoints and reading them back, every byte checked against its checksum on the way."""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from lastwords.checkpoint import layout
from lastwords.checkpoint.boxes import Shard, Slice, whole
from lastwords.checkpoint.direct_io import Bytes
from lastwords.checkpoint.entries import Entry, FileEntry, UnitEntry
from lastwords.checkpoint.format import Header, TensorSpec
from lastwords.checkpoint.lock_file import ReaderLock
from lastwords.checkpoint.manifest import Claimed, Manifest, check_name, glance, read_published
from lastwords.checkpoint.part import check_header, check_sizes
from lastwords.checkpoint.slice_reader import SliceReader, StoredTensor, Target, read_file
from lastwords.checkpoint.system import (
    NO_FILE,
    REAL_OS,
    Os,
    close,
    patiently,
    storage_error,
    storage_errors,
    where_it_leads,
)
from lastwords.errors import (
    CheckpointError,
    FormatError,
    IncompleteError,
    MismatchError,
    NewerFormatError,
    ReplacedError,
    StorageError,
)


def check_file(directory: Path, manifest: Manifest, entry: FileEntry, os: Os) -> Header:
    """Header of a file, held against the manifest. Errors as of `check_header`."""
    return check_header(
        directory,
        entry,
        manifest.tensors_of(entry),
        rank=layout.PartPath.parse(entry.path, where=str(directory)).rank,
        global_step=manifest.global_step,
        os=os,
    )


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A file whose size and header have been checked: its chunks' sums, and where its tensors begin in it."""

    entry: FileEntry
    places: dict[str, tuple[TensorSpec, int]]


logger = logging.getLogger(__name__)

LISTINGS_MAX = 20
"""How often directories are listed again since what was found in them has gone: each time something was pruned."""


class DirectoryStatus(enum.Enum):
    """What a scan says of a directory."""

    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    NEWER = "of a newer format"


@dataclass(frozen=True, slots=True)
class Found:
    """A directory with a checkpoint's name. `manifest` is None where it could not be read; `why` is "" if complete.

    errno: of what the system refused, if it is unreadable.
    """

    path: Path
    status: DirectoryStatus
    why: str
    manifest: Manifest | None
    errno: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a checkpoint: the file's path relative to its directory, and what to know about it."""

    file: str
    text: str


Tensors = dict[str, tuple[TensorSpec, Bytes]]
"""Tensor name -> its spec and its bytes (uint8, C order, little-endian)."""


def scan(root: Path, os: Os = REAL_OS, *, job: str | None = None) -> list[Found]:
    """Every directory in `root` that has a checkpoint's name, newest first; those without a manifest come last.

    Checked are manifest, presence, sizes and, unless the checkpoint is large, headers; `verify` checks the rest. A
    missing `root` is empty, and so is what has just been removed. With `job`, only checkpoints of that job (a directory
    whose manifest cannot be read belongs to none).
    """
    found = [examine(path, os) for path in candidates([root], os)]
    found = [item for item in found if item.status is not DirectoryStatus.INCOMPLETE or os.exists(item.path)]
    if job is not None:
        found = [item for item in found if item.manifest is not None and item.manifest.job == job]
    return sorted(found, key=lambda item: item.manifest is None)


def latest(root: Path, job: str | None = None, os: Os = REAL_OS) -> Path | None:
    """Newest complete checkpoint in `root` (of `job`, if given); None if there is none.

    Newer ones that are damaged are skipped with a warning, never those that could not be read, or are of a newer
    format: see `newest`, and `newest_first` for what newest means. Of a large checkpoint no more is looked at than
    `glance` does.
    """
    return newest([root], None if job is None else (job,), os)


def newest(
    roots: Sequence[Path],
    jobs: Collection[str] | None = None,
    os: Os = REAL_OS,
    *,
    every_file: bool = False,
    passed_over: Collection[Path] = (),
) -> Path | None:
    """As `latest`, in several directories at once, of any of `jobs`, none of `passed_over`. every_file: see `glance`.

    What a file system does not let it read may be the newest. It is asked again (system.PAUSES_S); then
    StorageError names it: to take an older one would throw work away. So it would where one is of a newer format:
    NewerFormatError.
    """
    return patiently(lambda: _newest(roots, jobs, os, every_file, passed_over), os)


def _newest(
    roots: Iterable[Path], jobs: Collection[str] | None, os: Os, every_file: bool, passed_over: Collection[Path]
) -> Path | None:
    roots = [*roots]
    for _ in range(LISTINGS_MAX):
        paths = candidates(roots, os, Claimed.read)
        found = _first_complete([path for path in paths if path not in passed_over], jobs, os, every_file)
        if found is not None or {*paths} <= {*candidates(roots, os)}:
            return found
    raise StorageError(f"checkpoints vanish from {', '.join(map(str, roots))} as fast as they are looked at: try again")


def _first_complete(paths: list[Path], jobs: Collection[str] | None, os: Os, every_file: bool) -> Path | None:
    for place, path in enumerate(paths):
        found, claimed = glance_or_examine(path, os, every_file)
        said = Claimed.if_readable(path, os) if found.status is DirectoryStatus.NEWER else claimed
        wanted = said is None or jobs is None or said.job in (*jobs, "")
        unjudged = f"{found.why}. {path} may be the newest checkpoint, so no older one is used instead"
        if wanted and found.status is DirectoryStatus.UNREADABLE:
            raise StorageError(f"{unjudged}: repair it, or move it elsewhere", errno=found.errno)
        if wanted and found.status is DirectoryStatus.NEWER:
            raise NewerFormatError(f"{unjudged}; to do without it, move it elsewhere")
        if claimed is not None and found.status is DirectoryStatus.COMPLETE and wanted:
            _name_silent(paths[place + 1 :], claimed.global_step, os)
            return path
        if wanted:
            logger.warning("%s is skipped: %s", path, found.why)
    return None


def glance_or_examine(path: Path, os: Os, every_file: bool = False) -> tuple[Found, Claimed | None]:
    """As `examine`, with what the manifest says of itself; of a large checkpoint only what `glance` looks at."""
    try:
        claimed = glance(path, os, every_file=every_file)
        if claimed is not None:
            return Found(path, DirectoryStatus.COMPLETE, "", None), claimed
    except CheckpointError as error:
        return _refused(path, error, None), None
    found = examine(path, os)
    return found, None if found.manifest is None else Claimed.of(found.manifest)


def _name_silent(older: Iterable[Path], global_step: int, os: Os) -> None:
    """Of those that were taken for older because nothing could be read, the ones that may be newer by their names."""
    for path in older:
        name = layout.CheckpointName.parse(path.name)
        if name is not None and name.global_step > global_step and Claimed.if_readable(path, os) == Claimed():
            logger.warning("%s is skipped: %s", path, examine(path, os).why)


def newest_first(claims: Mapping[Path, Claimed]) -> list[Path]:
    """Checkpoints in the order in which they are to be tried.

    Within a job by generation and step, which no clock can change: its controllers may have run on different hosts. Of
    one step, whether periodic or last words, one that resumes exactly goes first, then the one that was published last.
    Several jobs go by their newest wall clock `published_unix_ns`. Never by a file's time.
    """
    last: dict[str, int] = {}
    for claimed in claims.values():
        last[claimed.job] = max(last.get(claimed.job, 0), claimed.published_unix_ns)

    def place(path: Path) -> tuple[object, ...]:
        own = claims[path]
        return last[own.job], own.job, own.generation, own.global_step, own.exact, own.published_unix_ns, path.name

    return sorted(claims, key=place, reverse=True)


def examine(path: Path, os: Os = REAL_OS) -> Found:
    """What `scan` says of one directory, whatever its name."""
    try:
        manifest = _named_manifest(path, os)
    except CheckpointError as error:
        return _refused(path, error, None)
    return _check(path, manifest, os)


def candidates(roots: Iterable[Path], os: Os, claim: Callable[[Path, Os], Claimed] = Claimed.if_readable) -> list[Path]:
    """What has a checkpoint's name, the one that claims to be newest first; nothing of them is checked yet.

    A link counts as what it leads to. One that leads nowhere counts too, so that whoever reads it can say so.
    """
    paths: list[Path] = []
    for root in roots:
        try:
            names = os.listdir(root)
            named = [root / name for name in names if layout.CheckpointName.parse(name) is not None]
            paths += [path for path in named if os.is_directory(path) or os.is_link(path)]
        except FileNotFoundError:
            continue
        except NotADirectoryError as error:
            what = f"{root} is a file; give a checkpoint's directory, or the directory that holds checkpoints"
            raise StorageError(what, errno=error.errno or 0) from error
        except OSError as error:
            raise storage_error("listing", root, error) from error
    return newest_first({path: claim(path, os) for path in paths})


def _named_manifest(path: Path, os: Os) -> Manifest:
    manifest = read_published(path, os)
    check_name(path, manifest.global_step)
    return manifest


def _refused(path: Path, error: CheckpointError, manifest: Manifest | None) -> Found:
    if isinstance(error, IncompleteError):
        return Found(path, DirectoryStatus.INCOMPLETE, str(error), manifest)
    if isinstance(error, StorageError) and error.errno not in NO_FILE:
        return Found(path, DirectoryStatus.UNREADABLE, str(error), manifest, error.errno)
    newer = isinstance(error, NewerFormatError)
    return Found(path, DirectoryStatus.NEWER if newer else DirectoryStatus.DAMAGED, str(error), manifest)


def _check(path: Path, manifest: Manifest, os: Os) -> Found:
    try:
        for entry in manifest.files:
            if manifest.tables is None:
                check_file(path, manifest, entry, os)
            else:  # what is to be found at once cannot read what thousands of ranks hold
                check_sizes(path, entry, os)
    except CheckpointError as error:
        return _refused(path, error, manifest)
    return Found(path, DirectoryStatus.COMPLETE, "", manifest)


class Checkpoint:
    """A published checkpoint whose manifest has been checked. Made by `open_checkpoint`.

    So have been sizes and headers, unless it is large: then each file is looked at when something of it is wanted, so
    that a rank opens what it reads. Data are checked chunk by chunk while they are read. Methods may be called from any
    thread. What is missing or damaged raises IncompleteError, FormatError or StorageError whenever it is found.

    Nobody prunes it until `close`, or the end of a `with` block, or of this object (`lock_file.ReaderLock`).
    """

    def __init__(self, path: Path, manifest: Manifest, os: Os, held: ReaderLock) -> None:
        self.path = path
        self.manifest = manifest
        self._os = os
        self._held = held
        self._entries = {entry.path: entry for entry in manifest.files}
        self._opened: dict[str, OpenedFile] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Nothing more is read; does nothing the second time."""
        self._held.release()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()

    def open_all(self) -> None:
        """Check size and header of every file."""
        for file in self._entries:
            self.open(file)

    def open(self, file: str) -> OpenedFile:
        """One of the files, whose size and header have been checked."""
        with self._lock:
            opened = self._opened.get(file)
            if opened is None:
                entry = self._entries[file]
                header = check_file(self.path, self.manifest, entry, self._os)
                specs = self.manifest.tensors_of(entry)
                places = {name: (spec, header.tensors[name][1]) for name, spec in specs.items()}
                opened = self._opened[file] = OpenedFile(self.manifest.with_chunks(entry), places)
            return opened

    def stored(self, name: str) -> tuple[StoredTensor, ...]:
        """Where a tensor lies, or its slices in their order; IncompleteError if there is none of that name."""
        return self._find(name)[1]

    def _find(self, name: str) -> tuple[TensorSpec, tuple[StoredTensor, ...]]:
        entry = self._owner_of(name)
        if entry is None:
            raise self._no_tensor(name)
        if not (isinstance(entry, UnitEntry) and entry.shares):
            one = self._stored(name, entry.file, name)
            return one.spec, (one,)
        whole = entry.wholes.get(name)
        if whole is None:
            raise self._no_tensor(name)
        files = [one.file for one in entry.shares]
        pieces = (self._stored(name, files[one.share], one.spec.name, one.offsets) for one in whole.pieces)
        return whole.spec, tuple(pieces)

    def _stored(self, name: str, file: str, stored: str, offsets: tuple[int, ...] = ()) -> StoredTensor:
        opened = self.open(file)
        if stored not in opened.places:
            raise self._no_tensor(name)
        spec, begin = opened.places[stored]
        return StoredTensor(self.path / file, begin, spec, opened.entry, offsets)

    def _no_tensor(self, name: str) -> IncompleteError:
        return IncompleteError(f"{self.path} has no tensor {name!r}", missing=(name,))

    def _owner_of(self, name: str) -> Entry | None:
        """What has a tensor, if anything has: its unit, or its rank's local state."""
        try:
            parsed = layout.parse_tensor_name(name)
        except FormatError:
            return None
        if isinstance(parsed, layout.UnitTensorName):
            return self.manifest.units.get(parsed.unit)
        return self.manifest.locals.get(parsed.rank)

    def read_tensors(self, names: Iterable[str], into: Callable[[TensorSpec], memoryview]) -> None:
        """Reads tensors straight into memory that `into` names for each: writable, contiguous, of `spec.nbytes`.

        `into` is called once for every tensor, on this thread, before anything is read. If a checksum is wrong,
        FormatError is raised and the destinations hold rubbish: do not train on them.
        """
        targets = []
        for name in dict.fromkeys(names):
            spec, _ = self._find(name)
            box = whole(spec.shape)
            targets.append(Target(box, into(spec), [Slice(Shard(name, box), box)] if spec.nbytes else ()))
        with SliceReader(self, checked=True, os=self._os) as reader:
            reader.read(targets)

    def read(self, owner: Entry) -> Tensors:
        """All tensors of a unit or a local state, in one piece of new memory: in file order they are long runs."""
        specs = owner.tensors
        starts = list(itertools.accumulate((-(-spec.nbytes // 64) * 64 for spec in specs), initial=0))
        memory = np.empty(starts[-1] + 64, np.uint8)
        first = -memory.ctypes.data % 64
        tensors = {
            spec.name: (spec, memory[first + start : first + start + spec.nbytes])
            for spec, start in zip(specs, starts, strict=False)
        }
        self.read_tensors(tensors, lambda spec: tensors[spec.name][1].data)
        return tensors


def open_checkpoint(path: Path, os: Os = REAL_OS) -> Checkpoint:
    """Opens a checkpoint directory. IncompleteError, FormatError or StorageError say what is wrong and what to do.

    BusyError if another process is about to remove it.
    """
    held = ReaderLock.take(path, os)
    try:
        checkpoint = Checkpoint(path, _named_manifest(path, os), os, held)
        if checkpoint.manifest.tables is None:
            checkpoint.open_all()
    except BaseException:
        held.release()
        raise
    return checkpoint


def verify(
    path: Path, deep: bool = True, os: Os = REAL_OS, progress: Callable[[int], None] | None = None
) -> list[Problem]:
    """Everything that is wrong with a checkpoint, none if it is sound. `deep` reads and checks all data too."""
    with ReaderLock.take(path, os):
        try:
            manifest = _named_manifest(path, os)
        except CheckpointError as error:
            return [Problem(layout.MANIFEST_NAME, str(error))]
        return [Problem(file, str(error)) for file, error in _errors(path, manifest, deep, os, progress)]


def examine_data(path: Path, os: Os = REAL_OS, progress: Callable[[int], None] | None = None) -> Found:
    """As `examine`, and every byte is read, up to the first thing that is wrong.

    BusyError if another process is about to remove it.
    """
    with ReaderLock.take(path, os):
        found = examine(path, os)
        if found.manifest is None or found.status is not DirectoryStatus.COMPLETE:
            return found
        wrong = next(_errors(path, found.manifest, True, os, progress), None)
        return found if wrong is None else _refused(path, wrong[1], found.manifest)


def _errors(
    path: Path, manifest: Manifest, deep: bool, os: Os, progress: Callable[[int], None] | None
) -> Iterator[tuple[str, CheckpointError]]:
    """What is wrong with each file that is not sound."""
    before = 0
    for entry in manifest.files:
        try:
            check_file(path, manifest, entry, os)
            if deep:
                read_file(path / entry.path, manifest.with_chunks(entry), os, _after(before, progress))
        except CheckpointError as error:
            yield entry.path, error
        before += entry.bytes


def _after(before: int, progress: Callable[[int], None] | None) -> Callable[[int], None] | None:
    """Progress of one file, told as progress of all."""
    return None if progress is None else lambda done: progress(before + done)


# Reading a checkpoint that somebody else may replace meanwhile: told from damage, and tried once more.

T = TypeVar("T")

Stamp = tuple[int, ...]


def read_checkpoint(path: Path, read: Callable[[Checkpoint], T], os: Os = REAL_OS, *, checked: bool = True) -> T:
    """`read(checkpoint)` of the checkpoint at `path`, or of the newest complete one in it.

    If that fails and another checkpoint lies there by then, it is done once more, with that one: `read` has to begin
    anew. checked: `read` holds all that it uses against checksums; otherwise its success counts only if nothing was
    replaced. Raises ReplacedError if the second one was replaced too, and whatever `read` raises.
    """
    try:
        return _read_once(path, read, os, checked)
    except ReplacedError as error:
        logger.warning("%s; reading it again", error)
    return _read_once(path, read, os, checked)


def find_checkpoint(path: Path, os: Os = REAL_OS) -> Path:
    """`path` itself if it is a checkpoint, else the newest complete one in it. IncompleteError if there is none."""
    if os.exists(path / layout.MANIFEST_NAME) or _is_named(path):
        return path
    newest = latest(path, os=os)
    if newest is None:
        raise IncompleteError(
            f"there is no complete checkpoint at {path} or in it; see what is there with `lastwords inspect {path}`",
            missing=(str(path),),
        )
    return newest


def _is_named(path: Path) -> bool:
    """Whether the path, or what it leads to, has a checkpoint's name."""
    return any(layout.CheckpointName.parse(name) is not None for name in (path.name, where_it_leads(path).name))


def _read_once(path: Path, read: Callable[[Checkpoint], T], os: Os, checked: bool) -> T:
    found = find_checkpoint(path, os)
    before = stamp_of(found, os) if found == path else stamp_of_chosen(found, os)
    with damage_told_from_replacement(found, before, os), open_checkpoint(found, os) as checkpoint:
        result = read(checkpoint)
    if not checked:
        refuse_replaced(found, before, os)
    return result


@contextlib.contextmanager
def damage_told_from_replacement(directory: Path, before: Stamp | None, os: Os = REAL_OS) -> Iterator[None]:
    """ReplacedError for an error of reading, if what lies at `directory` is not what had the stamp `before`."""
    try:
        yield
    except MismatchError:
        raise
    except CheckpointError as error:
        refuse_replaced(directory, before, os, error)
        raise


def stamp_of(path: Path | None, os: Os = REAL_OS) -> Stamp | None:
    """What tells a checkpoint, or a file, from another one that takes its place; None if there is none."""
    if path is None:
        return None
    if os.leads_to_directory(path):
        path = path / layout.MANIFEST_NAME
    try:
        fd = os.open_read(path)
    except OSError:  # told by whoever reads it
        return None
    try:
        with storage_errors("looking at", path):
            return os.stamp(fd)
    finally:
        close(fd, path, os)


def stamp_of_chosen(path: Path, os: Os = REAL_OS) -> Stamp | None:
    """As `stamp_of`, of a checkpoint that was seen to be there: ReplacedError if it is gone."""
    stamp = stamp_of(path, os)
    if stamp is None and not os.exists(path):
        raise ReplacedError(
            f"{path} has been removed since it was chosen; nothing is damaged (if other hosts still see it, check that "
            "its disk is mounted here)"
        )
    return stamp


def refuse_replaced(
    directory: Path, before: Stamp | None, os: Os = REAL_OS, why: CheckpointError | None = None
) -> None:
    """ReplacedError if what lies at `directory` is not what had the stamp `before`."""
    if before is not None and stamp_of(directory, os) != before:
        raise ReplacedError(f"{directory} was replaced or removed while it was read; nothing is damaged") from why
