"""Finding checkpoints and reading them back, every byte checked against its checksum on the way."""

from __future__ import annotations

import enum
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from lastwords.checkpoint import layout
from lastwords.checkpoint.direct_io import CHUNK_BYTES, Bytes, as_bytes
from lastwords.checkpoint.document import damage
from lastwords.checkpoint.format import Header, TensorSpec
from lastwords.checkpoint.manifest import Manifest, read_manifest
from lastwords.checkpoint.part import FileEntry
from lastwords.checkpoint.partfile import check_header, open_part_file
from lastwords.checkpoint.system import REAL_OS, Os, close, storage_error, storage_errors
from lastwords.errors import CheckpointError, FormatError, IncompleteError, StorageError

logger = logging.getLogger(__name__)

_READERS = 2
_PIECES_MAX = 512
"""preadv takes 1024 pieces (IOV_MAX); a chunk with more tensors than this is read whole and copied out."""


class Status(enum.Enum):
    """What a scan says of a directory."""

    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Found:
    """A directory with a checkpoint's name. `manifest` is None where it could not be read; `why` is "" if complete."""

    path: Path
    status: Status
    why: str
    manifest: Manifest | None


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a checkpoint: the file's path relative to its directory, and what to know about it."""

    file: str
    text: str


Tensors = dict[str, tuple[TensorSpec, Bytes]]
"""Tensor name -> its spec and its bytes (uint8, C order, little-endian)."""


def scan(root: Path, os: Os = REAL_OS, *, job: str | None = None) -> list[Found]:
    """Every directory in `root` that has a checkpoint's name, newest first; those without a manifest come last.

    Checked are manifest, presence, sizes and headers; `verify` checks the data as well. A missing `root` is empty.
    With `job`, only checkpoints of that job (a directory whose manifest cannot be read belongs to none).
    """
    return [
        _check(path, manifest, os) if manifest is not None else Found(path, *failure, None)
        for path, manifest, failure in _manifests(root, os)
        if job is None or (manifest is not None and manifest.job == job)
    ]


def latest(root: Path, job: str | None = None, os: Os = REAL_OS) -> Path | None:
    """Newest complete checkpoint in `root` (of `job`, if given); None if there is none.

    Newest is what was published last by its manifest, never by a file's time. Newer ones that are damaged are
    skipped with a warning.
    """
    for path, manifest, failure in _manifests(root, os):
        if manifest is None:
            logger.warning("%s is skipped: %s", path, failure[1])
            continue
        if job is not None and manifest.job != job:
            continue
        found = _check(path, manifest, os)
        if found.status is Status.COMPLETE:
            return path
        logger.warning("%s is skipped: %s", path, found.why)
    return None


def examine(path: Path, os: Os = REAL_OS) -> Found:
    """What `scan` says of one directory, whatever its name."""
    try:
        manifest = _named_manifest(path, os)
    except CheckpointError as error:
        return Found(path, _status_of(error), str(error), None)
    return _check(path, manifest, os)


def _manifests(root: Path, os: Os) -> list[tuple[Path, Manifest | None, tuple[Status, str]]]:
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error("listing", root, error) from error
    readable: list[tuple[Path, Manifest | None, tuple[Status, str]]] = []
    others: list[tuple[Path, Manifest | None, tuple[Status, str]]] = []
    for name in names:
        path = root / name
        if layout.CheckpointName.parse(name) is None or not os.is_directory(path):
            continue
        try:
            readable.append((path, _named_manifest(path, os), (Status.COMPLETE, "")))
        except CheckpointError as error:
            others.append((path, None, (_status_of(error), str(error))))
    readable.sort(key=lambda item: (item[1].published_unix_ns if item[1] else 0, item[0].name), reverse=True)
    return readable + others


def _named_manifest(path: Path, os: Os) -> Manifest:
    manifest = read_manifest(path, os)
    name = layout.CheckpointName.parse(path.name)
    if name is not None and name.global_step != manifest.global_step:
        raise FormatError(
            f"{path} holds a checkpoint of global step {manifest.global_step}: the directory was renamed; give it "
            "its own name back"
        )
    return manifest


def _status_of(error: CheckpointError) -> Status:
    if isinstance(error, IncompleteError):
        return Status.INCOMPLETE
    return Status.UNREADABLE if isinstance(error, StorageError) else Status.DAMAGED


