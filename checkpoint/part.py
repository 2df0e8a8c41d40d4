"""One writer's part of a checkpoint: a .ckpt file and the part.json that describes it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from lastwords.checkpoint import layout
from lastwords.checkpoint.codec import Number, Positive, brief, typed
from lastwords.checkpoint.cuts import plan_sum, split
from lastwords.checkpoint.direct_io import CHUNK_BYTES, Buffer, DirectWriter, FileSum, as_bytes
from lastwords.checkpoint.document import (
    DOCUMENT_BYTES_MAX,
    damage,
    decode_document,
    encode_document,
    in_steps,
    read_document,
    told,
)
from lastwords.checkpoint.entries import (
    Entry,
    FileEntry,
    LocalEntry,
    Reason,
    UnitEntry,
    by_name,
    by_rank,
    by_unit,
    entries,
    facts_problem,
    local_summary,
    meta_problem,
    owners_contradiction,
    together,
    unit_summary,
    unpacked,
)
from lastwords.checkpoint.format import (
    METADATA_KEY,
    Header,
    TensorSpec,
    decode_header,
    encode_header,
    file_order,
    header_length,
)
from lastwords.checkpoint.meta import EMPTY_UNIT, FILE_FORMAT, PART_FORMAT, FileContent, LocalMeta, UnitMeta, json_of
from lastwords.checkpoint.storable import pack
from lastwords.checkpoint.system import (
    REAL_OS,
    Os,
    close,
    make_directories,
    make_directory,
    pwrite_all,
    storage_error,
    storage_errors,
    sync_directory,
)
from lastwords.errors import ConfigError, FormatError, IncompleteError, NewerFormatError, StorageError
from lastwords.vocabulary import Share

logger = logging.getLogger(__name__)

# Checking one .ckpt file against what the manifest (or part.json) says of it.


def open_part_file(path: Path, entry: FileEntry | None, os: Os) -> int:
    """Descriptor of the file, whose size is right. IncompleteError if it is missing, FormatError if truncated.

    entry: None for a file of which no size is known.
    """
    try:
        fd = os.open_read(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(path, entry) from error
    except OSError as error:
        raise storage_error("opening", path, error) from error
    try:
        if entry is not None:
            with storage_errors("reading", path):
                size = os.size(fd)
            _check_size(path, size, entry)
    except BaseException:
        close(fd, path, os)
        raise
    return fd


def _files_of(entry: FileEntry) -> tuple[FileEntry, ...]:
    """The file, and the part.json beside it where a manifest says how long that is."""
    return (entry, replace(entry, path=entry.description, bytes=entry.part_bytes)) if entry.part_sum else (entry,)


def check_present(directory: Path, entry: FileEntry, os: Os) -> None:
    """As `check_sizes`, by a look at the names alone: nothing is opened, so that thousands of files take no time."""
    for one in _files_of(entry):
        path = directory / one.path
        try:
            size = os.size(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _missing(path, one) from error
        except OSError as error:
            raise storage_error("looking at", path, error) from error
        _check_size(path, size, one)


def _missing(path: Path, entry: FileEntry | None) -> IncompleteError:
    if entry is None:
        return IncompleteError(f"{path} is missing; restore it", missing=(str(path),))
    return IncompleteError(f"{path} is missing; restore it or use another checkpoint", missing=(entry.path,))


def _check_size(path: Path, size: int, entry: FileEntry) -> None:
    if size != entry.bytes:
        kind = "truncated" if size < entry.bytes else "too long"
        raise FormatError(damage(path, f"it is {kind}: {size} bytes where the manifest says {entry.bytes}"))


def check_sizes(directory: Path, entry: FileEntry, os: Os) -> None:
    """IncompleteError or FormatError unless the file, and what describes it, are there and have the right sizes."""
    for one in _files_of(entry):
        close(open_part_file(directory / one.path, one, os), directory / one.path, os)


def read_exactly(fd: int, count: int, path: Path, os: Os) -> bytes:
    """The first `count` bytes; FormatError if the file ends before."""
    buffer = bytearray(count)
    view = memoryview(buffer)
    done = 0
    with storage_errors("reading", path):
        while done < count:
            got = os.preadv(fd, [view[done:]], done)
            if got == 0:
                raise FormatError(damage(path, f"it ends at byte {done}"))
            done += got
    return bytes(buffer)


def check_header(
    directory: Path,
    entry: FileEntry,
    specs: Mapping[str, TensorSpec],
    *,
    rank: int,
    global_step: int,
    os: Os = REAL_OS,
) -> Header:
    """Header of a file, checked against the file's size, the step, its checksum and the listed tensors."""
    path = directory / entry.path
    where = str(path)
    fd = open_part_file(path, entry, os)
    try:
        length = header_length(read_exactly(fd, 8, path, os), file_bytes=entry.bytes, where=where)
        raw = read_exactly(fd, length, path, os)
    finally:
        close(fd, path, os)
    header = decode_header(raw, file_bytes=entry.bytes, where=where)
    # The step comes before the checksum: "of another step" says more than "damaged".
    _check_place(content_of(header, where), where, rank=rank, global_step=global_step)
    if length != entry.header_bytes or xxhash.xxh3_64_hexdigest(raw) != entry.header_sum:
        raise FormatError(damage(where, "its header does not match its checksum"))
    found = {name: (spec.dtype, spec.shape) for name, (spec, _, _) in header.tensors.items()}
    listed = {name: (spec.dtype, spec.shape) for name, spec in specs.items()}
    if found != listed:
        names = sorted(name for name in found.keys() | listed.keys() if found.get(name) != listed.get(name))
        raise FormatError(damage(where, f"its tensors are not those of the manifest, first {names[0]!r}"))
    return header


