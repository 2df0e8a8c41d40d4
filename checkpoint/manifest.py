"""manifest.json: what a published checkpoint is made of, and where and why it was made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastwords.checkpoint import layout
from lastwords.checkpoint.direct_io import CHUNK_BYTES
from lastwords.checkpoint.document import DOCUMENT_BYTES_MAX, Fields, damage, decode_document, encode_document
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.part import (
    FileEntry,
    LocalEntry,
    UnitEntry,
    facts_from_json,
    locals_from_json,
    units_from_json,
)
from lastwords.checkpoint.storable import pack
from lastwords.checkpoint.system import REAL_OS, Os, read_whole
from lastwords.errors import ConfigError, FormatError, IncompleteError, StorageError

MANIFEST_FORMAT = 1
"""Newest `format_version` that this code reads, and the one it writes."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of manifest.json.

    global_step, epoch, step: 1-based; the state is that at the end of this step. cause_ranks: the ranks that started
    the incident. published_unix_ns: wall clock of the controller's host, for people and for ordering checkpoints.
    exact: False if a resume will differ from the uninterrupted run; then `reasons` says why.
    facts: what the numbers depend on beside the state (torch version, threads, DDP options, bucket
    order, data options).
    """

    format_version: int
    job: str
    parent_job: str
    generation: int
    incident: int
    attempt: int
    global_step: int
    epoch: int
    step: int
    world_size: int
    reason: str
    cause_ranks: tuple[int, ...]
    published_unix_ns: int
    files: tuple[FileEntry, ...]
    units: Mapping[str, UnitEntry]
    locals: Mapping[int, LocalEntry]
    exact: bool
    reasons: tuple[str, ...]
    facts: Mapping[str, Any]

    @property
    def total_bytes(self) -> int:
        """Bytes of all .ckpt files."""
        return sum(entry.bytes for entry in self.files)

    @property
    def holders_world_size(self) -> int:
        """Ranks among which the holders of units are numbered: `world_size`, unless a transformation moved the units.

        Then rank-local state is still that of the ranks that saved it.
        """
        moved = self.facts.get("moved")
        size = moved.get("world_size") if isinstance(moved, dict) else None
        return size if type(size) is int and size > 0 else self.world_size

    @property
    def moved(self) -> bool:
        """True for a checkpoint whose units were transformed into another layout (`lastwords transform`)."""
        return isinstance(self.facts.get("moved"), dict)

    def file(self, path: str) -> FileEntry:
        """Entry of the file with this relative path."""
        return next(entry for entry in self.files if entry.path == path)

    def tensors_of(self, path: str) -> dict[str, TensorSpec]:
        """Tensors that a file holds according to the units and local states in it."""
        owners: list[UnitEntry | LocalEntry] = [*self.units.values(), *self.locals.values()]
        return {spec.name: spec for owner in owners if owner.file == path for spec in owner.tensors}

    def encode(self) -> bytes:
        """Bytes of manifest.json."""
        return encode_document(
            {
                "format_version": self.format_version,
                "job": self.job,
                "parent_job": self.parent_job,
                "generation": self.generation,
                "incident": self.incident,
                "attempt": self.attempt,
                "global_step": self.global_step,
                "epoch": self.epoch,
                "step": self.step,
                "world_size": self.world_size,
                "reason": self.reason,
                "cause_ranks": list(self.cause_ranks),
                "published_unix_ns": self.published_unix_ns,
                "files": [entry.to_json() for entry in self.files],
                "units": {unit: entry.to_json() for unit, entry in self.units.items()},
                "locals": {str(rank): entry.to_json() for rank, entry in self.locals.items()},
                "exact": self.exact,
                "reasons": list(self.reasons),
                "facts": pack(dict(self.facts), "facts"),
            }
        )

    @staticmethod
    def decode(raw: bytes, where: Path) -> Manifest:
        """FormatError if it is damaged, contradicts itself, or is of a newer format (the message says which)."""
        fields = Fields(decode_document(raw, where=where, version_max=MANIFEST_FORMAT), where)
        manifest = Manifest(
            format_version=fields.integer("format_version", least=1),
            job=fields.text("job"),
            parent_job=fields.text("parent_job"),
            generation=fields.integer("generation"),
            incident=fields.integer("incident"),
            attempt=fields.integer("attempt"),
            global_step=fields.integer("global_step", least=1),
            epoch=fields.integer("epoch", least=1),
            step=fields.integer("step", least=1),
            world_size=fields.integer("world_size", least=1),
            reason=fields.text("reason"),
            cause_ranks=fields.integers("cause_ranks"),
            published_unix_ns=fields.integer("published_unix_ns"),
            files=tuple(FileEntry.from_json(item, where) for item in fields.inners("files")),
            units=units_from_json(fields.inner("units"), where),
            locals=locals_from_json(fields.inner("locals"), where),
            exact=fields.truth("exact"),
            reasons=fields.texts("reasons"),
            facts=facts_from_json(fields, where),
        )
        problem = contradiction(manifest)
        if problem is not None:
            raise FormatError(damage(where, problem))
        return manifest


def contradiction(manifest: Manifest) -> str | None:
    """First thing in which the manifest contradicts itself, in words; None if it is sound.

    Called before publishing (a contradiction is then our own mistake) and on reading.
    """
    paths = [entry.path for entry in manifest.files]
    if len(set(paths)) != len(paths):
        return "it lists one file twice"
    if not manifest.units:
        return "it has no unit"
    for entry in manifest.files:
        if len(entry.chunks) != -(-entry.bytes // CHUNK_BYTES) or entry.header_bytes > entry.bytes:
            return f"it has {len(entry.chunks)} checksums for the {entry.bytes} bytes of {entry.path}"
        parsed = layout.PartPath.parse(entry.path, where="manifest")
        if (parsed.epoch, parsed.step) != (manifest.epoch, manifest.step):
            return f"file {entry.path} is of another step than epoch {manifest.epoch}, step {manifest.step}"
    names: set[str] = set()
    owners: list[tuple[str, UnitEntry | LocalEntry]] = [
        *((f"unit/{unit}/", entry) for unit, entry in manifest.units.items()),
        *((f"local/{rank}/", entry) for rank, entry in manifest.locals.items()),
    ]
    for prefix, owner in owners:
        if owner.file not in paths:
            return f"{prefix[:-1]} is in {owner.file}, which is not among its files"
        if layout.PartPath.parse(owner.file, where="manifest").rank != owner.writer:
            return f"{prefix[:-1]} was written by rank {owner.writer}, but its file is {owner.file}"
        for spec in owner.tensors:
            if not spec.name.startswith(prefix) or spec.name in names:
                return f"tensor {spec.name!r} is listed twice or under {prefix[:-1]}"
            names.add(spec.name)
    for unit in manifest.units:
        try:
            layout.check_unit_name(unit)
        except ConfigError as error:
            return str(error)
    if any(rank >= manifest.world_size for rank in (*manifest.locals, *manifest.cause_ranks)):
        return f"it speaks of a rank outside its world of {manifest.world_size}"
    return None


_PUBLISHED = re.compile(rb'^"published_unix_ns": ([0-9]{1,20}),?$', re.MULTILINE)


def claimed_published_ns(directory: Path, os: Os = REAL_OS) -> int:
    """`published_unix_ns` as it stands in the file, unchecked and fast; 0 if there is none.

    Good for deciding which manifest to decode first: the claim of one that turns out to be sound is true.
    """
    try:
        raw = read_whole(directory / layout.MANIFEST_NAME, os, bytes_max=DOCUMENT_BYTES_MAX)
    except (FileNotFoundError, StorageError):
        return 0  # told by whoever decodes it
    found = _PUBLISHED.search(raw)
    return 0 if found is None else int(found[1])


def read_manifest(directory: Path, os: Os = REAL_OS) -> Manifest:
    """Manifest of a checkpoint directory. IncompleteError if there is none, FormatError if it is damaged or newer."""
    path = directory / layout.MANIFEST_NAME
    try:
        raw = read_whole(path, os, bytes_max=DOCUMENT_BYTES_MAX)
    except FileNotFoundError as error:
        what = "it is no checkpoint or was left unfinished" if os.is_directory(directory) else "there is no directory"
        raise IncompleteError(
            f"{directory} has no {layout.MANIFEST_NAME}: {what}; use another checkpoint",
            missing=(layout.MANIFEST_NAME,),
        ) from error
    return Manifest.decode(raw, path)
