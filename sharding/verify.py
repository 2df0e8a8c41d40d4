"""Checked, not believed: holders of a unit compare checksums of everything in it.

    found = exchange_digests(gloo_group, digest_units(views))
    for difference in compare(found): log.error("%s", difference)

Call it on every rank at the same point of the loop, from the thread that trains, while no update is under way. The
exchange is a collective over the whole group: in a sound job 8 bytes for each unit and rank, and one round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
import xxhash

from lastwords.checkpoint import layout
from lastwords.checkpoint.format import TensorSpec
from lastwords.errors import NAMED_RANKS_MAX, ConfigError, FormatError, ranks_text

# Replicas that have diverged: which tensor, on which rank, and whether a majority shows who is right.

Digests = Mapping[str, Mapping[str, int]]
"""Unit -> tensor's name in a checkpoint -> digest of its bytes, in the model's order."""


@dataclass(frozen=True, slots=True)
class HolderDifference:
    """A unit whose holders do not hold the same.

    suspects: the one rank that is wrong if `certain`, since a majority of the holders agrees against it; otherwise all
    holders, because nobody can tell. tensor: the first in the model's order that differs (of the suspect's, if
    certain), as it is called in a checkpoint. camps: ranks with equal bytes of that tensor, the largest camp first.
    count: how many of the unit's tensors differ in this way.
    """

    unit: str
    tensor: str
    suspects: tuple[int, ...]
    certain: bool
    camps: tuple[tuple[int, ...], ...]
    count: int

    def __str__(self) -> str:
        what = f"{_called(self.tensor)} of unit {self.unit!r}"
        more = "" if self.count == 1 else f" ({self.count} tensors differ, this is the first)"
        if self.certain:
            return (
                f"rank {self.suspects[0]} differs from {ranks_text(self.camps[0])}, which agree, in {what}{more}: its "
                "replica has diverged, and nothing is saved from it; check the memory of its host, and what this "
                "rank computes differently"
            )
        camps = " and ".join(ranks_text(camp) for camp in self.camps[:NAMED_RANKS_MAX])
        text = f"{camps} hold different bytes of {what}{more}, and without a majority it is unknown which are right"
        if all(len(camp) > 1 for camp in self.camps):
            text += (
                "; if each of these groups holds one tensor-parallel shard, look for randomness that differs "
                "between the groups, such as dropout seeded by rank instead of by data-parallel index"
            )
        return text


def compare(digests: Mapping[int, Digests]) -> list[HolderDifference]:
    """Everything in which the holders of a unit differ, by unit; empty if all replicas are copies of each other.

    digests: by rank, those of each unit that it holds. With three holders or more a strict majority says for each
    tensor who is wrong. A tensor that only some holders have differs like one with other bytes.

    >>> compare({rank: {"u": {"unit/u/model/w": 7 + (rank == 2)}} for rank in range(3)})[0].suspects
    (2,)
    """
    holders: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(digests):
        for unit in digests[rank]:
            holders[unit].append(rank)
    found: list[HolderDifference] = []
    for unit, ranks in sorted(holders.items()):
        found += _differences(unit, {rank: digests[rank][unit] for rank in ranks})
    return found


def _differences(unit: str, of_rank: Mapping[int, Mapping[str, int]]) -> list[HolderDifference]:
    # The lowest rank's order; what it lacks comes after. All orders are the model's, so this matters only for names
    # that differ.
    tensors = dict.fromkeys(tensor for mine in of_rank.values() for tensor in mine)
    wrong: dict[tuple[int, ...], list[tuple[str, tuple[tuple[int, ...], ...]]]] = {}
    everyone = tuple(of_rank)
    for tensor in tensors:
        by_digest: dict[int | None, list[int]] = defaultdict(list)
        for rank, mine in of_rank.items():
            by_digest[mine.get(tensor)].append(rank)
        if len(by_digest) == 1:
            continue
        camps = tuple(sorted((tuple(camp) for camp in by_digest.values()), key=lambda camp: (-len(camp), camp)))
        majority = camps[0] if 2 * len(camps[0]) > len(everyone) else ()
        for suspects in [(rank,) for rank in everyone if rank not in majority] if majority else [everyone]:
            wrong.setdefault(suspects, []).append((tensor, camps))
    return [
        HolderDifference(unit, first, suspects, suspects != everyone, camps, len(more) + 1)
        for suspects, ((first, camps), *more) in wrong.items()
    ]


def _called(tensor: str) -> str:
    """A tensor's name in words.

    >>> _called("unit/u/optim/fc.weight/exp_avg"), _called("unit/u/model/fc.weight")
    ("'exp_avg', the optimizer's state of 'fc.weight',", "parameter 'fc.weight'")
    """
    try:
        name = layout.parse_tensor_name(tensor)
    except FormatError:
        return f"{tensor!r}"
    if not isinstance(name, layout.UnitTensorName):
        return f"{tensor!r}"
    if name.kind == "optim":
        return f"{name.key!r}, the optimizer's state of {name.fqn!r},"
    return f"{ {'model': 'parameter', 'buffer': 'buffer'}.get(name.kind, name.kind) } {name.fqn!r}"


__all__ = ["Digests", "HolderDifference", "compare", "digest_units", "exchange_digests"]

AllGather = Callable[[Any], list[Any]]
"""A collective: every rank gives one value and gets those of all, in the group's order."""