def read_lone_header(path: Path, os: Os = REAL_OS) -> Header:
    """Header of any safetensors file, checked against its size only: no manifest, step or checksum is known."""
    fd = open_part_file(path, None, os)
    try:
        with storage_errors("reading", path):
            size = os.size(fd)
        length = header_length(read_exactly(fd, min(8, size), path, os), file_bytes=size, where=str(path))
        return decode_header(read_exactly(fd, length, path, os), file_bytes=size, where=str(path))
    finally:
        close(fd, path, os)


def check_unchanged(directory: Path, entry: FileEntry, os: Os = REAL_OS) -> None:
    """Size and header's checksum once more, cheaply, for a file that `check_header` has seen before."""
    path = directory / entry.path
    fd = open_part_file(directory / entry.path, entry, os)
    try:
        raw = read_exactly(fd, min(entry.header_bytes, entry.bytes), path, os)
    finally:
        close(fd, path, os)
    if xxhash.xxh3_64_hexdigest(raw) != entry.header_sum:
        raise FormatError(damage(path, "its header does not match its checksum"))


def content_of(header: Header, where: Path | str) -> FileContent:
    """The JSON in the header of a file of ours. FormatError for any other."""
    text = header.metadata.get(METADATA_KEY)
    if text is None:
        raise FormatError(damage(where, "it was not written by lastwords: its metadata lack the key 'lastwords'"))
    try:
        content = typed(json.loads(text), FileContent, METADATA_KEY)
    except (ValueError, RecursionError, FormatError) as error:
        raise FormatError(damage(where, f"its metadata cannot be read ({error})")) from error
    if content.format > FILE_FORMAT:
        raise NewerFormatError(
            f"{where} was written by a newer lastwords, format {content.format}; this one reads up to {FILE_FORMAT}; "
            "upgrade"
        )
    if (content.units is None) == (content.meta is None):
        raise FormatError(damage(where, "its metadata cannot be read (either units or meta has to be there)"))
    return content


def _check_place(content: FileContent, where: str, *, rank: int, global_step: int) -> None:
    if content.global_step != global_step:
        raise FormatError(
            f"{where} is of global step {content.global_step}, the manifest is of step {global_step}; a file of "
            "another checkpoint was put here: restore the right file or use another checkpoint"
        )
    if content.rank != rank:
        raise FormatError(
            f"{where} was written by rank {content.rank}, not by rank {rank}; restore the right file or use another "
            "checkpoint"
        )


TensorSource = Buffer | Callable[[], Buffer]
"""A tensor's bytes, contiguous: a buffer that stays as it is until `write_part` returns, or a function that is called
once, when its turn has come, and may use the same memory again for the next tensor."""


@dataclass(frozen=True, slots=True)
class UnitState:
    """A unit as it is handed to `write_part`. `meta` is everything that is not a tensor (see `storable`).

    plan: of a share of a unit, checksum of what all its shares have (`cuts.plan_sum`). version: another one, if what it
    is read from has been written over meanwhile.
    """

    tensors: Sequence[tuple[TensorSpec, TensorSource]]
    meta: UnitMeta = EMPTY_UNIT
    plan: str = ""
    version: object = None


