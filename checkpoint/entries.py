"""What manifest.json and part.json say of files, units and local states, and back."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from lastwords.checkpoint import layout
from lastwords.checkpoint.codec import INTEGER_MAX, Checksum, Number, brief, typed
from lastwords.checkpoint.cuts import WholeTensor, joined, plan_sum
from lastwords.checkpoint.format import DTYPE_BITS, TYPE_NAMES, TensorSpec, is_checksum
from lastwords.checkpoint.meta import (
    BucketRecord,
    InlineExtras,
    LocalMeta,
    RunFacts,
    StepDocument,
    Tree,
    UnitMeta,
)
from lastwords.checkpoint.storable import pack, unpack
from lastwords.errors import ConfigError, FormatError
from lastwords.vocabulary import Share

# Trees: nested Python values in which tensors are named, in the form in which they are stored; walked without torch.
#
# A node is a dictionary with one tag:
#
#     {"plain": value}                  no tensor anywhere inside (see `storable`)
#     {"tensor": name, "dtype": ..., "shape": ...}   one tensor, stored beside the tree under `name`;
# a DTensor's node has its "placements" and "global_shape" too, "shape" is of this rank's part
#     {"list" | "tuple": [nodes]}
#     {"dict" | "ordered": [[key, node], ...]}
#     {"object": [kind, about, [nodes]]}   see `optim_wrapper.tensors.tensor_tree`

PAIRS = ("dict", "ordered")
"""Kinds in which there are pairs of a key and what it leads to."""
OWN_TAGS = ("plain", "list", "tuple", *PAIRS)


def node_of(kind: str, about: Any, inside: list[Any]) -> Tree:
    """The node of what is of this kind. about: plain values; the value itself if all is plain. inside: see `folded`."""
    if kind == "plain":
        return {kind: about}
    return {kind: inside} if kind in OWN_TAGS else {"object": [kind, about, inside]}


def folded(tree: Any, leaf: Callable[[Tree], Any], made: Callable[[Any, Any, list[Any]], Any], where: str) -> Any:
    """What `made(kind, about, inside)` makes of the nodes, the innermost first. FormatError for a foreign tree.

    leaf: makes something of a tensor's node. inside: what has been made of the nodes there, or pairs of key and that.

    >>> folded({"list": [{"plain": 1}, {"plain": 2}]}, dict, lambda kind, about, inside: about or sum(inside), "here")
    3
    """
    if isinstance(tree, dict) and "tensor" in tree:
        name, dtype, shape = tree["tensor"], tree.get("dtype"), tree.get("shape", [])
        if not (isinstance(name, str) and isinstance(dtype, str) and isinstance(shape, list)):
            raise FormatError(f"{where} names no tensor: damaged, or written by a newer lastwords")
        return leaf(tree)
    kind, about, keys, nodes = _opened(tree, where)
    inside = [folded(node, leaf, made, where) for node in nodes]
    return made(kind, about, inside if keys is None else [[key, one] for key, one in zip(keys, inside, strict=True)])


def _opened(tree: Any, where: str) -> tuple[str, Any, list[Any] | None, list[Any]]:
    """Kind of a node, what is said about it, its keys if it has any, and the nodes inside."""
    try:
        [(tag, body)] = tree.items()
        if tag == "plain":
            return tag, body, None, []
        kind, about, inside = body if tag == "object" else (tag, None, body)
        if (kind in OWN_TAGS) is (tag == "object") or not isinstance(kind, str) or not isinstance(inside, list):
            raise TypeError(tag)
        if tag not in PAIRS:
            return kind, about, None, inside
        keys = [key for key, _ in inside]
        hash((*keys,))
        return kind, about, keys, [node for _, node in inside]
    except (AttributeError, TypeError, ValueError) as error:
        what = f"is not a tree of values, or of an unknown kind ({error!r:.80})"
        raise FormatError(f"{where} {what}: damaged, or written by a newer lastwords") from error


def renamed(tree: Any, name: Callable[[str], str], where: str) -> Tree:
    """The same tree, its tensors under other names. FormatError for a foreign tree.

    >>> renamed({"list": [{"plain": 1}, {"tensor": "a", "dtype": "int8"}]}, str.upper, "here")
    {'list': [{'plain': 1}, {'tensor': 'A', 'dtype': 'int8'}]}
    """
    tree = folded(tree, lambda node: {**node, "tensor": name(node["tensor"])}, node_of, where)
    return tree  # type: ignore[no-any-return]


def leaves(tree: Any, where: str) -> list[Tree]:
    """Every tensor's node, in order. FormatError for a foreign tree."""
    found: list[Tree] = []
    folded(tree, found.append, lambda kind, about, inside: None, where)
    return found


