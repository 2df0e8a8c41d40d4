"""What manifest.json and part.json say of files, units and local states, and back."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastwords.checkpoint import layout
from lastwords.checkpoint.codec import typed
from lastwords.checkpoint.cuts import Whole, joined, plan_sum
from lastwords.checkpoint.document import Fields
from lastwords.checkpoint.format import TensorSpec, is_checksum
from lastwords.checkpoint.meta import LocalMeta, MetaHead, StepDocument, UnitMeta
from lastwords.checkpoint.meta_checks import local_problem, unit_problem
from lastwords.checkpoint.reason import Reason, reasons_in
from lastwords.checkpoint.storable import pack, unpack
from lastwords.errors import FormatError
from lastwords.vocabulary import Share


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A .ckpt file: `path` below the checkpoint's directory, sizes in bytes, xxh3_64 as hexadecimal.

    part_bytes, part_sum: of the part.json beside it, where a manifest leaves the chunks and tables to that.
    """

    path: str
    bytes: int
    header_bytes: int
    header_sum: str
    chunks: tuple[str, ...]
    part_bytes: int = 0
    part_sum: str = ""

    @property
    def description(self) -> str:
        """Path of the part.json beside the file."""
        return f"{self.path.partition('/')[0]}/{layout.PART_NAME}"

    def to_json(self) -> dict[str, Any]:
        said = {
            "path": self.path,
            "bytes": self.bytes,
            "header_bytes": self.header_bytes,
            "header_sum": self.header_sum,
        }
        if self.part_sum:
            return said | {"part_bytes": self.part_bytes, "part_sum": self.part_sum}
        return said | {"chunks": list(self.chunks)}

    @staticmethod
    def from_json(fields: Fields, where: Path, *, described: bool = False) -> FileEntry:
        """described: the rest stands in a part.json."""
        path = str(layout.PartPath.parse(fields.text("path"), where=str(where)))
        header_sum = fields.text("header_sum")
        chunks = () if described else fields.texts("chunks")
        part_sum = fields.text("part_sum") if described else ""
        if not all(is_checksum(text) for text in (*chunks, header_sum, *((part_sum,) if described else ()))):
            fields.refuse(f"a checksum of {path} is not 16 hexadecimal digits")
        size, header_bytes = fields.integer("bytes"), fields.integer("header_bytes", least=8)
        part_bytes = fields.integer("part_bytes", least=1) if described else 0
        return FileEntry(path, size, header_bytes, header_sum, chunks, part_bytes, part_sum)


@dataclass(frozen=True)
class Entry:
    """Where something of a checkpoint is: the rank that wrote it, its file and its tensors.

    said: its `meta` as JSON, which publication passes on as it is; `meta` is what it means.
    """

    writer: int
    file: str
    tensors: tuple[TensorSpec, ...]
    said: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "writer": self.writer,
            "file": self.file,
            "tensors": map(_spec_to_json, self.tensors),
            "meta": pack(dict(self.said), "meta"),
        }


@dataclass(frozen=True)
class UnitEntry(Entry):
    """Where a unit is, or a share of one.

    plan: checksum of what all shares have, "" of a unit that was not shared. shares: of a unit that was shared, where
    each of them is (writer and file are those of the first one), and `wholes`: what its tensors are stored as.
    """

    plan: str = ""
    shares: tuple[UnitEntry, ...] = ()
    wholes: Mapping[str, Whole] = field(default_factory=dict, compare=False, repr=False)

    @property
    def writers(self) -> tuple[int, ...]:
        """All that wrote some of it."""
        return tuple(one.writer for one in self.shares or (self,))

    def to_json(self) -> dict[str, Any]:
        return Entry.to_json(self) | ({"plan": self.plan} if self.plan else {})

    @functools.cached_property
    def meta(self) -> UnitMeta:
        """FormatError if it is of a version that this lastwords does not know."""
        return UnitMeta.read(self.said, self.file)

    @functools.cached_property
    def head(self) -> MetaHead:
        """What is known of a unit of any version."""
        return typed(self.said, MetaHead, f"{self.file}: meta")

    @staticmethod
    def from_json(fields: Fields, where: Path) -> UnitEntry:
        plan = fields.text("plan") if "plan" in fields.keys() else ""  # noqa: SIM118
        return UnitEntry(*_entry_from_json(fields, where), plan)


@dataclass(frozen=True)
class LocalEntry(Entry):
    """Where one rank's local state is; `writer` is of the same host, and not the rank itself if that died."""

    exact: bool
    reasons: tuple[Reason, ...]

    @functools.cached_property
    def meta(self) -> LocalMeta:
        """What it says beside its tensors."""
        return LocalMeta.read(self.said, self.file)

    @functools.cached_property
    def document(self) -> StepDocument:
        """What the rank's black box said of the step."""
        return self.meta.document

    def to_json(self) -> dict[str, Any]:
        return Entry.to_json(self) | {"exact": self.exact, "reasons": [one.to_json() for one in self.reasons]}

    @staticmethod
    def from_json(fields: Fields, where: Path) -> LocalEntry:
        return LocalEntry(*_entry_from_json(fields, where), fields.truth("exact"), reasons_in(fields, "reasons"))


def _entry_from_json(fields: Fields, where: Path) -> tuple[int, str, tuple[TensorSpec, ...], dict[str, Any]]:
    path = str(layout.PartPath.parse(fields.text("file"), where=str(where)))
    return fields.integer("writer"), path, _specs_from_json(fields), _meta(fields, where)


