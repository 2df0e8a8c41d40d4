"""States cut over ranks at random, saved naively and gathered naively: what a transformation is held against."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lastwords.checkpoint.boxes import Box, whole
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.load import open_checkpoint
from lastwords.checkpoint.meta import ExtrasMeta, LocalMeta, UnitMeta
from lastwords.checkpoint.part import LocalState, UnitState, read_lone_header, share_of
from lastwords.checkpoint.reshard.strategy import Cut, Held, Strategy
from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.sharding.grouping import unit_name
from lastwords.vocabulary import Share
from tests.checkpoint.states import published

Array = np.ndarray[Any, Any]

TYPES = {"F32": (np.float32, "float32"), "BF16": (np.uint16, "bfloat16"), "I64": (np.int64, "int64"),
         "U8": (np.uint8, "uint8"), "F64": (np.float64, "float64")}  # fmt: skip


class Unsynced(Os):
    """What a process sees depends neither on fsync nor on O_DIRECT, which take most of the time of small saves."""

    def fsync(self, fd: int) -> None:
        pass

    def create(self, path: Path, *, direct: bool) -> int:
        return super().create(path, direct=False)


QUICK = Unsynced()


@dataclass
class Whole:
    """A job's state by the names of a strategy, undivided. parameters: in the model's order."""

    arrays: dict[str, tuple[str, Array]] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)

    def add(self, name: str, dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> None:
        count = int(np.prod(shape))
        size = np.dtype(TYPES[dtype][0]).itemsize
        raw = rng.integers(0, 256, count * size, np.uint8)
        self.arrays[name] = dtype, np.frombuffer(raw.tobytes(), TYPES[dtype][0]).reshape(shape)


def random_whole(seed: int, *, tensors: int = 4, size_max: int = 9) -> Whole:
    """Parameters of up to three dimensions with moments and a step, a frozen one, a buffer."""
    rng, draw = np.random.default_rng(seed), random.Random(seed)
    made = Whole()
    for number in range(tensors):
        fqn = f"layer.{number}/w" if number == 1 else f"layer.{number}.w"
        dims = draw.choice((0, 1, 1, 2, 2, 3))
        shape = tuple(draw.randint(1, size_max) for _ in range(dims))
        made.parameters.append(fqn)
        made.add(f"model/{fqn}", draw.choice(("F32", "BF16")), shape, rng)
        if number != 2:
            made.trained.append(fqn)
            made.add(f"optim/{fqn}/step", "F32", (), rng)
            made.add(f"optim/{fqn}/exp_avg", "F32", shape, rng)
    made.add("buffer/mean", "F64", (draw.randint(1, size_max),), rng)
    return made


def random_boxes(draw: random.Random, shape: tuple[int, ...], count: int) -> list[Box]:
    """Up to `count` boxes that make up the whole, cut wherever it pleases."""
    boxes = [whole(shape)]
    for _ in range(4 * count):
        if len(boxes) >= count:
            break
        place = draw.randrange(len(boxes))
        box = boxes[place]
        axes = [axis for axis, size in enumerate(box.sizes) if size > 1]
        if not axes:
            continue
        axis = draw.choice(axes)
        at = draw.randint(1, box.sizes[axis] - 1)
        low, high = list(box.sizes), list(box.sizes)
        low[axis], high[axis] = at, box.sizes[axis] - at
        begin = list(box.offsets)
        begin[axis] += at
        boxes[place : place + 1] = [Box(box.offsets, tuple(low)), Box(tuple(begin), tuple(high))]
    return boxes


def random_cut(draw: random.Random, dtype: str, shape: tuple[int, ...], world: int) -> Cut:
    """Boxes dealt out to some of the ranks, at most one to each."""
    ranks = list(range(world))
    draw.shuffle(ranks)
    boxes = random_boxes(draw, shape, draw.randint(1, world))
    of_box: list[list[int]] = [[ranks.pop()] for _ in boxes]
    for rank in ranks:
        if draw.random() < 0.7:
            draw.choice(of_box).append(rank)
    held = tuple(Held(box, tuple(sorted(own))) for box, own in zip(boxes, of_box, strict=True))
    return Cut(dtype, shape, held)


def random_strategy(job: Whole, seed: int, world: int, *, like_parameters: bool = False) -> Strategy:
    """Every parameter cut at random. State follows it, or has an entry of its own with or without a key."""
    draw = random.Random(seed)
    tensors: dict[str, Cut] = {}
    for fqn in job.parameters:
        dtype, array = job.arrays[f"model/{fqn}"]
        tensors[f"model/{fqn}"] = random_cut(draw, dtype, array.shape, world)
        if like_parameters or fqn not in job.trained:
            continue
        how = draw.choice(("follows", "keyless", "keyed", "all keyed"))
        if how == "keyless":
            tensors[f"optim/{fqn}"] = random_cut(draw, "", array.shape, world)
        if how in ("keyed", "all keyed"):
            tensors[f"optim/{fqn}/exp_avg"] = random_cut(draw, "F32", array.shape, world)
        if how == "all keyed":
            tensors[f"optim/{fqn}/step"] = random_cut(draw, "F32", (), world)
    if draw.random() < 0.5 and not like_parameters:
        dtype, array = job.arrays["buffer/mean"]
        tensors["buffer/mean"] = random_cut(draw, dtype, array.shape, world)
    return Strategy(world, tensors)


def part(array: Array, box: Box) -> Array:
    """The box's elements."""
    places = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
    return np.ascontiguousarray(array[places]).reshape(box.sizes)


