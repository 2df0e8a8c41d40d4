"""A strategy: which box of each tensor which ranks hold, as a typed value, and as a file.

Every published manifest has its own. A file of it alone is for a job that is still to come, or for stages that were
described one by one. Names are those of the checkpoint without the unit: `model/fc.weight`, `buffer/mean`,
`optim/fc.weight/exp_avg`. An entry `optim/fc.weight`, without a key and without a type, says who holds the optimizer's
state of that parameter, whatever it will consist of: a job that has not taken a step can be described too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from errno import EEXIST
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from lastwords.checkpoint.appearing import TEMPORARY, refuse_checkpoint, write_file
from lastwords.checkpoint.boxes import (
    Box,
    BoxIndex,
    Divided,
    Shard,
    first_overlap,
    index_of,
    overlap,
    slices_for,
    uncovered,
    whole,
)
from lastwords.checkpoint.codec import Number, from_json, typed
from lastwords.checkpoint.document import DOCUMENT_BYTES_MAX, decode_document, encode_document, items_of, told
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.layout import UnitTensorName, parse_tensor_name
from lastwords.checkpoint.load import Stamp, stamp_of
from lastwords.checkpoint.manifest import Manifest, read_published
from lastwords.checkpoint.meta import STRATEGY_FORMAT, Rank, WorldSize
from lastwords.checkpoint.system import REAL_OS, Os, read_whole, storage_errors, where_it_leads
from lastwords.errors import (
    ConfigError,
    FormatError,
    MismatchError,
    NoStrategiesError,
    NotARankError,
    NotTextError,
    StorageError,
    StrategyError,
    counted,
    some,
)

REMEDY = "save the strategy again with the job that it describes (save_strategy)"
"""What to do about a strategy that is damaged, or that fits no job."""

_SHOWN_MAX = 8


@dataclass(frozen=True, slots=True)
class Held:
    """A box of a tensor, and the ranks that hold a copy of it, sorted."""

    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """How one tensor is divided. dtype: safetensors code; shape: of the whole, in elements.

    dtype "": an entry `optim/FQN` for all state of a parameter; shape and boxes are then in the parameter's elements.
    """

    dtype: str
    shape: tuple[int, ...]
    held: tuple[Held, ...]


@dataclass(frozen=True)
class Strategy:
    """How every tensor of a job is divided over its ranks."""

    world_size: int
    tensors: Mapping[str, Cut]

    def divided(self, name: str) -> Divided:
        """The tensor for a plan: shards are named after the lowest rank that holds them."""
        cut = self.tensors[name]
        shards = (Shard(str(held.ranks[0]), held.box, f"rank {held.ranks[0]}") for held in cut.held)
        return Divided(name, cut.dtype, cut.shape, tuple(shards))

    def check(self) -> None:
        """StrategyError, naming tensor and region, for boxes that overlap, lie outside or leave something out."""
        sound: set[int] = set()
        for name, cut in self.tensors.items():
            parameter = self.tensors.get(f"model/{name.removeprefix('optim/')}")
            if not cut.dtype and parameter is not None and parameter.shape != cut.shape:
                raise StrategyError(f"{name} has the shape {cut.shape}, but its parameter has {parameter.shape}")
            if id(cut) not in sound:  # `decode` makes one of all tensors that are cut alike
                self._check_ranks(name, cut)
                _check_boxes(name, cut)
                sound.add(id(cut))

    def _check_ranks(self, name: str, cut: Cut) -> None:
        ranks = [rank for held in cut.held for rank in held.ranks]
        outside = next((rank for rank in ranks if not 0 <= rank < self.world_size), None)
        if outside is not None:
            raise StrategyError(
                f"{name} is held by rank {outside}, but the world has {counted(self.world_size, 'rank')}"
            )
        if len(set(ranks)) != len(ranks):
            twice = next(rank for rank in ranks if ranks.count(rank) > 1)
            raise StrategyError(
                f"{name}: rank {twice} holds two parts of it; a rank may hold only one part of each tensor"
            )

    @functools.cached_property
    def _keys(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, cut in self.tensors.items():
            if name.startswith("optim/") and cut.dtype:
                found.setdefault(name.removeprefix("optim/").rpartition("/")[0], []).append(name)
        return found

    def keys_of(self, fqn: str) -> Sequence[str]:
        """The entries `optim/FQN/KEY` of a parameter."""
        return self._keys.get(fqn, ())

    def state_of(self, fqn: str) -> Cut | None:
        """Who holds the optimizer's state of a parameter as far as nothing is said of a single key: `optim/FQN`, else
        as its parameter lies. None for a parameter that is not listed."""
        listed = self.tensors.get(f"optim/{fqn}")
        return listed if listed is not None and not listed.dtype else self.tensors.get(f"model/{fqn}")

    def state_held(self, fqn: str, key: str, shape: tuple[int, ...], more: tuple[int, ...] = ()) -> tuple[Held, ...]:
        """Who holds which box of the state tensor `key` of a parameter; () if neither is listed.

        shape: of the whole; more: its last sizes, where these are the bytes of an element that safetensors has no code
        for. What `optim/FQN/KEY` says goes first. Else a tensor of the parameter's shape is cut as `state_of` says, and
        any other (`step`) is whole on every rank that has a part.
        """
        listed = self.tensors.get(f"optim/{fqn}/{key}")
        if listed is not None and listed.dtype:
            return listed.held
        cut = self.state_of(fqn)
        if cut is None or shape == cut.shape:
            return () if cut is None else cut.held
        if more and shape == (*cut.shape, *more):
            zeros = (0,) * len(more)
            return tuple(
                Held(Box((*held.box.offsets, *zeros), (*held.box.sizes, *more)), held.ranks) for held in cut.held
            )
        return (Held(whole(shape), tuple(sorted({rank for held in cut.held for rank in held.ranks}))),)

    def encode(self) -> bytes:
        """Bytes of a strategy file."""
        tensors = {
            name: {
                "dtype": cut.dtype,
                "shape": list(cut.shape),
                "held": [[list(one.box.offsets), list(one.box.sizes), list(one.ranks)] for one in cut.held],
            }
            for name, cut in sorted(self.tensors.items())
        }
        content = {"format_version": STRATEGY_FORMAT, "world_size": self.world_size, "tensors": tensors}
        return encode_document(content)

    @staticmethod
    def decode(raw: bytes, where: Path) -> Strategy:
        """Inverse of `encode`; StrategyError for anything else."""
        if not raw:
            raise StrategyError(f"{where} is empty: no strategy was written there; save it again")
        try:
            content = decode_document(
                raw, where=where, version_max=STRATEGY_FORMAT, remedy=REMEDY, only=("world_size",)
            )
            alike: dict[bytes, Cut] = {}
            tensors: dict[str, Cut] = {}
            with told(where, REMEDY):
                world_size = typed(content["world_size"], WorldSize, "world_size")
                for name, item in items_of(raw, "tensors").items():
                    said = bytes(item)
                    if said not in alike:
                        alike[said] = _cut(f"tensors[{name!r}]", from_json(said, object))
                    tensors[name] = alike[said]
            return Strategy(world_size, tensors)
        except FormatError as error:
            raise StrategyError(str(error)) from error


def _check_boxes(name: str, cut: Cut) -> None:
    held = [(one.box, f"rank {one.ranks[0]}") for one in cut.held]
    for box, rank in held:
        if not box.inside(cut.shape):
            raise StrategyError(f"{name}: {rank} has {box}, which is not inside its shape {cut.shape}")
    pair = first_overlap([box for box, _ in held])
    if pair is not None:
        (one, first), (other, second) = (held[index] for index in pair)
        raise StrategyError(f"{name}: {first} and {second} both have {overlap(one, other)}, as two parts of it")
    all_of_it = whole(cut.shape)
    if sum(box.elements for box, _ in held) != all_of_it.elements:  # they are inside, and none has what another has
        raise StrategyError(f"{name}{uncovered(all_of_it, [box for box, _ in held])[0]} is held by no rank")


@dataclass(frozen=True, slots=True)
class _StoredCut:
    """A `Cut` as it stands in a file. held: offsets, sizes and ranks of each box."""

    dtype: str
    shape: tuple[Number, ...]
    held: list[tuple[tuple[Number, ...], tuple[Number, ...], Annotated[tuple[Rank, ...], Meta(min_length=1)]]]


def _cut(path: str, value: Any) -> Cut:
    stored = typed(value, _StoredCut, path)
    try:
        held = tuple(Held(Box(offsets, sizes), ranks) for offsets, sizes, ranks in stored.held)
    except FormatError as error:
        raise FormatError(f"{path}.held: {error}") from error
    return Cut(stored.dtype, stored.shape, held)


def strategy_of(manifest: Manifest) -> Strategy:
    """The strategy that a checkpoint was written under. FormatError where units contradict each other."""
    cuts: dict[str, tuple[TensorSpec, dict[Box, list[str]]]] = {}
    for unit, entry in manifest.units.items():
        own = {spec.name: spec for spec in entry.tensors}
        for spec in entry.tensors:
            parsed = parse_tensor_name(spec.name)
            if not isinstance(parsed, UnitTensorName) or parsed.kind == "extra" or parsed.fqn.startswith("~"):
                continue
            parameter = own.get(f"unit/{unit}/model/{parsed.fqn}") if parsed.key not in (None, "step") else None
            if parameter is not None and spec.shape == spec.global_shape == parameter.shape:
                # Where a parameter's part is a plain tensor, so is its moment, and only the parameter knows the place.
                spec = TensorSpec(spec.name, spec.dtype, spec.shape, parameter.global_shape, parameter.offsets)
            name = f"{parsed.kind}/{parsed.fqn}" + (f"/{parsed.key}" if parsed.key else "")
            first, places = cuts.setdefault(name, (spec, {}))
            if (spec.dtype, spec.global_shape) != (first.dtype, first.global_shape):
                raise FormatError(
                    f"{name} is {first.dtype} {first.global_shape} in one unit and {spec.dtype} {spec.global_shape} in "
                    f"unit {unit}: two different tensors with one name have no common strategy"
                )
            places.setdefault(Box(spec.offsets, spec.shape), []).append(unit)
    everyone = tuple(range(manifest.holders_world_size))

    @functools.cache
    def ranks_of(units: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(sorted({rank for unit in units for rank in manifest.units[unit].meta.holders or everyone}))

    @functools.cache  # one of all tensors that are cut alike: a job may have very many ranks
    def cut_of(dtype: str, shape: tuple[int, ...], boxes: tuple[tuple[Box, tuple[str, ...]], ...]) -> Cut:
        return Cut(dtype, shape, tuple(Held(box, ranks_of(units)) for box, units in boxes))

    tensors = {}
    for name, (spec, places) in cuts.items():
        boxes = tuple((box, tuple(units)) for box, units in sorted(places.items()))
        tensors[name] = cut_of(spec.dtype, spec.global_shape, boxes)
    return Strategy(manifest.holders_world_size, tensors)


def save_strategy_file(strategy: Strategy, path: Path, os: Os = REAL_OS) -> None:
    """Writes a new strategy file, whole or not at all. StorageError where it exists already, or cannot be written.

    ConfigError where it would lie in a checkpoint.
    """
    refuse_checkpoint(path.parent, os)
    try:
        write_file(path, strategy.encode(), os)
    except StorageError as error:
        if error.errno == EEXIST:
            raise StorageError(
                (
                    f"{path} exists already, and a strategy is never overwritten; choose another path, or remove it "
                    "first"
                ),
                errno=EEXIST,
            ) from error
        raise


def load_strategy(path: Path, os: Os = REAL_OS) -> Strategy:
    """A strategy out of its own file, or of a checkpoint's directory. StrategyError if there is none."""
    if os.leads_to_directory(path):
        return strategy_of(read_published(path, os))
    try:
        return Strategy.decode(read_whole(path, os, bytes_max=DOCUMENT_BYTES_MAX), path)
    except FileNotFoundError as error:
        raise StrategyError(f"there is no strategy file {path}; save it with the job that it describes") from error


