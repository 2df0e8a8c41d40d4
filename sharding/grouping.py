"""From every rank's pieces to the units of the job: a pure function, called by one rank for all.

Ranks that hold equal lists of pieces (replicas) come in as one, so the work grows with the number of different ranks.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lastwords.checkpoint.layout import check_unit_name
from lastwords.errors import ConfigError
from lastwords.sharding.declare import Unit, check_cuts
from lastwords.sharding.pieces import Piece
from lastwords.vocabulary import UNIT_REPLICATED

_LISTED_MAX = 8
_PROGRESSION_MIN = 5

Alike = tuple[Sequence[Piece], Sequence[int]]
"""Pieces, and the ranks whose list they are."""


@dataclass(frozen=True, slots=True)
class Division:
    """Units of a job. `of_list[i][j]` is the unit of piece j in list i; the rest is as in `UnitTable`."""

    units: Mapping[str, tuple[int, ...]]
    nbytes: Mapping[str, int]
    tensors: Mapping[str, int]
    of_list: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def unit_name(holders: Sequence[int]) -> str:
    """Name of the unit of exactly these ranks (sorted), when they are not all ranks of the job.

    >>> unit_name((3,)), unit_name((0, 2)), unit_name(range(0, 64, 2)), unit_name((0, 1, 2, 3, 4))
    ('rank-3', 'ranks-0-2', 'ranks-0-to-62-by-2', 'ranks-0-to-4')
    >>> unit_name((0, 1, 4, 5, 8, 9, 12, 13, 16, 17))
    'ranks-0-1-...-17-c28ca5'
    """
    if len(holders) == 1:
        return f"rank-{holders[0]}"
    step = holders[1] - holders[0]
    if len(holders) >= _PROGRESSION_MIN and tuple(holders) == tuple(range(holders[0], holders[-1] + 1, step)):
        return f"ranks-{holders[0]}-to-{holders[-1]}" + (f"-by-{step}" if step != 1 else "")
    if len(holders) <= _LISTED_MAX:
        return "ranks-" + "-".join(map(str, holders))
    digest = hashlib.sha256(",".join(map(str, holders)).encode()).hexdigest()[:6]
    return f"ranks-{holders[0]}-{holders[1]}-...-{holders[-1]}-{digest}"


def divide(lists: Sequence[Alike], declared: Sequence[Unit], world_size: int) -> Division:
    """Units of a job whose ranks hold these pieces. Every rank is in exactly one list.

    Raises ConfigError where ranks contradict each other or the declarations.
    """
    everyone = tuple(range(world_size))
    declared_holders = {unit.name: tuple(sorted(unit.holders)) for unit in declared}
    if declared_holders.get(UNIT_REPLICATED, everyone) != everyone:
        raise ConfigError(
            f"a declared unit is called {UNIT_REPLICATED!r} but has the holders {declared_holders[UNIT_REPLICATED]}; "
            "that name is reserved for state that all ranks hold: choose another name"
        )
    holders = _holders(lists)
    refuse_different_forms(lists)
    check_cuts(lists, declared)
    names: dict[tuple[int, ...], str] = {everyone: UNIT_REPLICATED}

    def auto_name(ranks: tuple[int, ...]) -> str:
        if ranks not in names:
            name = unit_name(ranks)
            while name in declared_holders:
                name += "+"
            names[ranks] = name
        return names[ranks]

    units: dict[str, tuple[int, ...]] = {UNIT_REPLICATED: everyone}
    nbytes: dict[str, int] = defaultdict(int)
    tensors: dict[str, int] = defaultdict(int)
    unit_of: dict[Piece, str] = {}
    for piece, ranks in holders.items():
        if piece.unit:
            unit = _declared_unit(piece, ranks, declared_holders[piece.unit])
        elif piece.empty:
            continue
        else:
            unit = auto_name(ranks)
        unit_of[piece] = unit
        if units.setdefault(unit, ranks) != ranks:
            raise ConfigError(
                f"{_called(piece)} of the unit {unit!r} is held by the ranks {ranks}, other tensors of the "
                f"unit by {units[unit]}; make the optimizers identical on all ranks of a process group"
            )
        nbytes[unit] += piece.nbytes
        tensors[unit] += 1
    hosts: dict[tuple[int, ...], dict[int, str]] = {}
    for ranks in sorted({ranks for piece, ranks in holders.items() if piece not in unit_of}):
        host = hosts[ranks] = _hosts_of_nothing(ranks, units)
        left = tuple(rank for rank in ranks if rank not in host)
        if left:
            units.setdefault(auto_name(left), left)
            host.update(dict.fromkeys(left, auto_name(left)))
    rows = {}
    for alike, alike_ranks in lists:
        row = [unit_of.get(piece) or hosts[holders[piece]][alike_ranks[0]] if piece.held else "" for piece in alike]
        rows.update(dict.fromkeys(alike_ranks, row))
    of_list = []
    for alike, alike_ranks in lists:
        row = rows[alike_ranks[0]]
        if "" in row:
            row = [
                unit or _unit_at_owner(piece, alike_ranks[0], lists, rows)
                for piece, unit in zip(alike, row, strict=True)
            ]
        of_list.append(tuple(row))
    used = {piece.unit for piece in holders}
    notes = [
        f"the declared unit {unit.name!r} takes no tensor: none matches {', '.join(unit.tensors)} that an earlier unit "
        "has not taken"
        for unit in declared
        if unit.name not in used
    ]
    ordered = dict(sorted(units.items(), key=_order))
    return Division(
        units=ordered,
        nbytes={unit: nbytes[unit] for unit in ordered},
        tensors={unit: tensors[unit] for unit in ordered},
        of_list=tuple(of_list),
        notes=tuple(notes),
    )


def _hosts_of_nothing(ranks: tuple[int, ...], units: Mapping[str, tuple[int, ...]]) -> dict[int, str]:
    """Rank -> unit for a piece that is empty on `ranks`: it goes where they keep something, lest it make a unit.

    Whole units only, so that all holders of a unit have it there.
    """
    among = set(ranks)
    fits = [(unit, holders) for unit, holders in units.items() if among.issuperset(holders)]
    hosts: dict[int, str] = {}
    for unit, holders in sorted(fits, key=lambda item: (-len(item[1]), item[1], item[0])):
        if hosts.keys().isdisjoint(holders):
            hosts.update(dict.fromkeys(holders, unit))
    return hosts


def _order(item: tuple[str, tuple[int, ...]]) -> tuple[bool, tuple[int, ...], str]:
    return item[0] != UNIT_REPLICATED, item[1], item[0]


def _holders(lists: Sequence[Alike]) -> dict[Piece, tuple[int, ...]]:
    found: dict[Piece, list[int]] = defaultdict(list)
    for alike, ranks in lists:
        for piece in alike:
            if piece.owner < 0:
                found[piece].extend(ranks)
    return {piece: tuple(sorted(ranks)) for piece, ranks in found.items()}


def _unit_at_owner(piece: Piece, rank: int, lists: Sequence[Alike], rows: Mapping[int, Sequence[str]]) -> str:
    alike = next((alike for alike, ranks in lists if piece.owner in ranks), ())
    for there, unit in zip(alike, rows.get(piece.owner, ()), strict=False):
        if (there.kind, there.name) == (piece.kind, piece.name) and there.held:
            return unit
    raise ConfigError(
        f"rank {rank} expects the optimizer's state of {piece.name!r} on rank {piece.owner}, which does not hold it; "
        "make the model and ZeroRedundancyOptimizer identical on all ranks of its process group"
    )


def _declared_unit(piece: Piece, ranks: tuple[int, ...], declared: tuple[int, ...]) -> str:
    """The unit of a declared piece that `ranks` hold. A scope (ZeRO's owners) may divide the declared one further."""
    if ranks == declared:
        return piece.unit
    if piece.scope:
        return check_unit_name(f"{piece.unit}.{piece.scope}")
    missing = sorted(set(declared) - set(ranks))
    raise ConfigError(
        f"the unit {piece.unit!r} is declared for the ranks {', '.join(map(str, declared))}, but {_called(piece)} of "
        f"rank {ranks[0]} is not on rank {missing[0]}; correct holders or tensors of units="
    )


def refuse_different_forms(lists: Sequence[Alike]) -> None:
    """ConfigError for two tensors of one name that nobody has declared to be parts, or different tensors."""
    seen: dict[tuple[str, str, str], tuple[Piece, int]] = {}
    for alike, ranks in lists:
        for piece in alike:
            first, rank = seen.setdefault((piece.unit, piece.kind, piece.name), (piece, ranks[0]))
            if first.dtype != piece.dtype or first.global_shape != piece.global_shape:
                raise ConfigError(
                    f"{_called(piece)} is {_form(first)} on rank {rank} and {_form(piece)} on rank {ranks[0]}; "
                    + (
                        f"all holders of the declared unit {piece.unit!r} must hold the same tensors: correct units="
                        if piece.unit
                        else "if these are different tensors (stages of a pipeline, tensor parallelism by "
                        "hand), declare which ranks hold which tensors: TFTRegister(..., "
                        "units=lastwords.units_from_mesh(...))"
                    )
                )
            if piece.unit and (first.shape != piece.shape or first.offsets != piece.offsets):
                raise ConfigError(
                    f"{_called(piece)} of the declared unit {piece.unit!r} is a different shard on rank "
                    f"{rank} than on rank {ranks[0]}, but all holders of a unit must hold the same shard. "
                    f"Declare a unit for each shard; omit DTensors from units=, since their placement gives their units"
                )


def _called(piece: Piece) -> str:
    return f"{'buffer' if piece.kind == 'buffer' else 'parameter'} {piece.name!r}"


def _form(piece: Piece) -> str:
    return f"{piece.dtype} {piece.global_shape}"
