"""Which ranks of a source a destination rank needs, and whether two strategies are of one model. Nothing is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lastwords.checkpoint.boxes import Box, overlap, whole
from lastwords.checkpoint.reshard_plan import slices_for
from lastwords.checkpoint.strategy import Cut, Held, Strategy, load_sound_strategy, text
from lastwords.errors import ConfigError, MismatchError, NotARankError

_SHOWN_MAX = 8


def rank_list_for_transform(
    rank_id: int, src_strategy_file: str | None = None, dst_strategy_file: str | None = None
) -> list[int]:
    """Source ranks whose state the destination rank needs, sorted; of copies the lowest rank is named.

    None for a strategy: not divided, everything is whole on rank 0. A file may be a checkpoint's directory too.
    Raises NotARankError (a TypeError) for a rank that is no int, NotTextError (a TypeError), ConfigError for a rank
    outside the destination's world, StrategyError (a ValueError) for a file that is missing, empty or damaged,
    MismatchError for two different models.
    """
    if type(rank_id) is not int:
        raise NotARankError(f"rank_id is {rank_id!r}; it has to be an int")
    source = (
        None if src_strategy_file is None else load_sound_strategy(Path(text("src_strategy_file", src_strategy_file)))
    )
    wanted = (
        None if dst_strategy_file is None else load_sound_strategy(Path(text("dst_strategy_file", dst_strategy_file)))
    )
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
