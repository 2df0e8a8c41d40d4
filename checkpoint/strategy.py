"""A strategy: which box of each tensor which ranks hold, as a typed value, and as a file.

Every published manifest has its own. A file of it alone is for a job that is still to come, or for stages that were
described one by one. Names are those of the checkpoint without the unit: `model/fc.weight`, `buffer/mean`,
`optim/fc.weight/exp_avg`. An entry `optim/fc.weight`, without a key and without a type, says who holds the optimizer's
state of that parameter, whatever it will consist of: a job that has not taken a step can be described too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import EEXIST
from os import getpid
from pathlib import Path

from lastwords.checkpoint.boxes import Box, overlap, whole
from lastwords.checkpoint.document import DOCUMENT_BYTES_MAX, Fields, decode_document, encode_document
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.layout import UnitTensorName, parse_tensor_name
from lastwords.checkpoint.manifest import Manifest, read_manifest
from lastwords.checkpoint.part import write_document
from lastwords.checkpoint.reshard_plan import Divided, Shard, check_covered, check_shards, slices_for
from lastwords.checkpoint.system import REAL_OS, Os, read_whole, storage_errors, sync_directory
from lastwords.errors import (
    ConfigError,
    FormatError,
    IncompleteError,
    MismatchError,
    NoStrategiesError,
    NotARankError,
    StorageError,
    StrategyError,
)

STRATEGY_FORMAT = 1
"""Newest `format_version` that this code reads, and the one it writes."""

_SHOWN_MAX = 8

_TEMPORARY = ".tmp-"
"""What the name of a file begins with that is still being written."""


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
        """FormatError or IncompleteError, naming tensor and region, for boxes that overlap or leave something out."""
        for name, cut in self.tensors.items():
            ranks = [rank for held in cut.held for rank in held.ranks]
            if any(not 0 <= rank < self.world_size for rank in ranks):
                raise StrategyError(f"{name} is held by rank {max(ranks)}, but there are only {self.world_size} ranks")
            if len(set(ranks)) != len(ranks):
                twice = next(rank for rank in ranks if ranks.count(rank) > 1)
                raise StrategyError(f"{name}: rank {twice} holds two parts of it; of each tensor a rank holds one part")
            parameter = self.tensors.get(f"model/{name.removeprefix('optim/')}")
            if not cut.dtype and parameter is not None and parameter.shape != cut.shape:
                raise StrategyError(f"{name} has the shape {cut.shape}, but its parameter has {parameter.shape}")
            check_shards(self.divided(name))
        check_covered([self.divided(name) for name in self.tensors])

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
            fields = Fields(decode_document(raw, where=where, version_max=STRATEGY_FORMAT), where)
            inner = fields.inner("tensors")
            tensors = {name: _cut(inner.inner(name), inner) for name in inner.keys()}  # noqa: SIM118
            return Strategy(fields.integer("world_size", least=1), tensors)
        except StrategyError:
            raise
        except FormatError as error:
            raise StrategyError(str(error)) from error


def _cut(fields: Fields, outer: Fields) -> Cut:
    held = fields.raw("held")
    try:
        boxes = tuple(Held(Box(tuple(offsets), tuple(sizes)), tuple(ranks)) for offsets, sizes, ranks in held)
        numbers = [number for one in boxes for number in (*one.box.offsets, *one.box.sizes, *one.ranks)]
        if not all(type(number) is int for number in numbers) or not all(one.ranks for one in boxes):
            raise ValueError("a rank, an offset or a size is no number")
    except (TypeError, ValueError) as error:
        outer.refuse(f"a tensor's boxes cannot be read ({error})")
    return Cut(fields.text("dtype"), fields.integers("shape"), boxes)


def strategy_of(manifest: Manifest) -> Strategy:
    """The strategy that a checkpoint was written under. FormatError where units contradict each other."""
    cuts: dict[str, tuple[TensorSpec, dict[Box, set[int]]]] = {}
    for unit, entry in manifest.units.items():
        holders = tuple(entry.meta.get("holders", range(manifest.holders_world_size)))
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
            first, boxes = cuts.setdefault(name, (spec, {}))
            if (spec.dtype, spec.global_shape) != (first.dtype, first.global_shape):
                raise FormatError(
                    f"{name} is {first.dtype} {first.global_shape} in one unit and {spec.dtype} {spec.global_shape} in "
                    f"unit {unit}: two tensors of one name have no common strategy"
                )
            boxes.setdefault(Box(spec.offsets, spec.shape), set()).update(holders)
    tensors = {
        name: Cut(
            spec.dtype,
            spec.global_shape,
            tuple(Held(box, tuple(sorted(ranks))) for box, ranks in sorted(boxes.items())),
        )
        for name, (spec, boxes) in cuts.items()
    }
    return Strategy(manifest.holders_world_size, tensors)


def save_strategy_file(strategy: Strategy, path: Path, os: Os = REAL_OS) -> None:
    """Writes a new strategy file, whole or not at all. StorageError where it exists already, or cannot be written."""
    temporary = path.with_name(f"{_TEMPORARY}{path.name}-{getpid()}")
    try:
        write_document(temporary, strategy.encode(), os, durable=True)
        with storage_errors("giving its name to", path):
            os.rename(temporary, path)
    except StorageError as error:
        with suppress(OSError):
            os.unlink(temporary)
        if error.errno == EEXIST:
            raise StorageError(
                f"{path} exists already, and a strategy is never overwritten; give another path, or remove it first",
                errno=EEXIST,
            ) from error
        raise
    sync_directory(path.absolute().parent, os)


def load_strategy(path: Path, os: Os = REAL_OS) -> Strategy:
    """A strategy out of its own file, or of a checkpoint's directory. StrategyError if there is none."""
    if os.is_directory(path):
        return strategy_of(read_manifest(path, os))
    try:
        return Strategy.decode(read_whole(path, os, bytes_max=DOCUMENT_BYTES_MAX), path)
    except FileNotFoundError as error:
        raise StrategyError(f"there is no strategy file {path}; save it with the job that it describes") from error