def unit_summary(entry: UnitEntry) -> dict[str, Any]:
    """What publication needs of a unit: who held it, and why it is not exact; nothing of what cannot be read."""
    said = entry.said
    holders = said.get("holders")
    told = isinstance(holders, list | tuple) and all(type(rank) is int and rank >= 0 for rank in holders)
    summary: dict[str, Any] = {"holders": list(holders)} if told and holders is not None else {}
    summary |= {"plan": entry.plan} if entry.plan else {}
    return summary | {"reasons": list(said.get("reasons", ()))}


def local_summary(entry: LocalEntry) -> dict[str, Any]:
    """What publication needs of a local state; `after`: the step that the loop has named last, as epoch and step."""
    slot = entry.said.get("slot")
    after = slot.get("after") if isinstance(slot, Mapping) else None
    summary: dict[str, Any] = {"exact": entry.exact, "reasons": [one.to_json() for one in entry.reasons]}
    return summary if after is None else summary | {"after": list(after)}


def owners_contradiction(
    units: Mapping[str, UnitEntry], locals: Mapping[int, LocalEntry], paths: Collection[str]
) -> str | None:
    """First thing in which units and local states contradict each other or the files that there are, in words.

    units: by the names under which they are stored, those of their shares.
    """
    for unit, entry in units.items():
        if (Share.parse(unit).count > 1) != is_checksum(entry.plan):
            return f"unit {unit} has the plan {entry.plan!r}"
    names: set[str] = set()
    owners: list[tuple[str, Entry]] = [
        *((f"unit/{unit}/", entry) for unit, entry in units.items()),
        *((f"local/{rank}/", entry) for rank, entry in locals.items()),
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
    return None


def meta_problem(units: Mapping[str, UnitEntry], locals: Mapping[int, LocalEntry]) -> str | None:
    """First thing in the meta of units and local states that no reader could use, in words; None if there is none."""
    for unit, entry in units.items():
        if Share.parse(unit).count > 1:
            continue  # of the unit as a whole
        problem = unit_problem(entry.said, entry.tensors, unit)
        if problem is not None:
            return f"units.{unit}.{problem}"
    for rank, local in locals.items():
        problem = local_problem(local.said)
        if problem is not None:
            return f"locals.{rank}.{problem}"
    return None


def units_from_json(fields: Fields, where: Path) -> dict[str, UnitEntry]:
    return {unit: UnitEntry.from_json(fields.inner(unit), where) for unit in fields.keys()}  # noqa: SIM118


def together(stored: Mapping[str, UnitEntry]) -> dict[str, UnitEntry]:
    """Units, those among them put together that are stored in shares. FormatError for what does not make up a unit."""
    problem = shares_problem(stored)
    if problem is not None:
        raise FormatError(problem)
    return {
        unit: stored[unit] if unit in stored else _joined(unit, [stored[str(share)] for share in shares])
        for unit, shares in by_unit(stored).items()
    }


def _joined(unit: str, shares: Sequence[UnitEntry]) -> UnitEntry:
    tensors = [one.tensors for one in shares]
    plan = plan_sum(tensors)
    if any(one.plan != plan for one in shares):
        raise FormatError(f"the shares of unit {unit} are not those of one unit")
    wholes, first = joined(unit, tensors), shares[0]
    specs = tuple(whole.spec for whole in wholes.values())
    return UnitEntry(first.writer, first.file, specs, first.said, plan, tuple(shares), wholes)


def apart(units: Mapping[str, UnitEntry]) -> dict[str, UnitEntry]:
    """Inverse of `together`: units and shares of units by the names under which they are stored."""
    found: dict[str, UnitEntry] = {}
    for unit, entry in units.items():
        count = len(entry.shares)
        found |= {str(Share(unit, index, count)): one for index, one in enumerate(entry.shares)} or {unit: entry}
    return found


def by_unit(names: Iterable[str]) -> dict[str, list[Share]]:
    """The shares of each unit, in their order."""
    found: dict[str, list[Share]] = {}
    for share in sorted(map(Share.parse, names)):
        found.setdefault(share.unit, []).append(share)
    return found


def shares_problem(names: Iterable[str]) -> str | None:
    """The first unit of which these names are not all shares, and nothing else, in words."""
    for unit, shares in by_unit(names).items():
        if shares != [*shares[0].all]:
            there = ", ".join(map(str, shares))
            return f"of unit {unit} there is {there}, which are not all shares of one unit"
    return None


def locals_from_json(fields: Fields, where: Path) -> dict[int, LocalEntry]:
    return {rank: LocalEntry.from_json(inner, where) for rank, inner in sorted(ranks_of(fields).items())}


def ranks_of(fields: Fields) -> dict[int, Fields]:
    """Objects by rank, out of an object whose keys are ranks."""
    found: dict[int, Fields] = {}
    for key in fields.keys():  # noqa: SIM118
        rank = layout.parse_number(key)
        if rank is None:
            fields.refuse(f"{key[:40]!r} is not a rank")
        found[rank] = fields.inner(key)
    return found


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


def _specs_from_json(fields: Fields) -> tuple[TensorSpec, ...]:
    """A file always says where a shard is: what says nothing would be taken for a whole tensor."""
    said = fields.value("tensors", list[dict[str, Any]])
    vague = next((index for index, one in enumerate(said) if "offsets" not in one or "global_shape" not in one), None)
    if vague is not None:
        fields.refuse(f"tensors[{vague}] does not record which region of the whole tensor it is")
    return fields.value("tensors", tuple[TensorSpec, ...])