def load_sound_strategy(path: Path, os: Os = REAL_OS) -> Strategy:
    """As `load_strategy`, checked: StrategyError, naming the file, tensor and region, for one that fits no job."""
    strategy = load_strategy(path, os)
    try:
        strategy.check()
    except StrategyError as error:
        remedy = "use another checkpoint" if os.leads_to_directory(path) else REMEDY
        raise StrategyError(f"the strategy {path}: {error}; {remedy}") from error
    return strategy


def merge_pipeline_strategys(src_strategy_dirs: str, dst_strategy_file: str, os: Os = REAL_OS) -> None:
    """Joins the strategy files of a directory, one of each stage, into one file.

    Stages are in one world and number its ranks alike, as `save_strategy(group=...)` does. A tensor of one name and
    form in several stages is taken for one that they share (tied weights).

    Args:
        src_strategy_dirs: the directory.
        dst_strategy_file: the new file.

    Raises:
        NoStrategiesError: it is no directory (a NotADirectoryError).
        StrategyError: it is empty, two stages contradict each other or ranks hold nothing (a ValueError).
        NotTextError: an argument is no path (a TypeError).
    """
    source, target = (
        Path(text("src_strategy_dirs", src_strategy_dirs)),
        Path(text("dst_strategy_file", dst_strategy_file)),
    )
    if not os.is_directory(where_it_leads(source)):
        raise NoStrategiesError(
            f"{source} is not a directory; pass the directory that holds the stages' strategy files"
        )
    with storage_errors("listing", source):
        names = [name for name in os.listdir(source) if not name.startswith(TEMPORARY)]
    if not names:
        raise StrategyError(f"{source} is empty; it should hold a strategy file of each stage")
    stages = [(name, load_strategy(source / name, os)) for name in names]
    tensors: dict[str, Cut] = {}
    for name, stage in stages:
        if stage.world_size != stages[0][1].world_size:
            raise StrategyError(
                f"{source / name} is of a world of {stage.world_size} ranks and {source / names[0]} of a "
                f"world of {stages[0][1].world_size}, so these are not stages of one job; remove the files "
                f"of the other job"
            )
        for tensor, cut in stage.tensors.items():
            known = tensors.get(tensor)
            if known is not None and (known.dtype, known.shape) != (cut.dtype, cut.shape):
                raise StrategyError(f"{source / name}: {tensor} is {cut.dtype} {cut.shape} there, and {known.dtype} "
                                    f"{known.shape} in another stage")  # fmt: skip
            tensors[tensor] = cut if known is None else Cut(cut.dtype, cut.shape, _together(known.held, cut.held))
    joined = Strategy(stages[0][1].world_size, tensors)
    try:
        joined.check()
    except StrategyError as error:
        raise StrategyError(f"the strategies in {source} are inconsistent: {error}") from error
    holders = {rank for cut in tensors.values() for held in cut.held for rank in held.ranks}
    if len(holders) < joined.world_size:
        idle = [rank for rank in range(joined.world_size) if rank not in holders]
        raise StrategyError(
            f"according to the strategies in {source}, these of {joined.world_size} ranks hold no tensor: "
            f"{some(idle, _SHOWN_MAX)}; the file of their stage is probably missing"
        )
    save_strategy_file(joined, target, os)


