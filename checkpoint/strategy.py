"""A strategy: which box of each tensor which ranks hold, as a typed value, and as a file.

Every published manifest has its own. A file of it alone is for a job that is still to come, or for stages that were
described one by one. Names are those of the checkpoint without the unit: `model/fc.weight`, `buffer/mean`,
`optim/fc.weight/exp_avg`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lastwords.checkpoint.boxes import Box, overlap, whole
from lastwords.checkpoint.document import DOCUMENT_BYTES_MAX, Fields, decode_document, encode_document
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.layout import UnitTensorName, parse_tensor_name
from lastwords.checkpoint.manifest import Manifest, read_manifest
from lastwords.checkpoint.part import write_document
from lastwords.checkpoint.reshard_plan import Divided, Shard, check_covered, check_shards, slices_for
from lastwords.checkpoint.system import REAL_OS, Os, read_whole, storage_errors
from lastwords.errors import ConfigError, FormatError, NoStrategiesError, NotARankError, StrategyError

STRATEGY_FORMAT = 1
"""Newest `format_version` that this code reads, and the one it writes."""


@dataclass(frozen=True, slots=True)
class Held:
    """A box of a tensor, and the ranks that hold a copy of it, sorted."""

    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """How one tensor is divided. dtype: safetensors code; shape: of the whole, in elements."""

    dtype: str
    shape: tuple[int, ...]
    held: tuple[Held, ...]


@dataclass(frozen=True, slots=True)
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
        for name in self.tensors:
            check_shards(self.divided(name))
        check_covered([self.divided(name) for name in self.tensors])

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
        holders = tuple(entry.meta.get("holders", range(manifest.world_size)))
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
    return Strategy(manifest.world_size, tensors)


def save_strategy_file(strategy: Strategy, path: Path, os: Os = REAL_OS) -> None:
    """Writes a new strategy file. StorageError where it exists already, or cannot be written."""
    write_document(path, strategy.encode(), os, durable=True)


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

    Stages are in one world and number its ranks alike. Raises NoStrategiesError (a NotADirectoryError) if it is no
    directory, StrategyError (a ValueError) if it is empty or two stages contradict each other.
    """
    source = Path(src_strategy_dirs)
    if not os.is_directory(source):
        raise NoStrategiesError(f"{source} is not a directory; give the one that holds the stages' strategy files")
    with storage_errors("listing", source):
        names = os.listdir(source)
    if not names:
        raise StrategyError(f"{source} is empty; it should hold a strategy file of each stage")
    stages = [(name, load_strategy(source / name, os)) for name in names]
    tensors: dict[str, Cut] = {}
    for name, stage in stages:
        for tensor, cut in stage.tensors.items():
            known = tensors.get(tensor)
            if known is not None and (known.dtype, known.shape) != (cut.dtype, cut.shape):
                raise StrategyError(f"{source / name}: {tensor} is {cut.dtype} {cut.shape} there, and {known.dtype} "
                                    f"{known.shape} in another stage")  # fmt: skip
            tensors[tensor] = cut if known is None else Cut(cut.dtype, cut.shape, _together(known.held, cut.held))
    world_size = max(stage.world_size for _, stage in stages)
    save_strategy_file(Strategy(world_size, tensors), Path(dst_strategy_file), os)


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
    return sorted({rank for name, box in _wanted(source, wanted, rank_id) for rank in _sources(source, name, box)})


def _wanted(source: Strategy, wanted: Strategy | None, rank: int) -> list[tuple[str, Box]]:
    """Names and boxes that the destination rank holds."""
    if wanted is None:
        return [(name, whole(cut.shape)) for name, cut in source.tensors.items()]
    boxes = [(name, held.box) for name, cut in wanted.tensors.items() for held in cut.held if rank in held.ranks]
    unknown = sorted({name for name, _ in boxes} - source.tensors.keys())
    if unknown:
        raise StrategyError(
            f"the destination's strategy has tensors that the source's lacks, first {unknown[0]!r}: two models"
        )
    return boxes


def _sources(source: Strategy, name: str, box: Box) -> set[int]:
    cut = source.tensors[name]
    if not box.sizes:
        return {cut.held[0].ranks[0]}
    slices_for(source.divided(name), box)  # inside and covered, or an error that names the region
    return {held.ranks[0] for held in cut.held if overlap(held.box, box) is not None}