def _check(path: Path, manifest: Manifest, os: Os) -> Found:
    try:
        for entry in manifest.files:
            _check_file(path, manifest, entry, os)
    except CheckpointError as error:
        return Found(path, _status_of(error), str(error), manifest)
    return Found(path, Status.COMPLETE, "", manifest)


def _check_file(directory: Path, manifest: Manifest, entry: FileEntry, os: Os) -> Header:
    return check_header(
        directory,
        entry,
        manifest.tensors_of(entry.path),
        rank=layout.PartPath.parse(entry.path, where=str(directory)).rank,
        global_step=manifest.global_step,
        os=os,
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes [begin, end) of the file and where they go."""

    begin: int
    end: int
    target: memoryview


class Checkpoint:
    """A published checkpoint whose manifest, sizes and headers have been checked. Made by `open_checkpoint`.

    Data are checked chunk by chunk while they are read. Methods may be called from any thread.
    """

    def __init__(self, path: Path, manifest: Manifest, headers: dict[str, Header], os: Os) -> None:
        self.path = path
        self.manifest = manifest
        self._headers = headers
        self._os = os
        self._where = {
            name: (file, spec, header.tensors[name][1], header.tensors[name][2])
            for file, header in headers.items()
            for name, spec in manifest.tensors_of(file).items()
        }

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._where)

    def spec(self, name: str) -> TensorSpec:
        """Spec of a tensor, global shape and offsets included; IncompleteError if there is none of that name."""
        return self._find(name)[1]

    def read_tensors(
        self,
        names: Iterable[str],
        into: Callable[[TensorSpec], memoryview],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Reads tensors straight into memory that `into` names for each: writable, contiguous, of `spec.nbytes`.

        `into` is called once for every tensor, on this thread, before anything is read. `progress(bytes)` is called
        on this thread now and then with the bytes read so far. If a checksum is wrong, FormatError is raised and the
        destinations hold rubbish: do not train on them.
        """
        by_file: dict[str, list[_Piece]] = {}
        for name in dict.fromkeys(names):
            file, spec, begin, end = self._find(name)
            target = memoryview(into(spec))
            if target.nbytes != spec.nbytes or target.readonly:
                raise ValueError(f"{name}: {target.nbytes} bytes of memory (readonly: {target.readonly}) for {spec}")
            if spec.nbytes:
                by_file.setdefault(file, []).append(_Piece(begin, end, as_bytes(target).data))
        done = 0
        for file in sorted(by_file):
            pieces = sorted(by_file[file], key=lambda piece: piece.begin)
            for count in _read_file(self.path, self.manifest.file(file), pieces, self._os):
                done += count
                if progress is not None:
                    progress(done)

    def read_unit(self, unit: str) -> Tensors:
        """All tensors of a unit. Its JSON is `manifest.units[unit].meta`."""
        entry = self.manifest.units.get(unit)
        if entry is None:
            known = ", ".join(sorted(self.manifest.units))
            raise IncompleteError(f"{self.path} has no unit {unit!r}; it has: {known}", missing=(f"unit {unit}",))
        return self._read_fresh(entry.tensors)

    def read_local(self, rank: int) -> Tensors:
        """All tensors that belong to one rank alone. Their JSON is `manifest.locals[rank].meta`."""
        entry = self.manifest.locals.get(rank)
        if entry is None:
            why = "; ".join(reason for reason in self.manifest.reasons if reason.startswith(f"rank {rank}:"))
            raise IncompleteError(
                f"{self.path} has no local state of rank {rank} ({why or 'it was not saved'})",
                missing=(f"local state of rank {rank}",),
            )
        return self._read_fresh(entry.tensors)

    def _find(self, name: str) -> tuple[str, TensorSpec, int, int]:
        try:
            return self._where[name]
        except KeyError:
            raise IncompleteError(f"{self.path} has no tensor {name!r}", missing=(name,)) from None

    def _read_fresh(self, specs: Sequence[TensorSpec]) -> Tensors:
        # One allocation for all: large ones get huge pages, and tensors in file order are read in long runs.
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
    """Opens a checkpoint directory. IncompleteError, FormatError or StorageError say what is wrong and what to do."""
    manifest = _named_manifest(path, os)
    headers = {entry.path: _check_file(path, manifest, entry, os) for entry in manifest.files}
    return Checkpoint(path, manifest, headers, os)


def verify(
    path: Path, deep: bool = True, os: Os = REAL_OS, progress: Callable[[int], None] | None = None
) -> list[Problem]:
    """Everything that is wrong with a checkpoint, none if it is sound. `deep` reads and checks all data too."""
    try:
        manifest = _named_manifest(path, os)
    except CheckpointError as error:
        return [Problem(layout.MANIFEST_NAME, str(error))]
    problems: list[Problem] = []
    done = 0
    for entry in manifest.files:
        try:
            _check_file(path, manifest, entry, os)
            if deep:
                for count in _read_file(path, entry, None, os):
                    done += count
                    if progress is not None:
                        progress(done)
        except CheckpointError as error:
            problems.append(Problem(entry.path, str(error)))
    return problems


def _read_file(directory: Path, entry: FileEntry, pieces: Sequence[_Piece] | None, os: Os) -> Iterator[int]:
    """Reads the pieces (sorted, without overlap), or everything if None, and yields the bytes of each chunk read."""
    plan = _plan(entry, pieces)
    fd = open_part_file(directory, entry, os)
    try:
        with storage_errors("reading", directory / entry.path):
            os.advise_sequential(fd)
        local = threading.local()

        def read(step: tuple[int, list[_Piece]]) -> int:
            if not hasattr(local, "scratch"):
                local.scratch = memoryview(bytearray(CHUNK_BYTES))
            return _read_chunk(fd, directory / entry.path, entry, *step, local.scratch, os)

        if len(plan) <= 1:
            yield from map(read, plan)
            return
        with ThreadPoolExecutor(_READERS, thread_name_prefix="lastwords-read") as pool:
            try:
                yield from pool.map(read, plan)
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        close(fd, directory / entry.path, os)


def _plan(entry: FileEntry, pieces: Sequence[_Piece] | None) -> list[tuple[int, list[_Piece]]]:
    """Chunks to read, each with the parts of pieces in it."""
    if pieces is None:
        return [(index, []) for index in range(len(entry.chunks))]
    plan: dict[int, list[_Piece]] = {}
    for piece in pieces:
        for index in range(piece.begin // CHUNK_BYTES, -(-piece.end // CHUNK_BYTES)):
            begin, end = max(piece.begin, index * CHUNK_BYTES), min(piece.end, (index + 1) * CHUNK_BYTES)
            part = _Piece(begin, end, piece.target[begin - piece.begin : end - piece.begin])
            plan.setdefault(index, []).append(part)
    return sorted(plan.items())


def _read_chunk(
    fd: int, path: Path, entry: FileEntry, index: int, pieces: list[_Piece], scratch: memoryview, os: Os
) -> int:
    start = index * CHUNK_BYTES
    length = min(CHUNK_BYTES, entry.bytes - start)
    views = [scratch[:length]] if len(pieces) > _PIECES_MAX else _views(pieces, start, length, scratch)
    with storage_errors("reading", path):
        _fill(fd, views, start, path, os)
    if len(views) == 1:
        digest = xxhash.xxh3_64_hexdigest(views[0])
    else:
        state = xxhash.xxh3_64()
        for view in views:
            state.update(view)
        digest = state.hexdigest()
    if digest != entry.chunks[index]:
        raise FormatError(damage(path, f"its bytes {start} to {start + length} do not fit their checksum"))
    if len(pieces) > _PIECES_MAX:
        for piece in pieces:
            piece.target[:] = scratch[piece.begin - start : piece.end - start]
    return length


def _views(pieces: list[_Piece], start: int, length: int, scratch: memoryview) -> list[memoryview]:
    """Memory for a whole chunk in file order: the pieces' own, and scratch for what lies between them."""
    views: list[memoryview] = []
    at = start
    for piece in pieces:
        if piece.begin > at:
            views.append(scratch[at - start : piece.begin - start])
        views.append(piece.target)
        at = piece.end
    if at < start + length:
        views.append(scratch[at - start : length])
    return views


def _fill(fd: int, views: list[memoryview], offset: int, path: Path, os: Os) -> None:
    rest = list(views)
    while rest:
        count = os.preadv(fd, rest, offset)
        if count == 0:
            raise FormatError(damage(path, f"it ends at byte {offset}"))
        offset += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if rest and count:
            rest[0] = rest[0][count:]