def text(name: str, value: Any) -> str:
    """A path as a str; NotTextError, naming the argument, for anything else."""
    if not isinstance(value, str | PathLike) or not isinstance(fspath(value), str):
        raise NotTextError(f"{name} must be a str, not {value!r}")
    return fspath(value)


def _together(one: Sequence[Held], other: Sequence[Held]) -> tuple[Held, ...]:
    boxes: dict[Box, set[int]] = {}
    for held in (*one, *other):
        boxes.setdefault(held.box, set()).update(held.ranks)
    return _held(boxes)


def _held(boxes: Mapping[Box, set[int]]) -> tuple[Held, ...]:
    return tuple(Held(box, tuple(sorted(ranks))) for box, ranks in sorted(boxes.items()))


# Which ranks of a source a destination rank needs, and whether two strategies are of one model. Nothing is read.


def rank_list_for_transform(
    rank_id: int, src_strategy_file: str | None = None, dst_strategy_file: str | None = None
) -> list[int]:
    """Source ranks whose state the destination rank needs, sorted; of copies the lowest rank is named.

    What was read last is kept until a file changes, so that to ask for one rank after the other costs little more than
    to ask for one.

    Args:
        rank_id: in the destination.
        src_strategy_file: or a checkpoint's directory. None: not divided, everything is whole on rank 0.
        dst_strategy_file: likewise.

    Raises:
        NotARankError: the rank is no int (a TypeError).
        NotTextError: a path is no str (a TypeError).
        ConfigError: the rank is outside the destination's world.
        StrategyError: a file is missing, empty or damaged (a ValueError).
        MismatchError: two different models.
    """
    if type(rank_id) is not int:
        raise NotARankError(f"rank_id must be an int, not {rank_id!r}")
    source = None if src_strategy_file is None else Path(text("src_strategy_file", src_strategy_file))
    wanted = None if dst_strategy_file is None else Path(text("dst_strategy_file", dst_strategy_file))
    known, world_size = _loaded(source, stamp_of(source), wanted, stamp_of(wanted))
    if not 0 <= rank_id < world_size:
        raise ConfigError(f"rank_id is {rank_id}; the destination has the ranks 0 to {world_size - 1}")
    return [0] if known is None else sorted({held.ranks[0] for _, held in known.of(rank_id)})


