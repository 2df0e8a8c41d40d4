"""manifest.json: what a published checkpoint is made of, and where and why it was made."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lastwords.checkpoint import layout
from lastwords.checkpoint.codec import Number, Positive, brief, typed
from lastwords.checkpoint.direct_io import CHUNK_BYTES
from lastwords.checkpoint.document import (
    claimed_lines,
    damage,
    decode_document,
    encode_document,
    read_document,
    told,
)
from lastwords.checkpoint.entries import (
    Entry,
    FileEntry,
    LocalEntry,
    UnitEntry,
    apart,
    by_name,
    by_rank,
    entries,
    meta_problem,
    owners_contradiction,
    shares_problem,
    together,
    unpacked,
)
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.meta_checks import facts_problem
from lastwords.checkpoint.part import Part
from lastwords.checkpoint.part_tables import Heads, Lazy, PartTables
from lastwords.checkpoint.reason import Reason
from lastwords.checkpoint.retry import NO_FILE
from lastwords.checkpoint.run_facts import RunFacts
from lastwords.checkpoint.storable import pack
from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.checkpoint.versions import MANIFEST_FORMAT
from lastwords.errors import ConfigError, FormatError, IncompleteError, StorageError


class Kind(enum.Enum):
    """Why a checkpoint was taken."""

    LAST_WORDS = "last words"
    PERIODIC = "periodic"
    CONVERTED = "converted"

    @staticmethod
    def of(incident: int, attempt: int) -> Kind:
        """By the two numbers of a manifest: incidents count from 1, and so do the periodic checkpoints of a job.

        >>> Kind.of(1, 1), Kind.of(0, 3), Kind.of(0, 0)
        (<Kind.LAST_WORDS: 'last words'>, <Kind.PERIODIC: 'periodic'>, <Kind.CONVERTED: 'converted'>)
        """
        if incident > 0:
            return Kind.LAST_WORDS
        return Kind.PERIODIC if attempt > 0 else Kind.CONVERTED


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of manifest.json.

    global_step, epoch, step: 1-based; the state is that at the end of this step. Where no writer knew what the loop
    calls it, epoch is EPOCH_UNKNOWN and step the global one. incident: 0 where none was the cause, see `Kind`; then
    attempt counts the job's periodic checkpoints. cause_ranks: the ranks that started the incident. published_unix_ns:
    wall clock of the controller's host, for people and for ordering checkpoints.
    exact: False if a resume will differ from the uninterrupted run; then `reasons` says why.
    facts: what the numbers depend on beside the state (torch version, threads, DDP options, bucket
    order, data options).
    units: by their names, whole also where they are stored in shares.
    """

    job: str
    parent_job: str
    generation: Number
    incident: Number
    attempt: Number
    global_step: Positive
    epoch: Number
    step: Positive
    world_size: Positive
    reason: str
    cause_ranks: tuple[Number, ...]
    published_unix_ns: Number
    files: tuple[FileEntry, ...]
    units: Mapping[str, UnitEntry]
    locals: Mapping[int, LocalEntry]
    exact: bool
    reasons: tuple[Reason, ...]
    facts: Mapping[str, Any]

    @property
    def run(self) -> RunFacts:
        """`facts` as a type. FormatError for what is not as it should be."""
        return RunFacts.read(self.facts)

    @property
    def kind(self) -> Kind:
        """Why it was taken."""
        return Kind.of(self.incident, self.attempt)

    @property
    def is_periodic(self) -> bool:
        """True where no incident was the cause, but the settings of the job."""
        return self.kind is Kind.PERIODIC

    @property
    def named(self) -> bool:
        """False if nobody who saved the step knew what its loop calls it."""
        return self.epoch != layout.EPOCH_UNKNOWN

    @property
    def total_bytes(self) -> int:
        """Bytes of all .ckpt files."""
        return sum(entry.bytes for entry in self.files)

    @property
    def holders_world_size(self) -> int:
        """Ranks among which the holders of units are numbered: `world_size`, unless a transformation moved the units.

        Then rank-local state is still that of the ranks that saved it.
        """
        moved = self.run.moved
        return self.world_size if moved is None else moved.world_size

    @property
    def moved(self) -> bool:
        """True for a checkpoint whose units were transformed into another layout (`lastwords transform`)."""
        return self.run.moved is not None

    @property
    def tables(self) -> PartTables | None:
        """Where `units` and `locals` are looked up; None if all of them stand in the manifest."""
        return self.units.tables if isinstance(self.units, Lazy) else None

    def with_chunks(self, entry: FileEntry) -> FileEntry:
        """One of `files` with the checksums of its chunks. Errors as of `PartTables.of`."""
        return entry if self.tables is None else self.tables.of(_writer_of(entry)).file

    def tensors_of(self, entry: FileEntry) -> dict[str, TensorSpec]:
        """Tensors that a file holds according to the units and local states in it. Errors as of `PartTables.of`."""
        part = self if self.tables is None else self.tables.of(_writer_of(entry))
        units = part.units if isinstance(part, Part) else apart(part.units)
        owners: list[Entry] = [*units.values(), *part.locals.values()]
        return {spec.name: spec for owner in owners if owner.file == entry.path for spec in owner.tensors}

    def holders_of(self, unit: str) -> tuple[int, ...]:
        """The ranks that held a unit when it was saved."""
        said = self.units[unit].head.holders if self.tables is None else self.tables.head(unit).holders
        return tuple(range(self.world_size)) if said is None else tuple(said)

    @property
    def local_reasons(self) -> dict[int, tuple[Reason, ...]]:
        """Why the local state of each rank is not exact; () if it is."""
        found = self.locals if self.tables is None else self.tables.heads.locals
        return {rank: one.reasons for rank, one in found.items()}

    def encode(self) -> bytes:
        """Bytes of manifest.json."""
        content = {
            "format_version": MANIFEST_FORMAT,
            "tables_in_parts": self.tables is not None,
            "units": apart(self.units) if self.tables is None else self.tables.heads.units,
            "locals": self.locals if self.tables is None else self.tables.heads.locals,
            "facts": pack(dict(self.facts), "facts"),
        }
        return encode_document(brief(self) | content)

    @staticmethod
    def decode(raw: bytes, where: Path, os: Os = REAL_OS) -> Manifest:
        """FormatError if it is damaged, contradicts itself, or is of a newer format (the message says which).

        where: its path; parts that are read later lie beside it.
        """
        content = decode_document(raw, where=where, version_max=MANIFEST_FORMAT)
        with told(where):
            units, locals_ = by_name(content.get("units"), "units"), by_rank(content.get("locals"), "locals")
            content |= {"units": {}, "locals": {}, "facts": unpacked(content.get("facts"), "facts")}
            manifest = typed(content, Manifest, "")
            if typed(content.get("tables_in_parts"), bool, "tables_in_parts"):
                files = {_writer_of(entry): entry for entry in manifest.files}
                heads = typed({"units": units, "locals": locals_, "files": files}, Heads, "")
                tables = PartTables(where.parent, heads, manifest.global_step, os)
                manifest = replace(manifest, units=tables.units, locals=tables.locals)
            else:
                whole = together(entries(units, UnitEntry, "units"))
                manifest = replace(manifest, units=whole, locals=entries(locals_, LocalEntry, "locals"))
            problem = contradiction(manifest)
            if problem is not None:
                raise FormatError(problem)
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
    unnamed = (layout.EPOCH_UNKNOWN, manifest.global_step)
    names_of_step = (unnamed, (manifest.epoch, manifest.step))
    if not manifest.named and manifest.step != manifest.global_step:
        return f"it has step {manifest.step} without an epoch, and global step {manifest.global_step}"
    for entry in manifest.files:
        chunks = -(-entry.bytes // CHUNK_BYTES) if manifest.tables is None else 0
        if len(entry.chunks) != chunks or entry.header_bytes > entry.bytes:
            return f"it has {len(entry.chunks)} checksums for the {entry.bytes} bytes of {entry.path}"
        parsed = layout.PartPath.parse(entry.path, where="manifest")
        if (parsed.epoch, parsed.step) not in names_of_step:
            return f"file {entry.path} is of another step than epoch {manifest.epoch}, step {manifest.step}"
    if manifest.tables is None:
        problem = owners_contradiction(apart(manifest.units), manifest.locals, set(paths))
    else:
        problem = _heads_contradiction(manifest.tables.heads)
    if problem is not None:
        return problem
    for unit in manifest.units:
        try:
            layout.check_unit_name(unit)
        except ConfigError as error:
            return str(error)
    if any(rank >= manifest.world_size for rank in (*manifest.locals, *manifest.cause_ranks)):
        return f"it names a rank outside its world size of {manifest.world_size}"
    return None


def _heads_contradiction(heads: Heads) -> str | None:
    writers = {f"unit {unit}": head.writer for unit, head in heads.units.items()}
    writers |= {f"the local state of rank {rank}": head.writer for rank, head in heads.locals.items()}
    for owner, writer in writers.items():
        if writer not in heads.files:
            return f"{owner} was written by rank {writer}, but it lists no file of that rank"
    return shares_problem(heads.units)


def _writer_of(entry: FileEntry) -> int:
    return layout.PartPath.parse(entry.path, where="manifest").rank


_CLAIMED = {
    "job": re.compile(rb'"([^"]{0,64})"'),
    "generation": re.compile(rb"([0-9]{1,18})"),
    "global_step": re.compile(rb"([0-9]{1,18})"),
    "published_unix_ns": re.compile(rb"([0-9]{1,20})"),
    "incident": re.compile(rb"([0-9]{1,18})"),
    "attempt": re.compile(rb"([0-9]{1,18})"),
    "exact": re.compile(rb"(true|false)"),
}


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a manifest says of itself, unchecked and fast; "", 0 and False where it says nothing.

    Good for deciding which manifest to decode first: the claim of one that turns out to be sound is true.
    """

    job: str = ""
    generation: Number = 0
    global_step: Positive = 0
    published_unix_ns: Number = 0
    incident: Number = 0
    attempt: Number = 0
    exact: bool = False

    @property
    def kind(self) -> Kind:
        """Why it was taken."""
        return Kind.of(self.incident, self.attempt)

    @property
    def is_periodic(self) -> bool:
        """As `Manifest.is_periodic`; False where the manifest says nothing."""
        return self.kind is Kind.PERIODIC

    @staticmethod
    def of(manifest: Manifest) -> Claimed:
        """What a manifest that was checked says."""
        return Claimed(**{field.name: getattr(manifest, field.name) for field in fields(Claimed)})

    @staticmethod
    def read(directory: Path, os: Os = REAL_OS) -> Claimed:
        """StorageError where the file system does not let it look, and only then; see `if_readable`."""
        try:
            lines = claimed_lines(directory / layout.MANIFEST_NAME, _CLAIMED, os)
        except FileNotFoundError:
            return Claimed()  # told by whoever decodes it
        except StorageError as error:
            if error.errno in NO_FILE:
                return Claimed()
            raise
        found = {name: match[1] for name, line in lines.items() if (match := _CLAIMED[name].fullmatch(line))}
        job = found.pop("job", b"").decode("ascii", "replace")
        exact = found.pop("exact", b"") == b"true"
        return Claimed(job, exact=exact, **{name: int(value) for name, value in found.items()})

    @staticmethod
    def if_readable(directory: Path, os: Os = REAL_OS) -> Claimed:
        """As `read`, for whoever can do without; what cannot be read is told by whoever decodes it."""
        try:
            return Claimed.read(directory, os)
        except StorageError:
            return Claimed()


def read_manifest(directory: Path, os: Os = REAL_OS) -> Manifest:
    """Manifest of a checkpoint directory. IncompleteError if there is none, FormatError if it is damaged or newer.

    What stands in `meta` and `facts` is taken as it is: a publisher must not lose a state over what a reader is to
    judge. Whoever goes on to use them calls `read_published`.
    """
    path = directory / layout.MANIFEST_NAME
    try:
        raw = read_document(path, os)
    except FileNotFoundError as error:
        what = "there is no directory"
        if os.leads_to_directory(directory):
            what = "it is not a checkpoint, or it is an unfinished one"
        elif os.exists(directory):
            what = "it is not a directory, or it is a dangling link; check that its disk is mounted"
        raise IncompleteError(
            f"{directory} has no {layout.MANIFEST_NAME}: {what}; use another checkpoint",
            missing=(layout.MANIFEST_NAME,),
        ) from error
    return Manifest.decode(raw, path, os)


def read_published(directory: Path, os: Os = REAL_OS) -> Manifest:
    """As `read_manifest`, for readers: FormatError too for `meta` and `facts` of forms that nobody could use.

    Of a large checkpoint, `meta` is checked when its part is read (`part_tables`).
    """
    manifest = read_manifest(directory, os)
    problem = facts_problem(manifest.facts)
    if problem is None and manifest.tables is None:
        problem = meta_problem(manifest.units, manifest.locals)
    if problem is not None:
        raise FormatError(damage(directory / layout.MANIFEST_NAME, problem))
    return manifest
