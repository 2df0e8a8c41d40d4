"""One writer's share of a checkpoint: a .ckpt file and the part.json that describes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from lastwords.checkpoint import layout
from lastwords.checkpoint.direct_io import Buffer, DirectWriter, as_bytes
from lastwords.checkpoint.document import DOCUMENT_BYTES_MAX, Fields, decode_document, encode_document
from lastwords.checkpoint.format import METADATA_KEY, TensorSpec, encode_header, file_order, is_checksum
from lastwords.checkpoint.storable import pack, unpack
from lastwords.checkpoint.system import (
    REAL_OS,
    Os,
    close,
    make_directories,
    make_directory,
    read_whole,
    storage_errors,
    sync_directory,
)
from lastwords.errors import ConfigError, FormatError

PART_FORMAT = 1
FILE_FORMAT = 1

TensorSource = Buffer | Callable[[], Buffer]
"""A tensor's bytes, contiguous: a buffer that stays as it is until `write_part` returns, or a function that is called
once, when its turn has come, and may use the same memory again for the next tensor."""


@dataclass(frozen=True, slots=True)
class UnitState:
    """A unit as it is handed to `write_part`. `meta` is everything that is not a tensor (see `storable`)."""

    tensors: Sequence[tuple[TensorSpec, TensorSource]]
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LocalState:
    """What belongs to one rank alone. If not `exact`, `reasons` says why a resume cannot be."""

    tensors: Sequence[tuple[TensorSpec, TensorSource]]
    meta: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A .ckpt file: `path` below the checkpoint's directory, sizes in bytes, xxh3_64 as hexadecimal."""

    path: str
    bytes: int
    header_bytes: int
    header_sum: str
    chunks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "bytes": self.bytes,
            "header_bytes": self.header_bytes,
            "header_sum": self.header_sum,
            "chunks": list(self.chunks),
        }

    @staticmethod
    def from_json(fields: Fields, where: Path) -> FileEntry:
        path = str(layout.PartPath.parse(fields.text("path"), where=str(where)))
        chunks, header_sum = fields.texts("chunks"), fields.text("header_sum")
        if not all(is_checksum(text) for text in (*chunks, header_sum)):
            fields.refuse(f"a checksum of {path} is not 16 hexadecimal digits")
        return FileEntry(path, fields.integer("bytes"), fields.integer("header_bytes", least=8), header_sum, chunks)


@dataclass(frozen=True, slots=True)
class UnitEntry:
    """Where a unit is: the rank that wrote it, its file, its tensors and its `meta`."""

    writer: int
    file: str
    tensors: tuple[TensorSpec, ...]
    meta: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "writer": self.writer,
            "file": self.file,
            "tensors": [_spec_to_json(spec) for spec in self.tensors],
            "meta": pack(dict(self.meta), "meta"),
        }

    @staticmethod
    def from_json(fields: Fields, where: Path) -> UnitEntry:
        return UnitEntry(
            writer=fields.integer("writer"),
            file=str(layout.PartPath.parse(fields.text("file"), where=str(where))),
            tensors=_specs_from_json(fields, where),
            meta=_meta(fields, where),
        )


