"""What manifest.json and part.json say of files, units and local states, and back."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from lastwords.checkpoint import layout
from lastwords.checkpoint.codec import INTEGER_MAX, Checksum, Number, brief, typed
from lastwords.checkpoint.cuts import Whole, joined, plan_sum
from lastwords.checkpoint.format import TensorSpec, is_checksum
from lastwords.checkpoint.meta import LocalMeta, MetaHead, StepDocument, UnitMeta
from lastwords.checkpoint.meta_checks import local_problem, unit_problem
from lastwords.checkpoint.reason import Reason
from lastwords.checkpoint.storable import pack, unpack
from lastwords.errors import ConfigError, FormatError
from lastwords.vocabulary import Share

K = TypeVar("K", str, int)
E = TypeVar("E", bound="Entry")

_RankText = Annotated[str, Meta(pattern=layout.NUMBER)]
_PathText = Annotated[str, Meta(pattern=layout.PART.pattern)]
_Table = dict[str, bool | int | float | str | list[Any] | dict[str, Any]]
"""An object in which nothing is null: what its writer did not know is not there."""

_JOINED: dict[str, Any] = {"shares": (), "wholes": {}}
"""What no file says of an entry."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A .ckpt file: `path` below the checkpoint's directory, sizes in bytes, xxh3_64 as hexadecimal.

    part_bytes, part_sum: of the part.json beside it, where a manifest leaves the chunks and tables to that.
    """

    path: _PathText
    bytes: Number
    header_bytes: Annotated[int, Meta(ge=8, le=INTEGER_MAX)]
    header_sum: Checksum
    chunks: tuple[Checksum, ...] = ()
    part_bytes: Number = 0
    part_sum: Annotated[str, Meta(pattern=r"\A([0-9a-f]{16})?\Z")] = ""

    def __post_init__(self) -> None:
        if not bool(self.chunks) != bool(self.part_bytes) == bool(self.part_sum):
            raise ConfigError(f"{self.path} needs either chunks, or part_bytes and part_sum")

    @property
    def description(self) -> str:
        """Path of the part.json beside the file."""
        return f"{self.path.partition('/')[0]}/{layout.PART_NAME}"


@dataclass(frozen=True)
class Entry:
    """Where something of a checkpoint is: the rank that wrote it, its file and its tensors.

    said: its `meta` as JSON, which publication passes on as it is; `meta` is what it means.
    """

    writer: Number
    file: _PathText
    tensors: tuple[TensorSpec, ...]
    said: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """What stands in a file: of a unit that was shared, there is one of these for each share."""
        said = brief(self) | {"said": pack(dict(self.said), "meta")}
        return {"meta" if name == "said" else name: item for name, item in said.items() if name not in _JOINED}


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

    @functools.cached_property
    def meta(self) -> UnitMeta:
        """FormatError if it is of a version that this lastwords does not know."""
        return UnitMeta.read(self.said, self.file)

    @functools.cached_property
    def head(self) -> MetaHead:
        """What is known of a unit of any version."""
        return typed(self.said, MetaHead, f"{self.file}: meta")


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


def unit_summary(entry: UnitEntry) -> dict[str, Any]:
    """What publication needs of a unit: who held it, and why it is not exact; nothing of what cannot be read."""
    said = entry.said
    holders = said.get("holders")
    told = isinstance(holders, list | tuple) and all(type(rank) is int and rank >= 0 for rank in holders)
    summary = {"holders": holders} if told else {}
    summary |= {"plan": entry.plan} if entry.plan else {}
    return summary | {"reasons": said.get("reasons", ())}


def local_summary(entry: LocalEntry) -> dict[str, Any]:
    """What publication needs of a local state; `after`: the step that the loop has named last, as epoch and step."""
    slot = entry.said.get("slot")
    after = slot.get("after") if isinstance(slot, Mapping) else None
    summary: dict[str, Any] = {"exact": entry.exact, "reasons": entry.reasons}
    return summary if after is None else summary | {"after": after}


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


def by_name(said: Any, path: str) -> dict[str, _Table]:
    """Objects of a document by their names, which are sorted. FormatError, as from the two below, inside `told`."""
    return dict(sorted(typed(said, dict[str, _Table], path).items()))


def by_rank(said: Any, path: str) -> dict[int, _Table]:
    """As `by_name`, of one whose keys are ranks."""
    return dict(sorted((int(rank), one) for rank, one in typed(said, dict[_RankText, _Table], path).items()))


def entries(tables: Mapping[K, _Table], kind: type[E], path: str) -> dict[K, E]:
    """Units, shares of them or local states, each with its tensors."""
    found = {}
    for name, table in tables.items():
        at = f"{path}.{name}"
        said = unpacked(table.get("meta"), f"{at}.meta")
        found[name] = typed({**table, "said": said, **_JOINED}, kind, at)
        specs: Any = table["tensors"]
        for number, spec in enumerate(specs):
            if "offsets" not in spec or "global_shape" not in spec:  # it would be taken for a whole tensor
                raise FormatError(f"{at}.tensors[{number}] does not record which region of the whole tensor it is")
    return found


def unpacked(said: Any, path: str) -> dict[str, Any]:
    """`meta` or `facts`."""
    return typed(unpack(said, path), dict[str, Any], path)
