"""What the ranks of a destination hold of a source: which box of which tensor, and the JSON beside it. Pure.

Where a tensor goes is the destination's strategy. State of the optimizer that it does not list goes where `state_held`
says; buffers that it does not list, extras, and what belongs to no tensor of the model are whole on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lastwords.checkpoint.boxes import Box, Divided, Shard, Slice, slices_for, whole
from lastwords.checkpoint.direct_io import Bytes
from lastwords.checkpoint.entries import LocalEntry, leaves, renamed
from lastwords.checkpoint.format import TensorSpec, file_order
from lastwords.checkpoint.meta import Tree, UnitMeta
from lastwords.checkpoint.reshard.saved_state import SavedGroup, SavedState, renumbered
from lastwords.checkpoint.reshard.strategy import Cut, Held, Strategy, refuse_another_model
from lastwords.checkpoint.slice_reader import SliceReader, StoredFiles, Target
from lastwords.errors import FormatError

Ranks = tuple[int, ...]


@dataclass(slots=True)
class Holding:
    """What one rank, or each rank of a set, holds. boxes: by the names of a strategy.

    states: parameters whose state is here, as far as it is no tensor. common: has what belongs to no tensor.
    """

    boxes: dict[str, Box] = field(default_factory=dict)
    states: set[str] = field(default_factory=set)
    common: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor of the destination: what it is called there, which part of the whole it is, and what fills it."""

    spec: TensorSpec
    box: Box
    slices: tuple[Slice, ...]


def whole_strategy(saved: SavedState) -> Strategy:
    """One rank that holds everything whole."""
    return Strategy(
        1,
        {
            name: Cut(tensor.dtype, tensor.shape, (Held(whole(tensor.shape), (0,)),))
            for name, tensor in saved.tensors.items()
            if name.startswith("model/")
        },
    )


def check_fit(saved: SavedState, wanted: Strategy) -> None:
    """Before anything is read: the strategy is sound, and of this model.

    StrategyError or MismatchError name the tensor and the region.
    """
    wanted.check()
    listed = {
        name: Cut(tensor.dtype, tensor.shape, ())
        for name, tensor in saved.tensors.items()
        if name not in saved.copied and not name.startswith("model/~")
    }
    refuse_another_model(Strategy(1, listed), wanted)


def by_holders(saved: SavedState, wanted: Strategy) -> dict[Ranks, Holding]:
    """Everything of the destination, by the set of ranks that hold it; the set of all ranks is always there."""
    everyone = tuple(range(wanted.world_size))
    found: dict[Ranks, Holding] = {everyone: Holding(common=True)}
    for name, box, ranks in _places(saved, wanted):
        found.setdefault(ranks, Holding()).boxes[name] = box
    for fqn in saved.states:
        for ranks in _hosts(saved, wanted, fqn):
            found.setdefault(ranks, Holding()).states.add(fqn)
    return found


def of_rank(saved: SavedState, wanted: Strategy, rank: int) -> Holding:
    """Everything that one rank of the destination holds."""
    holding = Holding(common=True)
    holding.boxes.update({name: box for name, box, ranks in _places(saved, wanted) if rank in ranks})
    holding.states.update(fqn for fqn in saved.states if any(rank in ranks for ranks in _hosts(saved, wanted, fqn)))
    return holding


def planned(saved: SavedState, holding: Holding, called: Callable[[str], str]) -> list[Planned]:
    """A plan for each tensor of a holding, groups' and extras' included. `called`: name of a strategy -> name there.

    IncompleteError, naming tensor and region, for what no shard of the source has.
    """
    boxes = dict(holding.boxes)
    numbered = {}
    for place, group in enumerate(_groups(saved, holding)):
        for leaf in leaves(group.tree, "a param group"):
            name = leaf["tensor"]
            boxes[name] = whole(saved.tensors[name].shape)
            numbered[name] = renumbered(name, place)
    if holding.common and saved.extras is not None:
        for tree in saved.extras.states.values():
            for leaf in leaves(tree, "the extras"):
                boxes[leaf["tensor"]] = whole(saved.tensors[leaf["tensor"]].shape)
    found = []
    places: dict[str, set[str]] = {}
    for name, box in boxes.items():
        # Parameters come before state, and a moment or a counter is best read where its parameter is.
        kind, _, fqn = name.partition("/")
        near = places.get(fqn.rpartition("/")[0], set()) if kind == "optim" else set()
        tensor = saved.near(name, near)
        spec = TensorSpec(called(numbered.get(name, name)), tensor.dtype, box.sizes, tensor.shape, box.offsets)
        slices = slices_for(tensor, box)
        if kind == "model":
            places[fqn] = {piece.shard.where for piece in slices}
        found.append(Planned(spec, box, slices))
    return found