@dataclass(frozen=True, slots=True)
class LocalState:
    """What belongs to one rank alone. If not `exact`, `reasons` says why a resume cannot be."""

    tensors: Sequence[tuple[TensorSpec, TensorSource]]
    meta: LocalMeta = field(default_factory=LocalMeta)
    exact: bool = True
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """Who wrote what of which step. global_step, epoch and step are 1-based.

    epoch is EPOCH_UNKNOWN, and step the global one, where this writer did not know what the loop calls the step.
    """

    rank: Number
    global_step: Positive
    epoch: Number
    step: Positive
    job: str
    file: FileEntry

    def __post_init__(self) -> None:
        if not self.file.chunks:
            raise ConfigError(f"{self.file.path} has no chunks")


@dataclass(frozen=True, slots=True)
class RankPart(Written):
    """Content of part.json. `facts` is free JSON about the writer."""

    units: Mapping[str, UnitEntry]
    locals: Mapping[int, LocalEntry]
    facts: Mapping[str, Any]

    def encode(self) -> bytes:
        content = {
            "format_version": PART_FORMAT,
            "facts": pack(dict(self.facts), "facts"),
            "summary": {
                "units": {unit: unit_summary(entry) for unit, entry in self.units.items()},
                "locals": {rank: local_summary(entry) for rank, entry in self.locals.items()},
            },
        }
        return encode_document(brief(self) | content)

    def contradiction(self) -> str | None:
        """First thing in which units and local states contradict each other or the file, in words."""
        path = self.file.path
        if len(self.file.chunks) != -(-self.file.bytes // CHUNK_BYTES) or self.file.header_bytes > self.file.bytes:
            return f"it has {len(self.file.chunks)} checksums for the {self.file.bytes} bytes of {path}"
        return owners_contradiction(self.units, self.locals, {path})

    @staticmethod
    def decode(raw: bytes, where: Path) -> RankPart:
        """FormatError if it is damaged or newer than this code."""
        content = decode_document(raw, where=where, version_max=PART_FORMAT)
        with told(where):
            content["units"] = entries(by_name(content.get("units"), "units"), UnitEntry, "units")
            content["locals"] = entries(by_rank(content.get("locals"), "locals"), LocalEntry, "locals")
            content["facts"] = unpacked(content.get("facts"), "facts")
            return typed(content, RankPart, "")


def _check_names(
    units: Mapping[str, UnitState], locals: Mapping[int, LocalState]
) -> list[tuple[TensorSpec, TensorSource]]:
    every: list[tuple[TensorSpec, TensorSource]] = []
    for unit, state in units.items():
        layout.check_share_name(unit)
        every += _owned(state.tensors, f"unit/{unit}/")
    for rank, local in locals.items():
        every += _owned(local.tensors, f"local/{rank}/")
    return every


def _owned(
    tensors: Iterable[tuple[TensorSpec, TensorSource]], prefix: str
) -> Iterable[tuple[TensorSpec, TensorSource]]:
    for spec, source in tensors:
        if not spec.name.startswith(prefix):
            raise ConfigError(f"tensor {spec.name!r} was given for {prefix}*: build its name with layout.*_tensor_name")
        layout.parse_tensor_name(spec.name)
        yield spec, source


def write_tensors(
    path: Path,
    tensors: Sequence[tuple[TensorSpec, TensorSource]],
    metadata: Mapping[str, str],
    os: Os,
    progress: Callable[[int], None] | None = None,
) -> tuple[bytes, FileSum]:
    """Writes a new file of these tensors, durable on return (its name is the caller's); its header, and its checksums.

    Raises StorageError, or ConfigError for what cannot be stored; then the file is left as it is.
    """
    ordered = [tensors[index] for index in file_order(spec for spec, _ in tensors)]
    specs = [spec for spec, _ in ordered]
    header = encode_header(specs, metadata)
    size = len(header) + sum(spec.nbytes for spec in specs)
    with DirectWriter(path, size, os=os, progress=progress) as writer:
        writer.write(header, stable=True)
        for spec, source in ordered:
            data = as_bytes(source() if callable(source) else source)
            if data.nbytes != spec.nbytes:
                raise ConfigError(f"tensor {spec.name!r} has {data.nbytes} bytes, its spec says {spec.nbytes}")
            # What a function makes may be a staging buffer that it uses again; a buffer is the tensor itself.
            writer.write(data, stable=not callable(source))
        return header, writer.finish()


_ROOT_GONE = (
    "the checkpoint directory %s is gone, and is made again: if its disk is not mounted any more, what is saved now "
    "lies below the mount point, where resume() does not see it once the disk is mounted"
)


def write_part(
    directory: Path,
    rank: int,
    epoch: int,
    step: int,
    global_step: int,
    units: Mapping[str, UnitState],
    locals: Mapping[int, LocalState],
    facts: Mapping[str, Any],
    progress: Callable[[int], None] | None = None,
    *,
    job: str = "",
    os: Os = REAL_OS,
) -> RankPart:
    """Writes this rank's .ckpt, durable on return, and part.json into `directory` (of a `layout.TemporaryName`).

    May be called from any thread; adds about 24 MiB of memory while it runs. `progress(bytes_written)` is called on
    this thread at least once for every 4 MiB and may raise to cancel. Raises StorageError, or ConfigError for state
    that cannot be stored; then the unfinished file is removed as far as that is possible.
    """
    every = _check_names(units, locals)
    said = {unit: state.meta.to_json() for unit, state in units.items()}
    said_of_ranks = {owner: json_of(state.meta) for owner, state in locals.items()}
    content = FileContent(
        format=FILE_FORMAT,
        rank=rank,
        global_step=global_step,
        epoch=epoch,
        step=step,
        job=job,
        units={unit: pack(meta, f"units[{unit!r}]") for unit, meta in said.items()},
        local={str(owner): pack(meta, f"local[{owner}]") for owner, meta in said_of_ranks.items()},
    )
    path = layout.PartPath(rank, epoch, step)
    rank_dir = directory / layout.rank_dir_name(rank)
    # Their names become durable below (rank_dir's in `directory`) and with the publication (`directory`'s in its root).
    with storage_errors("looking for the directory", directory.parent):
        there = os.exists(directory.parent)
    if not there:  # since the start, which makes it
        logger.warning(_ROOT_GONE, directory.parent)
        make_directories(directory.parent, os)
    make_directory(directory, os)
    make_directory(rank_dir, os)
    file = directory / str(path)
    try:
        header, total = write_tensors(file, every, {METADATA_KEY: in_steps(json_of(content))}, os, progress)
        part = RankPart(
            rank=rank,
            global_step=global_step,
            epoch=epoch,
            step=step,
            job=job,
            file=FileEntry(str(path), total.bytes, len(header), xxhash.xxh3_64_hexdigest(header), total.chunks),
            units={
                unit: UnitEntry(rank, str(path), tuple(spec for spec, _ in state.tensors), said[unit], state.plan)
                for unit, state in units.items()
            },
            locals={
                owner: LocalEntry(
                    rank,
                    str(path),
                    tuple(spec for spec, _ in local.tensors),
                    said_of_ranks[owner],
                    local.exact,
                    tuple(local.reasons),
                )
                for owner, local in locals.items()
            },
            facts=facts,
        )
        # Durable, since a large checkpoint keeps it.
        write_document(rank_dir / layout.PART_NAME, part.encode(), os)
        sync_directory(rank_dir, os)
        sync_directory(directory, os)
    except Exception:
        # Frees the space for another attempt; the directory itself is discarded by whoever decides.
        for leftover in (file, rank_dir / layout.PART_NAME):
            try:
                os.unlink(leftover)
            except OSError:
                pass
        raise
    if progress is not None:
        progress(total.bytes)
    return part


def remove_part(directory: Path, part: RankPart, os: Os = REAL_OS) -> None:
    """Removes what `write_part` has written below `directory`; StorageError if that is impossible."""
    for path in (directory / layout.rank_dir_name(part.rank) / layout.PART_NAME, directory / part.file.path):
        with storage_errors("removing", path):
            os.unlink(path)


def write_document(path: Path, raw: bytes, os: Os, *, made: bool = False) -> None:
    """Writes a small new file, whose content is on the disk on return (its name is the caller's).

    made: it is there already, and empty. StorageError, and no file, also for one that is larger than anybody reads.
    """
    if len(raw) > DOCUMENT_BYTES_MAX:
        raise StorageError(
            f"{path} would have {len(raw)} bytes, more than the {DOCUMENT_BYTES_MAX} that can be read: keep large "
            "values in tensors, not in extras or facts"
        )
    with storage_errors("writing", path):
        fd = os.open_lock(path) if made else os.create(path, direct=False)
        try:
            pwrite_all(os, fd, raw)
            os.fsync(fd)
        finally:
            close(fd, path, os)


def read_part(rank_dir: Path, os: Os = REAL_OS) -> RankPart:
    """part.json of one writer; FileNotFoundError, FormatError or StorageError."""
    path = rank_dir / layout.PART_NAME
    return RankPart.decode(read_document(path, os), path)


# What one of several writers writes of a unit (see `cuts`).


def share_of(state: UnitState, share: Share) -> UnitState:
    """A share of a unit, for `write_part`. What is no tensor is in the first share."""
    if share.count == 1:
        return state
    shares = split(share.unit, [spec for spec, _ in state.tensors], share.count)
    sources = [source for _, source in state.tensors]
    tensors = [(cut.spec, _slice(sources[cut.tensor], cut.begin, cut.end)) for cut in shares[share.index]]
    meta = state.meta
    if share.index:
        meta = replace(EMPTY_UNIT, optimizer=meta.optimizer, holders=meta.holders, reasons=meta.reasons)
    return UnitState(tensors, meta, plan_sum([cut.spec for cut in one] for one in shares), state.version)


def _slice(source: TensorSource, begin: int, end: int) -> TensorSource:
    if callable(source):
        return lambda: as_bytes(source())[begin:end]
    return as_bytes(source)[begin:end]


# What publication needs of a part: all of part.json but the tables, at a cost that no tensor adds to.

_KEYS = ("rank", "global_step", "epoch", "step", "job", "file", "facts", "summary")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSummary:
    """holders: the ranks that held the unit; None if its writer did not say. reasons: why it is not exact.

    plan: of a share, as of `UnitEntry`.
    """

    holders: tuple[Number, ...] | None = None
    reasons: tuple[str, ...]
    plan: str = ""


@dataclass(frozen=True, slots=True)
class LocalSummary:
    """after: epoch and step that the loop had named last, () if it names none, None if that was not recorded."""

    exact: bool
    reasons: tuple[Reason, ...]
    after: tuple[Number, ...] | None = None


@dataclass(frozen=True, slots=True)
class PartHead(Written):
    """A part without its tables. part_bytes, part_sum: of part.json itself."""

    units: Mapping[str, UnitSummary]
    locals: Mapping[int, LocalSummary]
    facts: Mapping[str, Any]
    part_bytes: int
    part_sum: str

    @staticmethod
    def decode(raw: bytes, where: Path) -> PartHead:
        """FormatError if it is damaged or newer than this code."""
        content = decode_document(raw, where=where, version_max=PART_FORMAT, only=_KEYS)
        with told(where):
            summary = typed(content["summary"], dict[str, Any], "summary")
            content["units"] = by_name(summary.get("units"), "summary.units")
            content["locals"] = by_rank(summary.get("locals"), "summary.locals")
            content["facts"] = unpacked(content["facts"], "facts")
            itself = {"part_bytes": len(raw), "part_sum": xxhash.xxh3_64_hexdigest(raw)}
            return typed(content | itself, PartHead, "")


def read_part_head(rank_dir: Path, os: Os = REAL_OS) -> PartHead:
    """part.json of one writer without its tables; FileNotFoundError, FormatError or StorageError."""
    path = rank_dir / layout.PART_NAME
    return PartHead.decode(read_document(path, os), path)


# The tables of a large checkpoint, which stay in its writers' part.json and are read when somebody asks for them.
#
# What a reader needs to choose a checkpoint, and to find who wrote what, stands in the manifest. The rest is looked up
# here, a writer's part at a time, and held against the manifest: whoever reads one rank's part opens one rank's
# files.

K = TypeVar("K")
E = TypeVar("E", bound=Entry)


@dataclass(frozen=True, slots=True)
class UnitHead:
    """Who wrote a unit, and who held it (None: the writer did not say)."""

    writer: Number
    holders: tuple[Number, ...] | None = None


@dataclass(frozen=True, slots=True)
class LocalHead:
    """Who wrote a rank's local state, and why a resume from it is not exact, if it is not."""

    writer: Number
    exact: bool
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Heads:
    """What the manifest itself says of units, local states and files, the files by their writers.

    units: by the names under which they are stored, those of their shares.
    """

    units: Mapping[str, UnitHead]
    locals: Mapping[int, LocalHead]
    files: Mapping[int, FileEntry]


class PartTables:
    """Each writer's part of one checkpoint, read once. May be used by any thread."""

    def __init__(self, directory: Path, heads: Heads, global_step: int, os: Os) -> None:
        self.heads = heads
        self._directory = directory
        self._global_step = global_step
        self._os = os
        self._read: dict[int, RankPart] = {}
        self.shares = by_unit(heads.units)
        self._joined: dict[str, UnitEntry] = {}
        self._lock = threading.Lock()

    @property
    def units(self) -> Lazy[str, UnitEntry]:
        """KeyError for one that there is not; other errors as of `of`."""
        return Lazy(self, self.shares, self._unit)

    @property
    def locals(self) -> Lazy[int, LocalEntry]:
        """As `units`, by the ranks whose state it is."""
        return Lazy(self, self.heads.locals, lambda rank: self.of(self.heads.locals[rank].writer).locals[rank])

    def of(self, rank: int) -> RankPart:
        """What this rank wrote. IncompleteError, FormatError or StorageError, naming the file."""
        with self._lock:
            if rank not in self._read:
                self._read[rank] = self._checked(rank)
            return self._read[rank]

    def _unit(self, unit: str) -> UnitEntry:
        shares = self.shares[unit]
        found = {str(share): self.of(self.heads.units[str(share)].writer).units[str(share)] for share in shares}
        if unit in found:
            return found[unit]
        with self._lock:
            if unit not in self._joined:
                self._joined[unit] = self._together(unit, found)
            return self._joined[unit]

    def _together(self, unit: str, found: Mapping[str, UnitEntry]) -> UnitEntry:
        with told(self._directory):
            whole = together(found)
            problem = meta_problem(whole, {})
            if problem is not None:
                raise FormatError(problem)
            return whole[unit]

    def head(self, unit: str) -> UnitHead:
        """What the manifest says of a unit; of one that was shared, of its first share."""
        return self.heads.units[str(self.shares[unit][0])]

    def forget(self, unit: str) -> None:
        """Drop from memory what the writers of a unit wrote; it is read again when somebody asks."""
        with self._lock:
            self._joined.pop(unit, None)
            for share in self.shares[unit]:
                self._read.pop(self.heads.units[str(share)].writer, None)

    def _checked(self, rank: int) -> RankPart:
        heads, entry = self.heads, self.heads.files[rank]
        path = self._directory / entry.description
        fd = open_part_file(path, _files_of(entry)[1], self._os)
        try:
            raw = read_exactly(fd, entry.part_bytes, path, self._os)
        finally:
            close(fd, path, self._os)
        if xxhash.xxh3_64_hexdigest(raw) != entry.part_sum:
            raise FormatError(damage(path, "its bytes do not match the checksum in the manifest"))
        part = RankPart.decode(raw, path)
        said = replace(part.file, chunks=(), part_bytes=entry.part_bytes, part_sum=entry.part_sum)
        if part.rank != rank or said != entry or part.global_step != self._global_step:
            raise FormatError(damage(path, "it does not describe the file that the manifest names"))
        units = {unit for unit, head in heads.units.items() if head.writer == rank}
        locals_ = {owner for owner, head in heads.locals.items() if head.writer == rank}
        if part.units.keys() != units or part.locals.keys() != locals_:
            raise FormatError(damage(path, "its units or local states differ from the manifest"))
        problem = part.contradiction() or meta_problem(part.units, part.locals) or facts_problem(part.facts)
        if problem is not None:
            raise FormatError(damage(path, problem))
        return part


class Lazy(Mapping[K, E]):
    """Units or local states, out of their writers' parts. Names and number are known without reading."""

    def __init__(self, tables: PartTables, names: Collection[K], read: Callable[[K], E]) -> None:
        self.tables = tables
        self._names = names
        self._read = read

    def __getitem__(self, name: K) -> E:
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[K]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lazy) and other.tables.heads == self.tables.heads and [*other] == [*self]

    __hash__ = None  # type: ignore[assignment]