@dataclass(frozen=True, slots=True)
class LocalEntry:
    """Where one rank's local state is; `writer` is the rank that wrote it (of the same host, not itself if it died)."""

    writer: int
    file: str
    tensors: tuple[TensorSpec, ...]
    meta: Mapping[str, Any]
    exact: bool
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "writer": self.writer,
            "file": self.file,
            "tensors": [_spec_to_json(spec) for spec in self.tensors],
            "meta": pack(dict(self.meta), "meta"),
            "exact": self.exact,
            "reasons": list(self.reasons),
        }

    @staticmethod
    def from_json(fields: Fields, where: Path) -> LocalEntry:
        return LocalEntry(
            writer=fields.integer("writer"),
            file=str(layout.PartPath.parse(fields.text("file"), where=str(where))),
            tensors=_specs_from_json(fields, where),
            meta=_meta(fields, where),
            exact=fields.truth("exact"),
            reasons=fields.texts("reasons"),
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Content of part.json. global_step, epoch and step are 1-based; `facts` is free JSON about the writer."""

    rank: int
    global_step: int
    epoch: int
    step: int
    job: str
    file: FileEntry
    units: Mapping[str, UnitEntry]
    locals: Mapping[int, LocalEntry]
    facts: Mapping[str, Any]

    def encode(self) -> bytes:
        return encode_document(
            {
                "format_version": PART_FORMAT,
                "rank": self.rank,
                "global_step": self.global_step,
                "epoch": self.epoch,
                "step": self.step,
                "job": self.job,
                "file": self.file.to_json(),
                "units": {unit: entry.to_json() for unit, entry in self.units.items()},
                "locals": {str(rank): entry.to_json() for rank, entry in self.locals.items()},
                "facts": pack(dict(self.facts), "facts"),
            }
        )

    @staticmethod
    def decode(raw: bytes, where: Path) -> Part:
        """FormatError if it is damaged or newer than this code."""
        fields = Fields(decode_document(raw, where=where, version_max=PART_FORMAT), where)
        return Part(
            rank=fields.integer("rank"),
            global_step=fields.integer("global_step", least=1),
            epoch=fields.integer("epoch", least=1),
            step=fields.integer("step", least=1),
            job=fields.text("job"),
            file=FileEntry.from_json(fields.inner("file"), where),
            units=units_from_json(fields.inner("units"), where),
            locals=locals_from_json(fields.inner("locals"), where),
            facts=facts_from_json(fields, where),
        )


def units_from_json(fields: Fields, where: Path) -> dict[str, UnitEntry]:
    return {unit: UnitEntry.from_json(fields.inner(unit), where) for unit in fields.keys()}  # noqa: SIM118


def locals_from_json(fields: Fields, where: Path) -> dict[int, LocalEntry]:
    found: dict[int, LocalEntry] = {}
    for key in fields.keys():  # noqa: SIM118
        if not (key.isascii() and key.isdigit()) or str(int(key)) != key:
            fields.refuse(f"{key!r} is not a rank")
        found[int(key)] = LocalEntry.from_json(fields.inner(key), where)
    return dict(sorted(found.items()))


def facts_from_json(fields: Fields, where: Path) -> dict[str, Any]:
    facts = unpack(fields.raw("facts"), f"{where}: facts")
    if not isinstance(facts, dict):
        fields.refuse("facts is not an object")
    return facts


def _meta(fields: Fields, where: Path) -> dict[str, Any]:
    meta = unpack(fields.raw("meta"), f"{where}: meta")
    if not isinstance(meta, dict):
        fields.refuse("meta is not an object")
    return meta


def _spec_to_json(spec: TensorSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "global_shape": list(spec.global_shape),
        "offsets": list(spec.offsets),
    }


def _specs_from_json(fields: Fields, where: Path) -> tuple[TensorSpec, ...]:
    try:
        return tuple(
            TensorSpec(
                item.text("name"),
                item.text("dtype"),
                item.integers("shape"),
                item.integers("global_shape"),
                item.integers("offsets"),
            )
            for item in fields.inners("tensors")
        )
    except ConfigError as error:
        raise FormatError(f"{where} is damaged: {error}; use another checkpoint") from error


def _check_names(
    units: Mapping[str, UnitState], locals: Mapping[int, LocalState]
) -> list[tuple[TensorSpec, TensorSource]]:
    every: list[tuple[TensorSpec, TensorSource]] = []
    for unit, state in units.items():
        layout.check_unit_name(unit)
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
    order = file_order(spec for spec, _ in every)
    content = {
        "format": FILE_FORMAT,
        "rank": rank,
        "global_step": global_step,
        "epoch": epoch,
        "step": step,
        "job": job,
        "units": {unit: pack(dict(state.meta), f"units[{unit!r}]") for unit, state in units.items()},
        "local": {str(owner): pack(dict(state.meta), f"local[{owner}]") for owner, state in locals.items()},
    }
    header = encode_header(
        [every[index][0] for index in order], {METADATA_KEY: json.dumps(content, separators=(",", ":"))}
    )
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
                unit: UnitEntry(rank, str(path), tuple(spec for spec, _ in state.tensors), state.meta)
                for unit, state in units.items()
            },
            locals={
                owner: LocalEntry(
                    rank,
                    str(path),
                    tuple(spec for spec, _ in local.tensors),
                    local.meta,
                    local.exact,
                    tuple(local.reasons),
                )
                for owner, local in locals.items()
            },
            facts=facts,
        )
        # Not fsynced: it is read once, for the manifest, and nobody looks for it after a crash.
        write_document(rank_dir / layout.PART_NAME, part.encode(), os, durable=False)
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


def write_document(path: Path, raw: bytes, os: Os, *, durable: bool) -> None:
    """Writes a small new file; `durable`: its content is on the disk on return (its name is the caller's)."""
    with storage_errors("writing", path):
        fd = os.create(path, direct=False)
        try:
            view = memoryview(raw)
            done = 0
            while done < len(raw):
                done += os.pwrite(fd, view[done:], done)
            if durable:
                os.fsync(fd)
        finally:
            close(fd, path, os)


def read_part(rank_dir: Path, os: Os = REAL_OS) -> Part:
    """part.json of one writer; FileNotFoundError, FormatError or StorageError."""
    path = rank_dir / layout.PART_NAME
    return Part.decode(read_whole(path, os, bytes_max=DOCUMENT_BYTES_MAX), path)