def meta_of(
    saved: SavedState, holding: Holding, called: Callable[[str], str], holders: Ranks | None = None
) -> UnitMeta:
    """What is no tensor, as a unit's `meta` has it; trees name tensors as `planned` does. holders: of the unit."""
    boxes = holding.boxes
    parameters = {name: dtype for name, dtype in saved.parameters.items() if f"model/{name}" in boxes}
    buffers = {name: dtype for name, dtype in saved.buffers.items() if f"buffer/{name}" in boxes}
    groups = _groups(saved, holding)
    about, extras = saved.about, saved.extras
    if extras is not None:
        states = {name: renamed(tree, called, "the extras") for name, tree in extras.states.items()}
        extras = replace(extras, states=states)
    return UnitMeta(
        optimizer=saved.optimizer,
        parameters=parameters,
        buffers=buffers,
        aliases={a: name for a, name in saved.aliases.items() if name in parameters or name in buffers},
        absent_buffers=list(saved.absent) if holding.common else [],
        groups=[
            renamed(group.tree, lambda name, place=place: called(renumbered(name, place)), "a param group")  # type: ignore[misc]
            for place, group in enumerate(groups)
        ],
        group_parameters=[[name for name in group.parameters if name in parameters] for group in groups],
        group_numbers=[group.number for group in groups],
        # Those of single ranks are in no unit, and nothing else says that state_dict() leaves them out.
        volatile_buffers=sorted(saved.volatile - (saved.buffers.keys() - buffers.keys())),
        optimizer_state=dict(_states(saved, holding, called)),
        reasons=_reasons(saved) if holding.common else [],
        holders=holders,
        extras=extras if holding.common else None,
        step_ended=_ended(groups, about.step_ended),
        hyperparameters=about.hyperparameters if holding.common else None,
    )


def _ended(groups: Iterable[SavedGroup], ended: bool | None) -> bool | None:
    """Whether the groups' values are of after the step's end. ended: the same of the unit that has the extras."""
    return None if ended is None else next((group.ended for group in groups if group.ended != ended), ended)


# ---------------------------------------------------------------------- who holds what


def _places(saved: SavedState, wanted: Strategy) -> Iterator[tuple[str, Box, Ranks]]:
    """Every tensor of model and optimizer: name, box, and all ranks that hold this box."""
    everyone = tuple(range(wanted.world_size))
    for kind, names in (("model", saved.parameters), ("buffer", saved.buffers)):
        for fqn in names:
            name = f"{kind}/{fqn}"
            cut = wanted.tensors.get(name)
            if cut is None:
                yield name, whole(saved.tensors[name].shape), everyone
            else:
                yield from ((name, held.box, held.ranks) for held in cut.held)
    for fqn, keys in saved.states.items():
        hosts = _hosts(saved, wanted, fqn)
        for key, node in keys.items():
            if "tensor" in node and not fqn.startswith("~"):
                yield from _state_places(saved, wanted, hosts, fqn, key)
                continue
            for leaf in leaves(node, fqn):
                yield from ((leaf["tensor"], whole(saved.tensors[leaf["tensor"]].shape), ranks) for ranks in hosts)


def _state_places(
    saved: SavedState, wanted: Strategy, hosts: Iterable[Ranks], fqn: str, key: str
) -> Iterator[tuple[str, Box, Ranks]]:
    name = f"optim/{fqn}/{key}"
    shape = saved.tensors[name].shape
    alike = _like_parameter(saved, fqn, name)
    for held in wanted.state_held(fqn, key, shape, saved.more.get(name, ())):
        left = set(held.ranks)
        if not alike and held.box == whole(shape):
            # A counter stands beside each part of what it counts for, so that a part can be read without the others.
            for ranks in hosts:
                if left.issuperset(ranks):
                    yield name, held.box, ranks
                    left.difference_update(ranks)
        if left:
            yield name, held.box, tuple(sorted(left))


def _hosts(saved: SavedState, wanted: Strategy, fqn: str) -> list[Ranks]:
    """The sets of ranks each of which has a part of this parameter's state."""
    if fqn.startswith("~"):
        return [tuple(range(wanted.world_size))]
    for key, node in saved.states[fqn].items():
        name = f"optim/{fqn}/{key}"
        if "tensor" in node and _like_parameter(saved, fqn, name):
            held = wanted.state_held(fqn, key, saved.tensors[name].shape, saved.more.get(name, ()))
            return [one.ranks for one in held]
    cut = wanted.state_of(fqn)
    return [] if cut is None else [held.ranks for held in cut.held]


def _like_parameter(saved: SavedState, fqn: str, name: str) -> bool:
    if f"model/{fqn}" not in saved.tensors or name not in saved.tensors:
        raise FormatError(f"the optimizer's state {name!r} belongs to an unknown parameter or has an unknown name")
    own, shape = saved.tensors[f"model/{fqn}"].shape, saved.tensors[name].shape
    return shape in (own, (*own, *saved.more.get(name, ())))


# ---------------------------------------------------------------------- what is no tensor


