"""Finding checkpoints and reading them back, every byte checked against its checksum on the way."""

from __future__ import annotations

import enum
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lastwords.checkpoint import layout
from lastwords.checkpoint.chunk_reader import Piece, read_file
from lastwords.checkpoint.direct_io import Bytes, as_bytes
from lastwords.checkpoint.format import Header, TensorSpec
from lastwords.checkpoint.manifest import Manifest, claimed_published_ns, read_manifest
from lastwords.checkpoint.part import FileEntry
from lastwords.checkpoint.partfile import check_header
from lastwords.checkpoint.slice_reader import StoredTensor
from lastwords.checkpoint.system import REAL_OS, Os, storage_error
from lastwords.errors import CheckpointError, FormatError, IncompleteError, StorageError

logger = logging.getLogger(__name__)


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
    found = [examine(path, os) for path in _candidates(root, os)]
    if job is not None:
        found = [item for item in found if item.manifest is not None and item.manifest.job == job]
    return sorted(found, key=lambda item: item.manifest is None)


def latest(root: Path, job: str | None = None, os: Os = REAL_OS) -> Path | None:
    """Newest complete checkpoint in `root` (of `job`, if given); None if there is none.

    Newest is what was published last by its manifest, never by a file's time. Newer ones that are damaged are
    skipped with a warning.
    """
    for path in _candidates(root, os):
        found = examine(path, os)
        if found.status is Status.COMPLETE and found.manifest is not None and job in (None, found.manifest.job):
            return path
        if found.status is not Status.COMPLETE and (found.manifest is None or job in (None, found.manifest.job)):
            logger.warning("%s is skipped: %s", path, found.why)
    return None


def find_checkpoint(path: Path, os: Os = REAL_OS) -> Path:
    """`path` itself if it is a checkpoint, else the newest complete one in it. IncompleteError if there is none."""
    if os.exists(path / layout.MANIFEST_NAME) or layout.CheckpointName.parse(path.resolve().name) is not None:
        return path
    newest = latest(path, os=os)
    if newest is None:
        raise IncompleteError(
            f"there is no complete checkpoint at {path} or in it; see what is there with `lastwords inspect {path}`",
            missing=(str(path),),
        )
    return newest


def examine(path: Path, os: Os = REAL_OS) -> Found:
    """What `scan` says of one directory, whatever its name."""
    try:
        manifest = _named_manifest(path, os)
    except CheckpointError as error:
        return Found(path, _status_of(error), str(error), None)
    return _check(path, manifest, os)


def _candidates(root: Path, os: Os) -> list[Path]:
    """Directories with a checkpoint's name, the one that claims to be newest first; nothing of them is checked yet."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error("listing", root, error) from error
    paths = [root / name for name in names if layout.CheckpointName.parse(name) is not None]
    claims = [(claimed_published_ns(path, os), path.name, path) for path in paths if os.is_directory(path)]
    return [path for _, _, path in sorted(claims, reverse=True)]


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


class Checkpoint:
    """A published checkpoint whose manifest, sizes and headers have been checked. Made by `open_checkpoint`.

    Data are checked chunk by chunk while they are read. Methods may be called from any thread.
    """

    def __init__(self, path: Path, manifest: Manifest, headers: dict[str, Header], os: Os) -> None:
        self.path = path
        self.manifest = manifest
        self._headers = headers
        self._os = os
        self._entries = {entry.path: entry for entry in manifest.files}
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

    def stored(self, name: str) -> StoredTensor:
        """Where a tensor lies; IncompleteError if there is none of that name."""
        file, spec, begin, _ = self._find(name)
        return StoredTensor(self.path / file, begin, spec, self._entries[file])

    def read_tensors(
        self,
        names: Iterable[str],
        into: Callable[[TensorSpec], memoryview],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Reads tensors straight into memory that `into` names for each: writable, contiguous, of `spec.nbytes`.

        `into` is called once for every tensor, on this thread, before anything is read. `progress(bytes)` is called
        on this thread now and then with the bytes that were read so far. If a checksum is wrong, FormatError is raised
        and the destinations hold rubbish: do not train on them.
        """
        by_file: dict[str, list[Piece]] = {}
        for name in dict.fromkeys(names):
            file, spec, begin, end = self._find(name)
            target = memoryview(into(spec))
            if target.nbytes != spec.nbytes or target.readonly:
                raise ValueError(f"{name}: {target.nbytes} bytes of memory (readonly: {target.readonly}) for {spec}")
            if spec.nbytes:
                by_file.setdefault(file, []).append(Piece(begin, end, as_bytes(target).data))
        before = 0
        for file in sorted(by_file):
            pieces = sorted(by_file[file], key=lambda piece: piece.begin)
            before += read_file(self.path / file, self._entries[file], pieces, self._os, _after(before, progress))

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
    before = 0
    for entry in manifest.files:
        try:
            _check_file(path, manifest, entry, os)
            if deep:
                read_file(path / entry.path, entry, None, os, _after(before, progress))
        except CheckpointError as error:
            problems.append(Problem(entry.path, str(error)))
        before += entry.bytes
    return problems


def _after(before: int, progress: Callable[[int], None] | None) -> Callable[[int], None] | None:
    """Progress of one file, told as progress of all."""
    return None if progress is None else lambda done: progress(before + done)