@functools.lru_cache(maxsize=1)
def _loaded(source: Path | None, _: Stamp | None, wanted: Path | None, __: Stamp | None) -> tuple[Needs | None, int]:
    """What the ranks of a destination need, None if the source is not divided; and how many these are."""
    found = None if source is None else load_sound_strategy(source)
    there = None if wanted is None else load_sound_strategy(wanted)
    world_size = 1 if there is None else there.world_size
    return None if found is None else Needs(found, there), world_size


class Needs:
    """What each rank of a destination needs of a source (`wanted` None: everything).

    The constructor looks once at all that the destination holds, and raises MismatchError for two different models.
    """

    def __init__(self, source: Strategy, wanted: Strategy | None) -> None:
        if wanted is not None:
            refuse_another_model(source, wanted)
        self._source = source
        self._names = list(source.tensors)
        self._everywhere: list[tuple[int, Box]] = []
        self._boxes: dict[int, list[tuple[int, Box]]] = {}
        self._indexes: dict[int, BoxIndex] = {}  # by the identity of the Cut
        with_state = {_parameter_of(name, cut) for name, cut in source.tensors.items() if name.startswith("optim/")}
        for number, (name, cut) in enumerate(source.tensors.items()):
            fqn = name.removeprefix("model/")
            if wanted is None or not (name in wanted.tensors or name.startswith(("model/", "optim/"))):
                # A buffer that the destination does not list is whole on every rank.
                self._everywhere.append((number, whole(cut.shape)))
                continue
            held = _held_of(name, cut, source, wanted)
            if fqn != name and fqn not in with_state:
                held += _held_of(f"optim/{fqn}", Cut("", cut.shape, ()), source, wanted)
            for one in held:
                for rank in one.ranks:
                    self._boxes.setdefault(rank, []).append((number, one.box))

    def of(self, rank: int) -> list[tuple[str, Held]]:
        """The source's shards that have something of what this rank holds, in the source's order.

        Of state of the optimizer that only `optim/FQN` or `model/FQN` speaks of, a shard stands for all keys.
        MismatchError for a box of another tensor, IncompleteError for what no shard has.
        """
        found: set[tuple[int, int]] = set()
        places: dict[tuple[int, Box], list[int]] = {}  # the same for all tensors that are cut alike
        for number, box in (*self._everywhere, *self._boxes.get(rank, ())):
            cut = self._source.tensors[self._names[number]]
            alike = id(cut), box
            if alike not in places:
                places[alike] = self._places(self._names[number], cut, box)
            found.update([(number, place) for place in places[alike]])
        return [
            (self._names[number], self._source.tensors[self._names[number]].held[place])
            for number, place in sorted(found)
        ]

    def _places(self, name: str, cut: Cut, wanted: Box) -> list[int]:
        """Which of the boxes of a tensor have something of the one that is wanted."""
        if id(cut) not in self._indexes:
            self._indexes[id(cut)] = index_of(tuple(held.box for held in cut.held))
        found = self._indexes[id(cut)].overlapping(wanted) if wanted.inside(cut.shape) else []
        common = (overlap(cut.held[place].box, wanted) for place in found)
        if not found or sum(one.elements for one in common if one is not None) < wanted.elements:
            slices_for(self._source.divided(name), wanted)  # an error that names the region, or it is empty
        return found