def _groups(saved: SavedState, holding: Holding) -> list[SavedGroup]:
    """Param groups of which the holding has a parameter; those without any are common to all."""
    return [
        group
        for group in saved.groups
        if any(f"model/{name}" in holding.boxes for name in group.parameters)
        or (holding.common and not group.parameters)
    ]


def _states(saved: SavedState, holding: Holding, called: Callable[[str], str]) -> Iterator[tuple[str, Tree]]:
    for fqn, keys in saved.states.items():
        pairs = []
        for key, node in keys.items():
            if "tensor" in node:
                if node["tensor"] in holding.boxes:
                    pairs.append([key, _leaf(saved, node, holding.boxes[node["tensor"]], called)])
            elif fqn in holding.states:
                pairs.append([key, renamed(node, called, fqn)])
        if pairs or (fqn in holding.states and not keys):
            yield fqn, {"dict": pairs}


def _reasons(saved: SavedState) -> list[str]:
    own = saved.about.optimizer_own
    more = ["optimizer state that is not stored by parameter and name was not moved to this layout"] if own else []
    return [*saved.about.reasons, *more]


def _leaf(saved: SavedState, node: Mapping[str, Any], box: Box, called: Callable[[str], str]) -> Tree:
    more = len(saved.more.get(node["tensor"], ()))
    shape = list(box.sizes[: len(box.sizes) - more])
    leaf = {key: value for key, value in node.items() if key not in ("tensor", "dtype")}
    return {"tensor": called(node["tensor"]), "dtype": node["dtype"], "shape": shape, **leaf}


def called_in(unit: str) -> Callable[[str], str]:
    """What a tensor of a strategy is called in the file of a unit."""
    return lambda name: f"unit/{unit}/{name}"


def as_it_is(entry: LocalEntry) -> list[Planned]:
    """Tensors of one rank alone."""
    found = []
    for spec in entry.tensors:
        box = whole(spec.shape)
        found.append(Planned(spec, box, slices_for(Divided(spec.name, spec.dtype, spec.shape,
                                                           (Shard(spec.name, box),)), box)))  # fmt: skip
    return found


# Planned tensors, read when their turn to be written has come: one tensor in memory, or some small ones together.

BATCH_BYTES = 32 << 20
"""Small tensors are read together up to here: of a chunk of 4 MiB that several share, most is then read once."""

_ALIGN_BYTES = 64


class Streamed:
    """Sources of bytes for whoever writes a file and calls each once, in the order of the file.

    owners: what each unit (or the one file) has. `tensors` are for the writer as they are, one list for each of them.
    One piece of memory is used for all tensors again and again.
    """

    def __init__(self, reader: SliceReader, source: StoredFiles, owners: Sequence[Sequence[Planned]]) -> None:
        self._reader = reader
        by_source = [sorted(planned, key=lambda one: _first_place(source, one)) for planned in owners]
        self._planned = [one for planned in by_source for one in planned]
        self._counts = [len(planned) for planned in by_source]
        self._batch_of: dict[int, int] = {}
        self._batches: list[list[int]] = []
        filled = 0
        for index in file_order(one.spec for one in self._planned):
            size = _padded(self._planned[index].spec.nbytes)
            if not self._batches or filled + size > BATCH_BYTES:
                self._batches.append([])
                filled = 0
            self._batches[-1].append(index)
            self._batch_of[index] = len(self._batches) - 1
            filled += size
        self._loaded = -1
        self._views: dict[int, Bytes] = {}
        self._memory: Bytes | None = None

    @property
    def tensors(self) -> list[list[tuple[TensorSpec, Callable[[], Bytes]]]]:
        """For each owner its tensors, each with a function that reads it."""
        every = iter([(one.spec, self._later(index)) for index, one in enumerate(self._planned)])
        return [list(itertools.islice(every, count)) for count in self._counts]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.spec.nbytes for one in self._planned)

    def _later(self, index: int) -> Callable[[], Bytes]:
        def read() -> Bytes:
            if self._batch_of[index] != self._loaded:
                self._load(self._batch_of[index])
            return self._views[index]

        return read

    def _load(self, batch: int) -> None:
        if self._memory is None:
            most = max(sum(_padded(self._planned[index].spec.nbytes) for index in one) for one in self._batches)
            self._memory = np.empty(most, np.uint8)
        at = 0
        self._views = {}
        targets = []
        for index in self._batches[batch]:
            one = self._planned[index]
            self._views[index] = view = self._memory[at : at + one.spec.nbytes]
            at += _padded(one.spec.nbytes)
            if one.spec.nbytes:
                targets.append(Target(one.box, view, one.slices))
        self._reader.read(targets)
        self._loaded = batch


def _padded(size: int) -> int:
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES


def _first_place(source: StoredFiles, planned: Planned) -> tuple[str, int]:
    """Where the first of its bytes lies: neighbours in the source are then read together."""
    if not planned.slices:
        return "", 0
    stored = source.stored(planned.slices[0].shard.name)[0]
    return str(stored.path), stored.begin
