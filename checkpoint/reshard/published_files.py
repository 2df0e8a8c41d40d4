"""Files of last words that still lie in their checkpoint's directory: its manifest knows their checksums."""

from __future__ import annotations

from pathlib import Path

from lastwords.checkpoint import layout
from lastwords.checkpoint.cuts import Piece
from lastwords.checkpoint.document import damage
from lastwords.checkpoint.entries import FileEntry, UnitEntry
from lastwords.checkpoint.format import Header
from lastwords.checkpoint.manifest import Manifest, read_published
from lastwords.checkpoint.partfile import check_header
from lastwords.checkpoint.reader_lock import ReaderLock
from lastwords.checkpoint.slice_reader import StoredTensor
from lastwords.checkpoint.system import Os, where_it_leads
from lastwords.errors import FormatError


class PublishedFiles:
    """Manifests beside files, each read once. For one thread. Nobody prunes their checkpoints while this lives."""

    def __init__(self, os: Os) -> None:
        self._os = os
        self._manifests: dict[Path, Manifest] = {}
        self._held: list[ReaderLock] = []
        self._opened: dict[Path, tuple[FileEntry, Header]] = {}

    def entry_of(self, path: Path) -> tuple[FileEntry, Header] | None:
        """Checksums of `path` (CHECKPOINT/rank_N/NAME) and its checked header; None if no manifest lies beside.

        FormatError for a manifest that is damaged or lists no such file, and for a header that is not as it says.
        """
        real = where_it_leads(path)
        directory = real.parent.parent
        manifest = self._manifest_of(real)
        if manifest is None:
            return None
        name = f"{real.parent.name}/{real.name}"
        entry = next((one for one in manifest.files if one.path == name), None)
        if entry is None:
            raise FormatError(
                damage(
                    directory / layout.MANIFEST_NAME,
                    f"it does not list {name}, so that file's checksums are unknown; move files that are not "
                    f"part of the checkpoint out of its directory",
                )
            )
        header = check_header(
            directory, entry, manifest.tensors_of(entry), rank=layout.PartPath.parse(name, where=str(directory)).rank,
            global_step=manifest.global_step, os=self._os,
        )  # fmt: skip
        return manifest.with_chunks(entry), header

    def unit_of(self, path: Path, unit: str) -> UnitEntry | None:
        """The unit of which this file has shares, out of all of them; None if no manifest lies beside the file."""
        manifest = self._manifest_of(where_it_leads(path))
        return None if manifest is None else manifest.units[unit]

    def stored(self, path: Path, unit: str, name: str) -> tuple[StoredTensor, ...]:
        """Where a tensor of such a unit lies. Errors as of `entry_of`."""
        entry = self.unit_of(path, unit)
        assert entry is not None, "its file was opened by `unit_of`"
        return tuple(self._piece(path, entry.shares[piece.share].file, piece) for piece in entry.wholes[name].pieces)

    def _piece(self, path: Path, file: str, piece: Piece) -> StoredTensor:
        beside = where_it_leads(path).parent.parent / file
        found = self._opened.get(beside) or self.entry_of(beside)
        assert found is not None
        self._opened[beside] = found
        entry, header = found
        return StoredTensor(beside, header.tensors[piece.spec.name][1], piece.spec, entry, piece.offsets)

    def _manifest_of(self, real: Path) -> Manifest | None:
        directory = real.parent.parent
        if layout.parse_rank_dir(real.parent.name) is None or not self._os.exists(directory / layout.MANIFEST_NAME):
            return None
        if directory not in self._manifests:
            self._held.append(ReaderLock.take(directory, self._os))
            self._manifests[directory] = read_published(directory, self._os)
        return self._manifests[directory]

    def nobody_has(self, name: str) -> bool:
        """Whether no unit of the checkpoints that were met holds a tensor; False if none was met."""
        units = [item for manifest in self._manifests.values() for item in manifest.units.items()]
        return bool(units) and not any(
            spec.name == f"unit/{unit}/{name}" for unit, entry in units for spec in entry.tensors
        )