def without_names(tree: Any, where: str) -> Tree:
    """What two trees of equal values have in common: equal, but for the tensors' content."""
    return renamed(tree, lambda _: "", where)


def keys_of(tree: Any, where: str) -> dict[str, Any]:
    """Key -> node of a tree that is a dictionary with text keys."""
    pairs = tree.get("dict") if isinstance(tree, dict) else None
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise FormatError(f"{where} is not a dictionary: damaged, or written by a newer lastwords")
    return {str(key): node for key, node in pairs}


# Why a resume is not exact: reasons as data, which become words only where people read them.

_LOST = "its local state (RNG streams, buffers, data position) is lost: "


class Cause(StrEnum):
    """What code acts on. Everything else is OTHER, and told by `Reason.detail` alone."""

    OTHER = "other"
    LOCAL_STATE_LOST = "local_state_lost"
    RESHARDED = "resharded"

    @classmethod
    def _missing_(cls, value: object) -> Cause:
        """That of a later version is told by its words."""
        return cls.OTHER


@dataclass(frozen=True, slots=True)
class Reason:
    """detail: a sentence for people. ranks: whom it concerns, sorted; () for all. unit: "" for all.

    >>> str(Reason("its loader is shuffled by another seed", ranks=(0, 1, 2, 5)))
    'ranks 0-2, 5: its loader is shuffled by another seed'
    """

    detail: str
    cause: Cause = Cause.OTHER
    ranks: tuple[Number, ...] = ()
    unit: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(sorted({*self.ranks})))

    def __str__(self) -> str:
        text = f"unit {self.unit}: {self._what}" if self.unit else self._what
        if not self.ranks:
            return text
        return f"rank{'s' * (len(self.ranks) > 1)} {ranges(self.ranks)}: {text}"

    @property
    def _what(self) -> str:
        return (_LOST if self.cause is Cause.LOCAL_STATE_LOST else "") + self.detail

    def of_rank(self, rank: int) -> Reason:
        """As `rank` says it; a reason that names ranks already stays what it is."""
        return self if self.ranks else replace(self, ranks=(rank,))

    def of_the_past(self) -> Reason:
        """As a run says it that was resumed in spite of it: nothing acts on it any more."""
        return Reason(self._what, ranks=self.ranks, unit=self.unit)


def as_reason(said: str | Reason) -> Reason:
    """A reason that nothing acts on, if it is a text."""
    return Reason(said) if isinstance(said, str) else said


def merged(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """Reasons that several ranks give alike, as one, in the order in which they come first.

    >>> [str(one) for one in merged([Reason("late", ranks=(1,)), Reason("other"), Reason("late", ranks=(0, 4))])]
    ['ranks 0-1, 4: late', 'other']
    """
    ranks: dict[Reason, set[int]] = {}
    for reason in reasons:
        # Whom a reason without ranks concerns is another question: it stands beside the same of some ranks.
        alike = replace(reason, ranks=(-1,)) if reason.ranks else reason
        ranks.setdefault(alike, set()).update(reason.ranks)
    return tuple(replace(alike, ranks=tuple(sorted(owners))) for alike, owners in ranks.items())


def first_of(reasons: Sequence[Reason]) -> str:
    """The first one, and how many more there are.

    >>> first_of([]), first_of([Reason("late")]), first_of([Reason("late"), Reason("other")])
    ('', 'late', 'late (and 1 more)')
    """
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return f"{reasons[0]}{more}" if reasons else ""


def ranges(numbers: Iterable[int]) -> str:
    """Numbers, sorted, runs of them together.

    >>> ranges([5, 0, 1, 2, 3]), ranges([7]), ranges([1, 2])
    ('0-3, 5', '7', '1-2')
    """
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs_of(numbers))


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """The first and the last of each run of numbers, sorted."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


# What the types of `meta` cannot say: trees of values, and tensors that are named and have to be in the file.
#
# A checksum tells that bytes are those which somebody wrote, not that it was this program. Code behind this takes
# types and lengths as they should be; what is wrong is told with the file's name and the path of the value, once,
# here. Publication never asks: what it wrongly refused would be lost, and what a reader wrongly refuses is still
# there.

_DTYPE_BYTES = {name: DTYPE_BITS[code] // 8 for code, name in TYPE_NAMES.items()}
_OTHER_BYTES = {"complex32": 4, "complex128": 16}

Names = Mapping[str, TensorSpec]


def unit_problem(said: Mapping[str, Any], tensors: Iterable[TensorSpec], unit: str) -> str | None:
    """First thing in the meta of a unit of these tensors that nobody could use, in words; None if there is none."""
    try:
        _check_unit(UnitMeta.read(said), {spec.name: spec for spec in tensors}, f"unit/{unit}/")
    except FormatError as error:
        return str(error)
    return None


def local_problem(said: Mapping[str, Any]) -> str | None:
    """As `unit_problem`, of a local state's meta."""
    try:
        meta = LocalMeta.read(said)
        document = meta.document
        for said_by, path in ((document, "meta.slot"), (meta.epoch_document, "meta.epoch_start")):
            said_by.generators_inline(f"{path}.generators")
            for holder, values in said_by.attributes_inline(f"{path}.attributes").items():
                for key, (tree, tensors) in values.items():
                    _check_value(tree, tensors, f"{path}.attributes[{holder!r}][{key!r}]")
        inline = document.extras_inline("meta.slot.local_extras")
        if inline is not None:
            _check_inline(inline, "meta.slot.local_extras")
    except FormatError as error:
        return str(error)
    return None


