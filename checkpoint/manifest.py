"""manifest.json: what a published checkpoint is made of, and where and why it was made."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lastwords.checkpoint import layout
from lastwords.checkpoint.codec import Named, Number, Positive, brief, typed
from lastwords.checkpoint.direct_io import CHUNK_BYTES
from lastwords.checkpoint.document import (
    claimed_lines,
    damage,
    decode_document,
    encode_document,
    lines_of,
    read_document,
    told,
)
from lastwords.checkpoint.entries import (
    Cause,
    Entry,
    FileEntry,
    LocalEntry,
    Reason,
    UnitEntry,
    apart,
    by_name,
    by_rank,
    entries,
    facts_problem,
    merged,
    meta_problem,
    owners_contradiction,
    shares_problem,
    together,
    unpacked,
)
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.meta import MANIFEST_FORMAT, RunFacts, WorldSize
from lastwords.checkpoint.part import (
    Heads,
    Lazy,
    LocalHead,
    LocalSummary,
    PartHead,
    PartTables,
    RankPart,
    UnitHead,
    check_present,
    check_sizes,
)
from lastwords.checkpoint.storable import pack
from lastwords.checkpoint.system import NO_FILE, REAL_OS, Os, storage_errors
from lastwords.errors import ConfigError, FormatError, IncompleteError, StorageError
from lastwords.vocabulary import Share


class CheckpointKind(enum.Enum):
    """Why a checkpoint was taken."""

    LAST_WORDS = "last words"
    PERIODIC = "periodic"
    CONVERTED = "converted"

    @staticmethod
    def of(incident: int, attempt: int) -> CheckpointKind:
        """By the two numbers of a manifest: incidents count from 1, and so do the periodic checkpoints of a job.

        >>> [CheckpointKind.of(*numbers).value for numbers in ((1, 1), (0, 3), (0, 0))]
        ['last words', 'periodic', 'converted']
        """
        if incident > 0:
            return CheckpointKind.LAST_WORDS
        return CheckpointKind.PERIODIC if attempt > 0 else CheckpointKind.CONVERTED


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of manifest.json.

    global_step, epoch, step: 1-based; the state is that at the end of this step. Where no writer knew what the loop
    calls it, epoch is EPOCH_UNKNOWN and step the global one. incident: 0 where none was the cause, see
    `CheckpointKind`; then attempt counts the job's periodic checkpoints. cause_ranks: the ranks that started the
    incident. published_unix_ns: wall clock of the controller's host, for people and for ordering checkpoints.
    exact: False if a resume will differ from the uninterrupted run; then `reasons` says why.
    facts: what the numbers depend on beside the state (torch version, threads, DDP options, bucket
    order, data options).
    units: by their names, whole also where they are stored in shares.
    """

    job: str
    parent_job: str
    generation: Named
    incident: Named
    attempt: Named
    global_step: Positive
    epoch: Number
    step: Positive
    world_size: WorldSize
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
    def kind(self) -> CheckpointKind:
        """Why it was taken."""
        return CheckpointKind.of(self.incident, self.attempt)

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
        units = part.units if isinstance(part, RankPart) else apart(part.units)
        owners: list[Entry] = [*units.values(), *part.locals.values()]
        return {spec.name: spec for owner in owners if owner.file == entry.path for spec in owner.tensors}

    def holders_of(self, unit: str) -> tuple[int, ...]:
        """The ranks that held a unit when it was saved."""
        said = self.units[unit].meta.holders if self.tables is None else self.tables.head(unit).holders
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
    "published_unix_ns": re.compile(rb"([0-9]{1,19})"),
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
    generation: Named = 0
    global_step: Positive = 0
    published_unix_ns: Number = 0
    incident: Named = 0
    attempt: Named = 0
    exact: bool = False

    @property
    def kind(self) -> CheckpointKind:
        """Why it was taken."""
        return CheckpointKind.of(self.incident, self.attempt)

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

    Of a large checkpoint, `meta` is checked when its part is read (`part.Heads`).
    """
    manifest = read_manifest(directory, os)
    problem = facts_problem(manifest.facts)
    if problem is None and manifest.tables is None:
        problem = meta_problem(manifest.units, manifest.locals)
    if problem is not None:
        raise FormatError(damage(directory / layout.MANIFEST_NAME, problem))
    return manifest


# The manifest of a checkpoint, made of its parts' descriptions and of what the controller knows beside them.


@dataclass(frozen=True, slots=True)
class IncidentFacts:
    """What the controller knows about a checkpoint beside its parts.

    writers: the ranks whose parts belong to it. local_ranks: those whose local state should be in it;
    lost_locals: for each rank whose local state is lost, why. facts: added to those of the writers. doubts: of
    ranks, why their own is not exact.
    """

    job: str
    generation: int
    incident: int
    attempt: int
    global_step: int
    world_size: int
    writers: tuple[int, ...]
    reason: str
    cause_ranks: tuple[int, ...] = ()
    lost_locals: Mapping[int, str] = field(default_factory=dict)
    parent_job: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    doubts: Mapping[int, str] = field(default_factory=dict)


def build_manifest(
    incident: IncidentFacts, heads: Sequence[PartHead], whole: Sequence[RankPart], *, published_unix_ns: int
) -> Manifest:
    """Manifest of verified parts. AssertionError if they contradict each other, since they were verified.

    whole: the same parts, whose tables the manifest gathers; without them it leaves the tables in each part.json.
    """
    units = {unit: entry for part in heads for unit, entry in part.units.items()}
    locals_ = {rank: entry for part in heads for rank, entry in part.locals.items()}
    lost: dict[str, list[int]] = {}
    for rank in range(incident.world_size):
        if rank not in locals_:
            lost.setdefault(incident.lost_locals.get(rank, "it was not written"), []).append(rank)
    of_first = {ranks[0]: Reason(why, Cause.LOCAL_STATE_LOST, tuple(ranks)) for why, ranks in lost.items()}
    reasons: list[Reason] = []
    for rank in sorted({*locals_, *of_first}):
        local = locals_.get(rank)
        if local is None:
            reasons.append(of_first[rank])
        elif not local.exact:
            reasons += [reason.of_rank(rank) for reason in local.reasons or (Reason("no reason given"),)]
    for rank, why in incident.doubts.items():
        reasons.append(Reason(why, ranks=(rank,)))
    for unit, entry in sorted(units.items()):
        # The writer's own: a step cut off between update and end leaves, for one, a scheduler that has not moved.
        reasons += [Reason(reason, unit=Share.parse(unit).unit) for reason in entry.reasons]
    epoch, step = next(
        ((part.epoch, part.step) for part in heads if part.epoch != layout.EPOCH_UNKNOWN),
        (layout.EPOCH_UNKNOWN, incident.global_step),
    )
    if epoch == layout.EPOCH_UNKNOWN:
        reasons += _unnamed(incident.global_step, locals_)
    listed = _in_one_file(whole) if whole else _left_in_parts(heads, incident.global_step)
    manifest = Manifest(
        job=incident.job,
        parent_job=incident.parent_job,
        generation=incident.generation,
        incident=incident.incident,
        attempt=incident.attempt,
        global_step=incident.global_step,
        epoch=epoch,
        step=step,
        world_size=incident.world_size,
        reason=incident.reason,
        cause_ranks=tuple(sorted(incident.cause_ranks)),
        published_unix_ns=published_unix_ns,
        **listed,
        exact=not reasons,
        reasons=merged(reasons),
        facts=merge_facts(incident.facts, heads),
    )
    problem = contradiction(manifest)
    assert problem is None, problem
    return manifest


def _in_one_file(parts: Sequence[RankPart]) -> dict[str, Any]:
    """What a manifest says that gathers all tables."""
    units = {unit: entry for part in parts for unit, entry in part.units.items()}
    locals_ = {rank: entry for part in parts for rank, entry in part.locals.items()}
    return {
        "files": tuple(part.file for part in parts),
        "units": dict(sorted(together(units).items())),
        "locals": dict(sorted(locals_.items())),
    }


def _left_in_parts(parts: Sequence[PartHead], global_step: int) -> dict[str, Any]:
    """What a manifest says of parts that keep their tables."""
    units = {unit: UnitHead(part.rank, one.holders) for part in parts for unit, one in part.units.items()}
    locals_ = {
        rank: LocalHead(part.rank, one.exact, one.reasons) for part in parts for rank, one in part.locals.items()
    }
    files = {
        part.rank: replace(part.file, chunks=(), part_bytes=part.part_bytes, part_sum=part.part_sum) for part in parts
    }
    heads = Heads(dict(sorted(units.items())), dict(sorted(locals_.items())), files)
    tables = PartTables(Path(), heads, global_step, REAL_OS)  # only to be encoded: nothing is read through it
    return {
        "files": tuple(files.values()),
        "units": tables.units,
        "locals": tables.locals,
    }


def _unnamed(global_step: int, locals_: Mapping[int, LocalSummary]) -> list[Reason]:
    """Why a resume after a step without a name is not exact; nothing where the loop gives names to no step."""
    said = [after for rank in sorted(locals_) if (after := locals_[rank].after) is not None]
    if any(after == () for after in said):
        return []
    last = next((f" (last reported: epoch {a[0]}, step {a[1]})" for a in said if a), "")
    return [
        Reason(
            f"global step {global_step} was saved before the training loop had reported its epoch and "
            f"step{last}; continue by global step"
        )
    ]


def merge_facts(own: Mapping[str, Any], parts: Sequence[PartHead]) -> dict[str, Any]:
    """Facts of the lowest writer, with what other writers see differently under "by_rank"."""
    merged: dict[str, Any] = dict(parts[0].facts)
    differing = {
        str(part.rank): {
            key: value for key, value in part.facts.items() if merged.get(key) != value or key not in merged
        }
        for part in parts[1:]
    }
    merged.update(own)
    different = {rank: facts for rank, facts in differing.items() if facts}
    if different:
        merged["by_rank"] = different
    return merged


# Whether a checkpoint of very many ranks can be the newest one, at a cost that hardly grows with it.

EXAMINED_BYTES_MAX = 64 << 10
"""Of a manifest up to here everything is decoded in a few milliseconds, so it gets no mere glance."""

SIZES_MAX = 256
"""So many files are opened for a look at their sizes; of more it is only seen that their directories are there, unless
every file is asked for: then its name and size are looked at, and it is not opened."""

_KEYS = (*(field.name for field in fields(Claimed)), "tables_in_parts", "facts")
_RANK_DIR = re.compile(rb'"path":"(rank_[0-9]+)/')


def glance(directory: Path, os: Os, *, every_file: bool = False) -> Claimed | None:
    """What the manifest of a large checkpoint says of itself, and truly so: its checksum is right.

    None for a small one, or where there is no manifest: `load.examine` says more of those. IncompleteError, FormatError
    or StorageError for one that cannot be used. Files that are damaged are found by whoever reads them. every_file: the
    presence and size of each, however many there are; 16 384 of them take a second.
    """
    path = directory / layout.MANIFEST_NAME
    try:
        raw = read_document(path, os)
    except FileNotFoundError:
        return None
    if len(raw) <= EXAMINED_BYTES_MAX:
        return None
    content = decode_document(raw, where=path, version_max=MANIFEST_FORMAT, only=_KEYS)
    with told(path):
        claimed = typed(content, Claimed, "")
        described = typed(content["tables_in_parts"], bool, "tables_in_parts")
        problem = facts_problem(unpacked(content["facts"], "facts"))
        if problem is not None:
            raise FormatError(problem)
    names = set(_RANK_DIR.findall(lines_of(raw, ("files",))))
    _check_presence(directory, {name.decode("ascii") for name in names}, os)
    few = len(names) <= SIZES_MAX
    if few or every_file:
        listed = decode_document(raw, where=path, version_max=MANIFEST_FORMAT, only=("files",))
        with told(path):
            files = typed(listed["files"], tuple[FileEntry, ...], "files")
            if any(bool(entry.part_sum) != described for entry in files):
                raise FormatError("it does not say of each file where its tables are")
        for entry in files:
            (check_sizes if few else check_present)(directory, entry, os)
    check_name(directory, claimed.global_step)
    return claimed


def _check_presence(directory: Path, names: set[str], os: Os) -> None:
    with storage_errors("listing", directory):
        missing = sorted(names.difference(os.listdir(directory)))
    if missing:
        raise IncompleteError(
            f"{directory / missing[0]} is missing; restore it or use another checkpoint", missing=tuple(missing)
        )


def check_name(directory: Path, global_step: int) -> None:
    """FormatError for a checkpoint that has the name of another step."""
    name = layout.CheckpointName.parse(directory.name)
    if name is not None and name.global_step != global_step:
        raise FormatError(
            f"{directory} holds a checkpoint of global step {global_step}: the directory was renamed; give it its own "
            "name back"
        )