def naive_holding(job: Whole, strategy: Strategy, rank: int) -> dict[str, tuple[str, Box, bytes]]:
    """What a rank has by its strategy, worked out anew: name -> type, box, bytes."""
    found: dict[str, tuple[str, Box, bytes]] = {}
    for name, (dtype, array) in job.arrays.items():
        cut = strategy.tensors.get(name)
        held = None if cut is None else cut.held
        if held is None and name.startswith("optim/"):
            fqn = name.removeprefix("optim/").rpartition("/")[0]
            own = strategy.tensors.get(f"optim/{fqn}", strategy.tensors[f"model/{fqn}"])
            held = (
                own.held
                if array.shape == own.shape
                else (Held(whole(array.shape), tuple(rank for one in own.held for rank in one.ranks)),)
            )
        if held is None:
            held = (Held(whole(array.shape), tuple(range(strategy.world_size))),)
        for one in held:
            if rank in one.ranks:
                found[name] = dtype, one.box, part(array, one.box).tobytes()
    return found


def groups_of(job: Whole, called: Callable[[str], str]) -> tuple[list[Any], list[tuple[TensorSpec, Any]]]:
    """One param group with a learning rate that is a tensor, and its tensor."""
    lr = np.array(0.25, np.float32)
    name = called("optim/~groups.0/lr")
    tree = {"dict": [["lr", {"tensor": name, "dtype": "float32", "shape": []}], ["betas", {"plain": (0.9, 0.99)}]]}
    return [tree], [(TensorSpec(name, "F32", ()), lr)]


def meta_of(job: Whole, own: Mapping[str, Box], called: Callable[[str], str], **more: Any) -> UnitMeta:
    """What a unit says that holds these boxes, as a live job writes it."""
    groups, _ = groups_of(job, called)
    states: dict[str, Any] = {}
    for name in own:
        if name.startswith("optim/"):
            fqn, _, key = name.removeprefix("optim/").rpartition("/")
            node = {"tensor": called(name), "dtype": "float32", "shape": list(own[name].sizes)}
            states.setdefault(fqn, {"dict": [["note", {"plain": fqn}]]})["dict"].append([key, node])
    parameters = [fqn for fqn in job.parameters if f"model/{fqn}" in own]
    return UnitMeta(
        optimizer="AdamW",
        parameters={fqn: TYPES[job.arrays[f"model/{fqn}"][0]][1] for fqn in parameters},
        buffers={"mean": "float64"} if "buffer/mean" in own else {},
        aliases={"tied": job.parameters[0]} if job.parameters[0] in parameters else {},
        absent_buffers=[],
        groups=groups if parameters else [],
        group_parameters=[parameters] if parameters else [],
        group_numbers=[0] if parameters else [],
        optimizer_state=states,
        **more,
    )


EXTRAS = ExtrasMeta(
    states={"ema": {"dict": [["w", {"tensor": "unit/replicated/extra/ema.w", "dtype": "float32", "shape": [3]}]]}},
    step_on_resume=[],
)