def facts_problem(facts: Mapping[str, Any]) -> str | None:
    """As `unit_problem`, of a manifest's or a part's facts."""
    try:
        BucketRecord.read(RunFacts.read(facts).buckets or {}, "facts.buckets")
    except FormatError as error:
        return str(error)
    return None


def _wrong(path: str, what: str) -> FormatError:
    return FormatError(f"{path} {what}")


# ---------------------------------------------------------------------- a unit


def _check_unit(meta: UnitMeta, names: Names, prefix: str) -> None:
    for kind, types in (("model", meta.parameters), ("buffer", meta.buffers)):
        for name, dtype in types.items():
            where = "parameters" if kind == "model" else "buffers"
            _stored_as(names, f"{prefix}{kind}/{name}", dtype, None, f"meta.{where}[{name!r}]")
    for index, group in enumerate(meta.groups):
        _check_table(group, names, f"meta.groups[{index}]")
    for name, state in meta.optimizer_state.items():
        path = f"meta.optimizer_state[{name!r}]"
        _check_table(state, names, path)
        _check_state_names(state, f"{prefix}optim/{name}/", path)
    for index, (parameter, key, tree) in enumerate(meta.optimizer_own):
        path = f"meta.optimizer_own[{index}]"
        _check_key(key, path)
        check_tree(tree, names, path)
        if parameter is not None and parameter not in meta.parameters:
            raise _wrong(path, "is of a parameter that the unit does not have")
    _check_every_tensor_is_named(meta, names, f"{prefix}optim/")
    for alias, name in meta.aliases.items():
        if name not in meta.parameters and name not in meta.buffers:
            raise _wrong(f"meta.aliases[{alias!r}]", "is tied to a name that the unit does not have")
    for field_, found in (("group_parameters", meta.group_parameters), ("group_numbers", meta.group_numbers)):
        if len(found) != len(meta.groups):
            raise _wrong(f"meta.{field_}", f"has {len(found)} items for {len(meta.groups)} param groups")
    if meta.extras is not None:
        for name, state in meta.extras.states.items():
            check_tree(state, names, f"meta.extras.states[{name!r}]")
        if not {*meta.extras.step_on_resume} <= meta.extras.states.keys():
            raise _wrong("meta.extras.step_on_resume", "names an extra that does not exist")
    BucketRecord.read(meta.buckets or {}, "meta.buckets")


def _check_state_names(state: Any, prefix: str, path: str) -> None:
    """A tensor of the state has the name that follows from its parameter and key: whoever moves it builds that."""
    for key, node in state["dict"]:
        if "tensor" in node and node["tensor"] != f"{prefix}{key}":
            raise _wrong(f"{path}.{key}", f"is stored as {node['tensor']!r}, not as {prefix + key!r}")


def _check_every_tensor_is_named(meta: UnitMeta, names: Names, prefix: str) -> None:
    """A tensor of the optimizer's state that no tree names would be lost, and nobody would notice.

    A unit that names none at all (`EMPTY_UNIT`) is one of tensors alone.
    """
    own = (tree for _, _, tree in meta.optimizer_own)
    named = {
        leaf["tensor"] for tree in (*meta.groups, *meta.optimizer_state.values(), *own) for leaf in leaves(tree, "meta")
    }
    for name in names:
        if named and name.startswith(prefix) and name not in named:
            raise _wrong("meta.optimizer_state", f"does not name the tensor {name!r}, which is there")


# ---------------------------------------------------------------------- trees of values


def _check_table(tree: Any, names: Names, path: str) -> None:
    """A tree that is a dictionary with text keys."""
    check_tree(tree, names, path)
    if "dict" not in tree:
        raise _wrong(path, "is not a dictionary")
    for key, _ in tree["dict"]:
        if not isinstance(key, str):
            raise _wrong(f"a key of {path}", "is not text")