def refuse_another_model(source: Strategy, wanted: Strategy) -> None:
    """MismatchError, naming tensors, where one has parameters that the other lacks, or of another type or shape."""
    one, other = (
        {name: cut for name, cut in strategy.tensors.items() if name.startswith("model/")}
        for strategy in (source, wanted)
    )
    missing, extra = sorted(one.keys() - other.keys()), sorted(other.keys() - one.keys())
    different = {
        name: f"{cut.dtype} {cut.shape} in the source and {wanted.tensors[name].dtype} {wanted.tensors[name].shape} in "
        "the destination"
        for name, cut in source.tensors.items()
        if name in wanted.tensors and (cut.dtype, cut.shape) != (wanted.tensors[name].dtype, wanted.tensors[name].shape)
    }
    if not (missing or extra or different):
        return
    parts = [f"only the source has {some(missing, _SHOWN_MAX)}"] if missing else []
    parts += [f"only the destination has {some(extra, _SHOWN_MAX)}"] if extra else []
    parts += [f"{name} is {what}" for name, what in sorted(different.items())[:_SHOWN_MAX]]
    raise MismatchError(
        f"the strategies describe different models: {'; '.join(parts)}. Use the strategy of a job with the same model",
        missing=extra,
        extra=missing,
        different=different,
    )


def _parameter_of(name: str, cut: Cut) -> str:
    """FQN of a state entry, with or without a key."""
    rest = name.removeprefix("optim/")
    return rest.rpartition("/")[0] if cut.dtype else rest


def _held_of(name: str, cut: Cut, source: Strategy, wanted: Strategy) -> tuple[Held, ...]:
    """What the destination says of a tensor that the source lists."""
    if not name.startswith("optim/"):
        there = wanted.tensors.get(name)  # a parameter that is missing is told as a mismatch
        return () if there is None else there.held
    fqn = name.removeprefix("optim/")
    if cut.dtype:
        fqn, _, key = fqn.rpartition("/")
        return wanted.state_held(fqn, key, cut.shape)
    state = wanted.state_of(fqn)
    keys = [key for key in wanted.keys_of(fqn) if key not in source.tensors]
    more = tuple(one for key in keys if wanted.tensors[key].shape == cut.shape for one in wanted.tensors[key].held)
    return (() if state is None else state.held) + more