def save_naively(
    root: Path,
    job: Whole,
    strategy: Strategy,
    *,
    step: int = 7,
    own_buffers: bool = False,
    shared: bool = False,
    os: Os = REAL_OS,
) -> Path:
    """A checkpoint as a live job would have published it; state lies where its parameter does.

    shared: each unit is written by all of its holders together.

    own_buffers: each rank that writes has saved a small buffer "count" for itself, with its number.
    """
    world = strategy.world_size
    everyone = tuple(range(world))
    units: dict[tuple[int, ...], dict[str, Box]] = {everyone: {}}
    for fqn in job.parameters:
        for held in strategy.tensors[f"model/{fqn}"].held:
            own = units.setdefault(held.ranks, {})
            own[f"model/{fqn}"] = held.box
            if fqn in job.trained:
                own[f"optim/{fqn}/step"] = Box((), ())
                own[f"optim/{fqn}/exp_avg"] = held.box
    units[everyone]["buffer/mean"] = whole(job.arrays["buffer/mean"][1].shape)
    by_writer: dict[int, dict[str, UnitState]] = {}
    for ranks, own in units.items():
        name = "replicated" if ranks == everyone else unit_name(ranks)

        def called(plain: str, name: str = name) -> str:
            return f"unit/{name}/{plain}"

        tensors: list[tuple[TensorSpec, Any]] = []
        for plain, box in own.items():
            dtype, array = job.arrays[plain]
            spec = TensorSpec(called(plain), dtype, box.sizes, array.shape, box.offsets)
            if plain.startswith("optim/"):  # a plain tensor does not know that it is a part
                spec = TensorSpec(called(plain), dtype, box.sizes)
            tensors.append((spec, part(array, box)))
        if any(plain.startswith("model/") for plain in own):
            tensors += groups_of(job, called)[1]
        more: dict[str, Any] = {"holders": list(ranks)}
        if name == "replicated":
            more["extras"] = EXTRAS
            tensors.append((TensorSpec("unit/replicated/extra/ema.w", "F32", (3,)), np.arange(3, dtype=np.float32)))
        state = UnitState(tensors, meta_of(job, own, called, **more))
        writers = ranks if shared else ranks[-1:]
        for writer, share in zip(writers, Share(name, 0, len(writers)).all, strict=True):
            by_writer.setdefault(writer, {})[str(share)] = share_of(state, share)
    local = {}
    for writer in by_writer:
        if writer % 3 != 1:
            spec = TensorSpec(f"local/{writer}/rng/torch", "U8", (5,))
            own_tensors: list[tuple[TensorSpec, Any]] = [(spec, bytes([writer] * 5))]
            if own_buffers:
                count = TensorSpec(f"local/{writer}/buffer/count", "I64", (2,))
                own_tensors.append((count, np.full(2, writer, np.int64)))
            local[writer] = LocalState(own_tensors, LocalMeta(slot={"epoch": 1, "rank": writer}))
    known: dict[str, Any] = {"facts": {"torch": "2.13"}, "world_size": world, "reason": "rank 0 died"}
    return published(root, by_writer, step=step, locals_=local, os=os, cause_ranks=(0,), **known)


def gathered(path: Path, os: Os = REAL_OS) -> dict[str, tuple[str, bytes]]:
    """Every tensor of a checkpoint as a whole: read, and put where its offsets say. Holes stay 0xA5."""
    checkpoint = open_checkpoint(path, os)
    found: dict[str, tuple[str, Array, Array]] = {}
    for unit in checkpoint.manifest.units:
        for name, (spec, data) in checkpoint.read(checkpoint.manifest.units[unit]).items():
            plain = name.removeprefix(f"unit/{unit}/")
            if plain.startswith(("extra/", "optim/~")):
                continue
            kind = TYPES[spec.dtype][0]
            if plain not in found:
                into = np.frombuffer(b"\xa5" * (int(np.prod(spec.global_shape)) * np.dtype(kind).itemsize), kind)
                found[plain] = spec.dtype, into.reshape(spec.global_shape).copy(), np.zeros(spec.global_shape, bool)
            _, array, seen = found[plain]
            places = tuple(slice(at, at + size) for at, size in zip(spec.offsets, spec.shape, strict=True))
            array[places] = np.frombuffer(data, kind).reshape(spec.shape)
            seen[places] = True
    assert all(seen.all() for _, _, seen in found.values())
    return {name: (dtype, array.tobytes()) for name, (dtype, array, _) in found.items()}


def content_of(path: Path, os: Os = REAL_OS) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """JSON and tensors of a rank's file, in an order that does not depend on what it was made from."""
    header = read_lone_header(path, os)
    raw = path.read_bytes() if os is REAL_OS else b""
    tensors = {name: (spec.dtype, spec.shape, raw[begin:end]) for name, (spec, begin, end) in header.tensors.items()}
    content = json.loads(header.metadata["lastwords"])
    return content, dict(sorted(tensors.items()))
