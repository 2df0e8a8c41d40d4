"""Checking one .ckpt file against what the manifest (or part.json) says of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import xxhash

from lastwords.checkpoint.document import damage
from lastwords.checkpoint.entries import FileEntry
from lastwords.checkpoint.format import METADATA_KEY, Header, TensorSpec, decode_header, header_length
from lastwords.checkpoint.system import REAL_OS, Os, close, storage_error, storage_errors
from lastwords.checkpoint.versions import FILE_FORMAT
from lastwords.errors import FormatError, IncompleteError


def open_part_file(path: Path, entry: FileEntry, os: Os) -> int:
    """Descriptor of the file, whose size is right. IncompleteError if it is missing, FormatError if truncated."""
    try:
        fd = os.open_read(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(path, entry) from error
    except OSError as error:
        raise storage_error("opening", path, error) from error
    try:
        with storage_errors("reading", path):
            size = os.size(fd)
        _check_size(path, size, entry)
    except BaseException:
        close(fd, path, os)
        raise
    return fd


def check_present(directory: Path, entry: FileEntry, os: Os) -> None:
    """As `check_sizes`, by a look at the names alone: nothing is opened, so that thousands of files take no time."""
    _check_present(directory / entry.path, entry, os)
    if entry.part_sum:
        _check_present(
            directory / entry.description, replace(entry, path=entry.description, bytes=entry.part_bytes), os
        )


def _check_present(path: Path, entry: FileEntry, os: Os) -> None:
    try:
        size = os.size(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(path, entry) from error
    except OSError as error:
        raise storage_error("looking at", path, error) from error
    _check_size(path, size, entry)


def _missing(path: Path, entry: FileEntry) -> IncompleteError:
    return IncompleteError(f"{path} is missing; restore it or use another checkpoint", missing=(entry.path,))


def _check_size(path: Path, size: int, entry: FileEntry) -> None:
    if size != entry.bytes:
        kind = "truncated" if size < entry.bytes else "too long"
        raise FormatError(damage(path, f"it is {kind}: {size} bytes where the manifest says {entry.bytes}"))


def open_description(directory: Path, entry: FileEntry, os: Os) -> int:
    """As `open_part_file`, the part.json beside a file whose entry says how long that is."""
    described = replace(entry, path=entry.description, bytes=entry.part_bytes)
    return open_part_file(directory / entry.description, described, os)


def check_sizes(directory: Path, entry: FileEntry, os: Os) -> None:
    """IncompleteError or FormatError unless the file, and what describes it, are there and have the right sizes."""
    close(open_part_file(directory / entry.path, entry, os), directory / entry.path, os)
    if entry.part_sum:
        close(open_description(directory, entry, os), directory / entry.path, os)


def read_exactly(fd: int, count: int, offset: int, path: Path, os: Os) -> bytes:
    """`count` bytes at `offset`; FormatError if the file ends before."""
    buffer = bytearray(count)
    view = memoryview(buffer)
    done = 0
    with storage_errors("reading", path):
        while done < count:
            got = os.preadv(fd, [view[done:]], offset + done)
            if got == 0:
                raise FormatError(damage(path, f"it ends at byte {offset + done}"))
            done += got
    return bytes(buffer)


def read_header(
    fd: int, directory: Path, entry: FileEntry, specs: Mapping[str, TensorSpec], *, rank: int, global_step: int, os: Os
) -> Header:
    """Header of an open file, checked against the file's size, the step, its checksum and the listed tensors."""
    path = directory / entry.path
    where = str(path)
    length = header_length(read_exactly(fd, 8, 0, path, os), file_bytes=entry.bytes, where=where)
    raw = read_exactly(fd, length, 0, path, os)
    header = decode_header(raw, file_bytes=entry.bytes, where=where)
    # The step comes before the checksum: "of another step" says more than "damaged".
    _check_metadata(header, where, rank=rank, global_step=global_step)
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
    try:
        fd = os.open_read(path)
    except OSError as error:
        raise storage_error("opening", path, error) from error
    try:
        with storage_errors("reading", path):
            size = os.size(fd)
        length = header_length(read_exactly(fd, min(8, size), 0, path, os), file_bytes=size, where=str(path))
        return decode_header(read_exactly(fd, length, 0, path, os), file_bytes=size, where=str(path))
    finally:
        close(fd, path, os)


def check_header(
    directory: Path,
    entry: FileEntry,
    specs: Mapping[str, TensorSpec],
    *,
    rank: int,
    global_step: int,
    os: Os = REAL_OS,
) -> Header:
    """Opens the file and checks size and header; the data are not read."""
    fd = open_part_file(directory / entry.path, entry, os)
    try:
        return read_header(fd, directory, entry, specs, rank=rank, global_step=global_step, os=os)
    finally:
        close(fd, directory / entry.path, os)


def check_unchanged(directory: Path, entry: FileEntry, os: Os = REAL_OS) -> None:
    """Size and header's checksum once more, cheaply, for a file that `check_header` has seen before."""
    path = directory / entry.path
    fd = open_part_file(directory / entry.path, entry, os)
    try:
        raw = read_exactly(fd, min(entry.header_bytes, entry.bytes), 0, path, os)
    finally:
        close(fd, path, os)
    if xxhash.xxh3_64_hexdigest(raw) != entry.header_sum:
        raise FormatError(damage(path, "its header does not match its checksum"))


def _check_metadata(header: Header, where: str, *, rank: int, global_step: int) -> None:
    text = header.metadata.get(METADATA_KEY)
    if text is None:
        raise FormatError(damage(where, "it was not written by lastwords: its metadata lack the key 'lastwords'"))
    try:
        content = json.loads(text)
        version, found_rank, found_step = content["format"], content["rank"], content["global_step"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(damage(where, "its metadata cannot be read")) from error
    if type(version) is int and version > FILE_FORMAT:
        raise FormatError(
            f"{where} was written by a newer lastwords, format {version}; this one reads up to {FILE_FORMAT}; upgrade"
        )
    if found_step != global_step:
        raise FormatError(
            f"{where} is of global step {found_step}, the manifest is of step {global_step}; a file of another "
            "checkpoint was put here: restore the right file or use another checkpoint"
        )
    if found_rank != rank:
        raise FormatError(
            f"{where} was written by rank {found_rank}, not by rank {rank}; restore the right file or use another "
            "checkpoint"
        )
