"""The files of a published checkpoint, each checked when something of it is wanted, and the tensors in them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lastwords.checkpoint import layout
from lastwords.checkpoint.entries import Entry, FileEntry, UnitEntry
from lastwords.checkpoint.format import Header, TensorSpec
from lastwords.checkpoint.manifest import Manifest
from lastwords.checkpoint.partfile import check_header
from lastwords.checkpoint.system import Os
from lastwords.errors import FormatError, IncompleteError


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
    """A file whose size and header have been checked: its chunks' sums, and where its tensors begin and end in it."""

    entry: FileEntry
    places: dict[str, tuple[TensorSpec, int, int]]


class Run(NamedTuple):
    """A tensor in a file, or a slice of one. begin: of its first byte. offsets: of a slice in the tensor."""

    file: str
    spec: TensorSpec
    begin: int
    offsets: tuple[int, ...]


class OpenedFiles:
    """Files of one checkpoint. Any thread. Raises IncompleteError, FormatError or StorageError for what is wrong."""

    def __init__(self, path: Path, manifest: Manifest, os: Os) -> None:
        self._path = path
        self._manifest = manifest
        self._os = os
        self._heads = {entry.path: entry for entry in manifest.files}
        self._opened: dict[str, OpenedFile] = {}
        self._lock = threading.Lock()

    def open_all(self) -> None:
        """Check size and header of every file."""
        for file in self._heads:
            self.open(file)

    def open(self, file: str) -> OpenedFile:
        """The file, whose size and header have been checked."""
        with self._lock:
            opened = self._opened.get(file)
            if opened is None:
                head = self._heads[file]
                header = check_file(self._path, self._manifest, head, self._os)
                specs = self._manifest.tensors_of(head)
                places = {name: (spec, *header.tensors[name][1:]) for name, spec in specs.items()}
                opened = self._opened[file] = OpenedFile(self._manifest.with_chunks(head), places)
            return opened

    def find(self, name: str) -> tuple[TensorSpec, list[Run]]:
        """A tensor, and its slices in their order; IncompleteError if there is none of that name."""
        entry = self._owner_of(name)
        if entry is None:
            raise self._no_tensor(name)
        if not (isinstance(entry, UnitEntry) and entry.shares):
            run = self._run(name, entry.file, name)
            return run.spec, [run]
        whole = entry.wholes.get(name)
        if whole is None:
            raise self._no_tensor(name)
        files = [one.file for one in entry.shares]
        return whole.spec, [self._run(name, files[one.share], one.spec.name, one.offsets) for one in whole.pieces]

    def _run(self, name: str, file: str, stored: str, offsets: tuple[int, ...] = ()) -> Run:
        place = self.open(file).places.get(stored)
        if place is None:
            raise self._no_tensor(name)
        return Run(file, *place[:2], offsets)

    def _no_tensor(self, name: str) -> IncompleteError:
        return IncompleteError(f"{self._path} has no tensor {name!r}", missing=(name,))

    def _owner_of(self, name: str) -> Entry | None:
        """What has a tensor, if anything has: its unit, or its rank's local state."""
        try:
            parsed = layout.parse_tensor_name(name)
        except FormatError:
            return None
        if isinstance(parsed, layout.UnitTensorName):
            return self._manifest.units.get(parsed.unit)
        return self._manifest.locals.get(parsed.rank)
