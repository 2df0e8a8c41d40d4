"""One writer's share of a checkpoint: a .ckpt file and the part.json that describes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from lastwords.checkpoint import layout
from lastwords.checkpoint.codec import Number, Positive, brief, typed
from lastwords.checkpoint.direct_io import CHUNK_BYTES, Buffer, DirectWriter, as_bytes
from lastwords.checkpoint.document import (
    DOCUMENT_BYTES_MAX,
    decode_document,
    encode_document,
    in_steps,
    read_document,
    told,
)
from lastwords.checkpoint.entries import (
    FileEntry,
    LocalEntry,
    UnitEntry,
    by_name,
    by_rank,
    entries,
    local_summary,
    owners_contradiction,
    unit_summary,
    unpacked,
)
from lastwords.checkpoint.format import METADATA_KEY, TensorSpec, encode_header, file_order
from lastwords.checkpoint.meta import EMPTY_UNIT, FileContent, LocalMeta, UnitMeta
from lastwords.checkpoint.reason import Reason
from lastwords.checkpoint.storable import pack
from lastwords.checkpoint.system import (
    REAL_OS,
    Os,
    close,
    make_directories,
    make_directory,
    pwrite_all,
    storage_errors,
    sync_directory,
)
from lastwords.checkpoint.versions import FILE_FORMAT, PART_FORMAT
from lastwords.errors import ConfigError, StorageError

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
class Part(Written):
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
    def decode(raw: bytes, where: Path) -> Part:
        """FormatError if it is damaged or newer than this code."""
        content = decode_document(raw, where=where, version_max=PART_FORMAT)
        with told(where):
            content["units"] = entries(by_name(content.get("units"), "units"), UnitEntry, "units")
            content["locals"] = entries(by_rank(content.get("locals"), "locals"), LocalEntry, "locals")
            content["facts"] = unpacked(content.get("facts"), "facts")
            return typed(content, Part, "")


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
) -> Part:
    """Writes this rank's .ckpt, durable on return, and part.json into `directory` (a `layout.tmp_dir`).

    May be called from any thread; adds about 24 MiB of memory while it runs. `progress(bytes_written)` is called on
    this thread at least once for every 4 MiB and may raise to cancel. Raises StorageError, or ConfigError for state
    that cannot be stored; then the unfinished file is removed as far as that is possible.
    """
    every = _check_names(units, locals)
    said = {unit: state.meta.to_json() for unit, state in units.items()}
    said_of_ranks = {owner: state.meta.to_json() for owner, state in locals.items()}
    order = file_order(spec for spec, _ in every)
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
    header = encode_header([every[index][0] for index in order], {METADATA_KEY: in_steps(content.to_json())})
    path = layout.PartPath(rank, epoch, step)
    rank_dir = directory / layout.rank_dir_name(rank)
    # Their names become durable below (rank_dir's in `directory`) and with the publication (`directory`'s in its root).
    make_directories(directory.parent, os)
    make_directory(directory, os)
    make_directory(rank_dir, os)
    file = directory / str(path)
    try:
        with DirectWriter(
            file, len(header) + sum(spec.nbytes for spec, _ in every), os=os, progress=progress
        ) as writer:
            writer.write(header, stable=True)
            for index in order:
                spec, source = every[index]
                data = as_bytes(source() if callable(source) else source)
                if data.nbytes != spec.nbytes:
                    raise ConfigError(f"tensor {spec.name!r} has {data.nbytes} bytes, its spec says {spec.nbytes}")
                # What a function makes may be a staging buffer that it uses again; a buffer is the tensor itself.
                writer.write(data, stable=not callable(source))
            total = writer.finish()
        part = Part(
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
        write_document(rank_dir / layout.PART_NAME, part.encode(), os, durable=True)
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


def remove_part(directory: Path, part: Part, os: Os = REAL_OS) -> None:
    """Removes what `write_part` has written below `directory`; StorageError if that is impossible."""
    for path in (directory / layout.rank_dir_name(part.rank) / layout.PART_NAME, directory / part.file.path):
        with storage_errors("removing", path):
            os.unlink(path)


def write_document(path: Path, raw: bytes, os: Os, *, durable: bool) -> None:
    """Writes a small new file; `durable`: its content is on the disk on return (its name is the caller's).

    StorageError, and no file, also for one that is larger than anybody reads.
    """
    if len(raw) > DOCUMENT_BYTES_MAX:
        raise StorageError(
            f"{path} would have {len(raw)} bytes, more than the {DOCUMENT_BYTES_MAX} that can be read: keep large "
            "values in tensors, not in extras or facts"
        )
    with storage_errors("writing", path):
        fd = os.create(path, direct=False)
        try:
            pwrite_all(os, fd, raw)
            if durable:
                os.fsync(fd)
        finally:
            close(fd, path, os)


def read_part(rank_dir: Path, os: Os = REAL_OS) -> Part:
    """part.json of one writer; FileNotFoundError, FormatError or StorageError."""
    path = rank_dir / layout.PART_NAME
    return Part.decode(read_document(path, os), path)