def merge_pipeline_strategys(src_strategy_dirs: str, dst_strategy_file: str, os: Os = REAL_OS) -> None:
    """Joins the strategy files of a directory, one of each stage, into one file.

    Stages are in one world and number its ranks alike, as `save_strategy(group=...)` does. A tensor of one name and
    form in several stages is taken for one that they share (tied weights). Raises NoStrategiesError (a
    NotADirectoryError) if it is no directory, StrategyError (a ValueError) if it is empty or two stages contradict each
    other.
    """
    source = Path(src_strategy_dirs)
    if not os.is_directory(source.resolve()):
        raise NoStrategiesError(f"{source} is not a directory; give the one that holds the stages' strategy files")
    with storage_errors("listing", source):
        names = [name for name in os.listdir(source) if not name.startswith(_TEMPORARY)]
    if not names:
        raise StrategyError(f"{source} is empty; it should hold a strategy file of each stage")
    stages = [(name, load_strategy(source / name, os)) for name in names]
    tensors: dict[str, Cut] = {}
    for name, stage in stages:
        if stage.world_size != stages[0][1].world_size:
            raise StrategyError(
                f"{source / name} is of a world of {stage.world_size} ranks and {source / names[0]} of one of "
                f"{stages[0][1].world_size}: not stages of one job; remove what does not belong there"
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
    except (FormatError, IncompleteError) as error:
        raise StrategyError(f"the strategies in {source} do not fit together: {error}") from error
    save_strategy_file(joined, Path(dst_strategy_file), os)


def _together(one: Sequence[Held], other: Sequence[Held]) -> tuple[Held, ...]:
    boxes: dict[Box, set[int]] = {}
    for held in (*one, *other):
        boxes.setdefault(held.box, set()).update(held.ranks)
    return tuple(Held(box, tuple(sorted(ranks))) for box, ranks in sorted(boxes.items()))


def rank_list_for_transform(
    rank_id: int, src_strategy_file: str | None = None, dst_strategy_file: str | None = None
) -> list[int]:
    """Source ranks whose state the destination rank needs, sorted; of copies the lowest rank is named.

    None for a strategy: not divided, everything is whole on rank 0. A file may be a checkpoint's directory too.
    Raises NotARankError (a TypeError) for a rank that is no int, ConfigError for one outside the destination's world,
    StrategyError (a ValueError) for a file that is missing, empty or damaged, MismatchError for two different models.
    """
    if type(rank_id) is not int:
        raise NotARankError(f"rank_id is {rank_id!r}; it has to be an int")
    source = None if src_strategy_file is None else load_strategy(Path(src_strategy_file))
    wanted = None if dst_strategy_file is None else load_strategy(Path(dst_strategy_file))
    world_size = 1 if wanted is None else wanted.world_size
    if not 0 <= rank_id < world_size:
        raise ConfigError(f"rank_id is {rank_id}; the destination has the ranks 0 to {world_size - 1}")
    if source is None:
        return [0]
    return sorted({held.ranks[0] for _, held in needed(source, wanted, rank_id)})


def needed(source: Strategy, wanted: Strategy | None, rank: int) -> list[tuple[str, Held]]:
    """The source's shards that have something of what destination rank `rank` holds (`wanted` None: everything).

    Of state of the optimizer that only `optim/FQN` or `model/FQN` speaks of, a shard stands for all keys.
    Raises MismatchError for two different models, IncompleteError for what no shard of the source has.
    """
    if wanted is not None:
        refuse_another_model(source, wanted)
    with_state = {_parameter_of(name, cut) for name, cut in source.tensors.items() if name.startswith("optim/")}
    found: list[tuple[str, Held]] = []
    for name, cut in source.tensors.items():
        boxes = _boxes_of(name, cut, source, wanted, rank)
        if wanted is not None and name.startswith("model/") and name.removeprefix("model/") not in with_state:
            boxes += _boxes_of(f"optim/{name.removeprefix('model/')}", Cut("", cut.shape, ()), source, wanted, rank)
        for held in cut.held:
            if any(not box.sizes or overlap(held.box, box) is not None for box in boxes):
                found.append((name, held))
        for box in boxes:
            slices_for(source.divided(name), box)  # inside and covered, or an error that names the region
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
    parts = [f"only the source has {_some(missing)}"] if missing else []
    parts += [f"only the destination has {_some(extra)}"] if extra else []
    parts += [f"{name} is {what}" for name, what in sorted(different.items())[:_SHOWN_MAX]]
    raise MismatchError(
        f"the strategies are of two models: {'; '.join(parts)}. Take the strategy of a job with the same model",
        missing=extra,
        extra=missing,
        different=different,
    )


def _parameter_of(name: str, cut: Cut) -> str:
    """FQN of a state entry, with or without a key."""
    rest = name.removeprefix("optim/")
    return rest.rpartition("/")[0] if cut.dtype else rest


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
    return ", ".join(names[:_SHOWN_MAX]) + more


def _boxes_of(name: str, cut: Cut, source: Strategy, wanted: Strategy | None, rank: int) -> list[Box]:
    """Boxes that the destination rank has of a tensor that the source lists."""
    if wanted is None:
        return [whole(cut.shape)]
    if not name.startswith("optim/"):
        there = wanted.tensors.get(name)
        # A buffer that the destination does not list is whole on every rank; a parameter is told as a mismatch.
        held = (Held(whole(cut.shape), (rank,)),) if there is None else there.held
    elif cut.dtype:
        fqn, _, key = name.removeprefix("optim/").rpartition("/")
        held = wanted.state_held(fqn, key, cut.shape)
    else:
        state = wanted.state_of(name.removeprefix("optim/"))
        held = () if state is None else state.held
        keys = [key for key in wanted.keys_of(name.removeprefix("optim/")) if key not in source.tensors]
        held += tuple(one for key in keys if wanted.tensors[key].shape == cut.shape for one in wanted.tensors[key].held)
    return [one.box for one in held if rank in one.ranks]