class StateLike(Protocol):
    """What `UnitState` is: tensors with their bytes, or with a function that copies them when it is called."""

    @property
    def tensors(self) -> Sequence[tuple[TensorSpec, Any]]: ...


class View(Protocol):
    """What `UnitView` is: one unit of this rank."""

    @property
    def unit(self) -> str: ...
    def state(self) -> StateLike: ...


def digest_units(views: Iterable[View]) -> dict[str, dict[str, int]]:
    """xxh3_64 of the bytes of every tensor of these units: parameters, optimizer state, buffers.

    Of a DTensor this rank's share. A tensor that lies in C order in the CPU's memory is hashed where it lies; others
    are copied one after the other. Leave out units with one holder: there is nothing to compare them with.
    The tensors of a parameter stand together, in the model's order, so that the first that differs is the first in
    the model.
    """
    digests: dict[str, dict[str, int]] = {}
    for view in views:
        raw: dict[str, int] = {}
        for spec, source in view.state().tensors:
            content = source() if callable(source) else source
            # The form goes in too: an empty tensor, or the same bytes of another type, is another tensor.
            hashed = xxhash.xxh3_64(f"{spec.dtype}{spec.shape}".encode())
            hashed.update(content)
            raw[spec.name] = hashed.intdigest()
        digests.setdefault(view.unit, {}).update(_in_model_order(raw))
    return digests


def _in_model_order(raw: Mapping[str, int]) -> dict[str, int]:
    """Parameters in the order in which they come, each followed by its optimizer state; then the rest."""
    parts = {name: layout.parse_tensor_name(name) for name in raw}
    places: dict[str, int] = {}
    for part in parts.values():
        if isinstance(part, layout.UnitTensorName) and part.kind == "model":
            places.setdefault(part.fqn, len(places))

    def place(name: str) -> tuple[int, bool]:
        part = parts[name]
        if isinstance(part, layout.UnitTensorName) and part.kind in ("model", "optim") and part.fqn in places:
            return places[part.fqn], part.kind == "optim"
        return len(places), False

    return {name: raw[name] for name in sorted(raw, key=place)}  # sorted() keeps the order of what is equal


def exchange_digests(group: dist.ProcessGroup | None, mine: Digests) -> dict[int, Digests]:
    """Digests of the units in which any two ranks differ, by global rank; empty if none do. For `compare`.

    group: a gloo group with every rank of the job, None for the default one. A collective: if a rank has died it
    raises what torch raises, as any other collective of the loop would.
    """
    if group is None and not dist.is_initialized():
        return {}  # a job of one
    if "gloo" not in str(dist.get_backend(group)):
        raise ConfigError(
            f"digests are exchanged over gloo, but this group's backend is {dist.get_backend(group)}; create a "
            "group with torch.distributed.new_group(backend='gloo')"
        )

    def all_gather(value: Any) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, value, group=group)
        return gathered

    return exchange(all_gather, dist.get_rank(), mine)


def exchange(all_gather: AllGather, rank: int, mine: Digests) -> dict[int, Digests]:
    """`exchange_digests` over any collective. First one digest for each unit, then details of those that differ."""
    short: list[tuple[int, dict[str, int]]] = all_gather((rank, {unit: _digest(mine[unit]) for unit in mine}))
    seen: dict[str, set[int]] = {}
    for _, units in short:
        for unit, digest in units.items():
            seen.setdefault(unit, set()).add(digest)
    # Every rank has the same words before it, so all come to the same list, and all or none enter the second round.
    differing = {unit for unit, found in seen.items() if len(found) > 1}
    if not differing:
        return {}
    details: list[tuple[int, Digests]] = all_gather((rank, {unit: mine[unit] for unit in mine if unit in differing}))
    return {other: found for other, found in sorted(details, key=lambda item: item[0]) if found}


def _digest(tensors: Mapping[str, int]) -> int:
    """One digest of a unit, whatever the order of its tensors."""
    hashed = xxhash.xxh3_64()
    for name in sorted(tensors):
        hashed.update(f"{name}\0{tensors[name]:016x}\n".encode())
    return hashed.intdigest()
