"""The tables of a large checkpoint, which stay in its writers' part.json and are read when somebody asks for them.

What a reader needs to choose a checkpoint, and to find who wrote what, stands in the manifest. The rest is looked up
here, a writer's part at a time, and held against the manifest: whoever reads one rank's share opens one rank's files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import xxhash

from lastwords.checkpoint import layout
from lastwords.checkpoint.codec import Number
from lastwords.checkpoint.document import damage, told
from lastwords.checkpoint.entries import Entry, FileEntry, LocalEntry, UnitEntry, by_unit, meta_problem, together
from lastwords.checkpoint.meta_checks import facts_problem
from lastwords.checkpoint.part import Part
from lastwords.checkpoint.partfile import open_description, read_exactly
from lastwords.checkpoint.reason import Reason
from lastwords.checkpoint.system import Os, close
from lastwords.errors import FormatError

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
        self._read: dict[int, Part] = {}
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

    def of(self, rank: int) -> Part:
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

    def _checked(self, rank: int) -> Part:
        heads, entry = self.heads, self.heads.files[rank]
        path = self._directory / layout.rank_dir_name(rank) / layout.PART_NAME
        fd = open_description(self._directory, entry, self._os)
        try:
            raw = read_exactly(fd, entry.part_bytes, 0, path, self._os)
        finally:
            close(fd, path, self._os)
        if xxhash.xxh3_64_hexdigest(raw) != entry.part_sum:
            raise FormatError(damage(path, "its bytes do not match the checksum in the manifest"))
        part = Part.decode(raw, path)
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