def check_tree(tree: Any, names: Names | None, path: str) -> None:
    """FormatError unless it is a tree whose tensors are among `names`; None: they are not looked up."""
    for leaf in leaves(tree, path):
        _check_leaf(leaf, names, path)


def _check_key(value: Any, path: str) -> None:
    try:
        hash(value)
    except TypeError:
        raise _wrong(path, "cannot be a key") from None


@dataclass(frozen=True, slots=True)
class _TreeLeaf:
    tensor: str
    dtype: str
    shape: Sequence[Number]
    apart: str = ""
    parameter: bool = False
    placements: Sequence[Any] | None = None
    global_shape: Sequence[Number] | None = None


def _check_leaf(node: dict[str, Any], names: Names | None, path: str) -> None:
    leaf = typed(node, _TreeLeaf, path)
    for index, one in enumerate(leaf.placements or ()):
        _check_placement(one, f"{path}.placements[{index}]")
    if leaf.placements is not None and leaf.global_shape is None:
        raise _wrong(f"{path}.global_shape", "is missing")
    if names is None:
        return
    spec = _stored_as(names, leaf.tensor, leaf.dtype, leaf.shape, path)
    sizes = spec.global_shape[: len(leaf.shape)]
    if leaf.global_shape is not None and tuple(leaf.global_shape) != sizes:
        raise _wrong(f"{path}.global_shape", f"is not that of {leaf.tensor!r}, {sizes}")
    if any(not -len(sizes) <= one[1] < len(sizes) for one in leaf.placements or () if one[0] in ("S", "SS")):
        raise _wrong(f"{path}.placements", "shards a dimension that does not exist")


def _check_placement(value: Any, path: str) -> None:
    """See `sharding.dtensor.placements_to_json`."""
    numbers = {"R": 0, "S": 1, "SS": 2}
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise _wrong(path, "is not a placement")
    if len(value) - 1 != numbers.get(value[0], len(value) - 1):
        raise _wrong(path, f"is not a placement of kind {value[0]!r}")
    if not all(type(number) is int for number in value[1:]):
        raise _wrong(path, "contains values that are not numbers")


def _stored_as(names: Names, name: str, dtype: str, shape: Sequence[int] | None, path: str) -> TensorSpec:
    """The tensor in the file, which has this type and shape; shape None: whatever it is."""
    spec = names.get(name)
    if spec is None:
        raise _wrong(path, f"names the tensor {name!r}, but it is not there")
    own = TYPE_NAMES.get(spec.dtype) == dtype
    # A type that safetensors has no code for is bytes, in one dimension more.
    as_bytes = not own and dtype not in _DTYPE_BYTES and spec.dtype == "U8" and len(spec.shape) > 0
    as_bytes = as_bytes and spec.shape[-1] == _OTHER_BYTES.get(dtype, spec.shape[-1])
    if not own and not as_bytes:
        raise _wrong(path, f"says {dtype}, but {name!r} is {spec.dtype}")
    stored = spec.shape if own else spec.shape[:-1]
    if shape is not None and tuple(shape) != stored:
        raise _wrong(f"{path}.shape", f"is {list(shape)}, but {name!r} has {list(stored)}")
    return spec


# ---------------------------------------------------------------------- a local state


def _check_inline(inline: InlineExtras, path: str) -> None:
    for name, state in inline.tree.states.items():
        _check_value(state, inline.tensors, f"{path}[{name!r}]")


def _check_value(tree: Any, tensors: Mapping[str, tuple[Sequence[int], bytes]], path: str) -> None:
    """A tree, and the bytes of the tensors that it names."""
    check_tree(tree, None, path)
    for leaf in leaves(tree, path):
        stored = tensors.get(leaf["tensor"])
        size = _DTYPE_BYTES.get(leaf["dtype"])
        if stored is None or (size is not None and len(stored[1]) != size * math.prod(leaf["shape"])):
            raise _wrong(path, f"names the tensor {leaf['tensor']!r}, whose bytes are missing")


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
    wholes: Mapping[str, WholeTensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def writers(self) -> tuple[int, ...]:
        """All that wrote some of it."""
        return tuple(one.writer for one in self.shares or (self,))

    @functools.cached_property
    def meta(self) -> UnitMeta:
        """FormatError if it is not as it should be."""
        return UnitMeta.read(self.said, self.file)


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


def in_order(said: Any, path: str) -> dict[str, _Table]:
    """Objects of a document by their names, as they come. FormatError, as from the three below, inside `told`."""
    return typed(said, dict[str, _Table], path)


def by_name(said: Any, path: str) -> dict[str, _Table]:
    """The same with the names sorted."""
    return dict(sorted(in_order(said, path).items()))


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
