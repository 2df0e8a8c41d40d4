"""Which ranks of a source a destination rank needs, and whether two strategies are of one model. Nothing is read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from lastwords.checkpoint.boxes import Box, BoxIndex, index_of, overlap, whole
from lastwords.checkpoint.reading import Stamp, stamp_of
from lastwords.checkpoint.reshard.strategy import Cut, Held, Strategy, load_sound_strategy, text
from lastwords.checkpoint.reshard_plan import slices_for
from lastwords.errors import ConfigError, MismatchError, NotARankError

_SHOWN_MAX = 8


def rank_list_for_transform(
    rank_id: int, src_strategy_file: str | None = None, dst_strategy_file: str | None = None
) -> list[int]:
    """Source ranks whose state the destination rank needs, sorted; of copies the lowest rank is named.

    None for a strategy: not divided, everything is whole on rank 0. A file may be a checkpoint's directory too. What
    was read last is kept until a file changes, so that to ask for one rank after the other costs little more than to
    ask for one.
    Raises NotARankError (a TypeError) for a rank that is no int, NotTextError (a TypeError), ConfigError for a rank
    outside the destination's world, StrategyError (a ValueError) for a file that is missing, empty or damaged,
    MismatchError for two different models.
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
    parts = [f"only the source has {_some(missing)}"] if missing else []
    parts += [f"only the destination has {_some(extra)}"] if extra else []
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


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
    return ", ".join(names[:_SHOWN_MAX]) + more


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
