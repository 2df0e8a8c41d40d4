"""How the ranks of a job find out, once, which of them hold what.

Each rank writes its list of pieces into the process group's store (equal lists once), rank 0 reads all, divides them
into units, and writes one table for all and one row for each different list. An error on one rank is an error on all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lastwords.errors import ConfigError, LastWordsError
from lastwords.sharding.declare import Unit, check_units
from lastwords.sharding.grouping import Alike, Division, divide
from lastwords.sharding.pieces import Members, Piece, UnitTable

STORE_WAIT_S = 300.0
"""How long a rank waits for another rank's word in the store; ranks may load data at very different speeds."""


class World(Protocol):
    """Rank, size and a store for words that all ranks read."""

    rank: int
    size: int

    def publish(self, key: str, value: dict[str, Any]) -> None:
        """Make `value` (JSON) readable by every rank under `key`."""

    def read(self, key: str, timeout_s: float, what: str) -> dict[str, Any]:
        """The value under `key`, waiting for it; UnavailableError naming `what` after `timeout_s`."""


def agree_units(
    world: World, prefix: str, pieces_of: Callable[[], Sequence[Piece]], declared: Sequence[Unit] = ()
) -> UnitTable:
    """Units of the job and this rank's share of them; to be called by all ranks, with the same `declared`.

    prefix: a place of its own in the store. pieces_of: makes this rank's list; its LastWordsError ends all ranks.
    Raises ConfigError on every rank where one of them contradicts another or the declarations.
    """
    pieces: Sequence[Piece] = ()
    own: LastWordsError | None = None
    try:
        check_units(declared, world.size)
        pieces = pieces_of()
        _refuse_equal_keys(pieces)
    except LastWordsError as error:
        own = error
    except BaseException as error:
        # Of torch, say. The others must not wait for a list that never comes.
        world.publish(f"{prefix}/pieces/{world.rank}", {"error": f"{type(error).__name__}: {error}"})
        raise
    if world.size == 1:
        if own is not None:
            raise own
        division = divide([(pieces, (0,))], declared, 1)
        return _table(division, pieces, division.of_list[0])
    text = json.dumps([piece.to_json() for piece in pieces], separators=(",", ":")).encode()
    digest = hashlib.sha256(text).hexdigest()[:32]
    if own is not None:
        world.publish(f"{prefix}/pieces/{world.rank}", {"error": str(own)})
    else:
        # First the list, then the word that it is there.
        world.publish(f"{prefix}/list/{digest}", {"zlib": base64.b85encode(zlib.compress(text)).decode()})
        world.publish(f"{prefix}/pieces/{world.rank}", {"list": digest, "declared": _digest(declared)})
    if world.rank == 0:
        _divide_for_all(world, prefix, declared)
    word = world.read(f"{prefix}/table", STORE_WAIT_S, "rank 0 to divide the state into units")
    if own is not None:
        raise own
    if "error" in word:
        raise ConfigError(word["error"])
    row = world.read(f"{prefix}/row/{digest}", STORE_WAIT_S, "rank 0 to divide the state into units")
    units = {name: tuple(ranks) for name, ranks in word["units"].items()}
    division = Division(units, word["nbytes"], word["tensors"], (), tuple(word["notes"]))
    return _table(division, pieces, [list(units)[index] for index in row["units"]])


def _divide_for_all(world: World, prefix: str, declared: Sequence[Unit]) -> None:
    try:
        lists = _read_all(world, prefix, _digest(declared))
        division = divide(list(lists.values()), declared, world.size)
    except LastWordsError as error:
        world.publish(f"{prefix}/table", {"error": str(error)})
        return
    index = {unit: number for number, unit in enumerate(division.units)}
    for digest, row in zip(lists, division.of_list, strict=True):
        world.publish(f"{prefix}/row/{digest}", {"units": [index[unit] for unit in row]})
    world.publish(
        f"{prefix}/table",
        {
            "units": {unit: list(ranks) for unit, ranks in division.units.items()},
            "nbytes": dict(division.nbytes),
            "tensors": dict(division.tensors),
            "notes": list(division.notes),
        },
    )


def _read_all(world: World, prefix: str, declared: str) -> dict[str, Alike]:
    """Every rank's list, equal ones once. ConfigError with the lowest rank's problem, after all have come by."""
    lists: dict[str, tuple[list[Piece], list[int]]] = {}
    problem = ""
    for rank in range(world.size):
        word = world.read(f"{prefix}/pieces/{rank}", STORE_WAIT_S, f"rank {rank} to say what it holds")
        if "error" in word:
            problem = problem or f"rank {rank} cannot start: {word['error']}"
        elif word["declared"] != declared:
            problem = problem or f"rank {rank} was given other units= than rank 0; give every rank the same ones"
        elif word["list"] in lists:
            lists[word["list"]][1].append(rank)
        else:
            packed = world.read(f"{prefix}/list/{word['list']}", STORE_WAIT_S, f"what rank {rank} holds")
            text = zlib.decompress(base64.b85decode(packed["zlib"]))
            lists[word["list"]] = [Piece.from_json(item) for item in json.loads(text)], [rank]
    if problem:
        raise ConfigError(problem)
    return dict(lists)


def _refuse_equal_keys(pieces: Sequence[Piece]) -> None:
    seen: set[tuple[str, str]] = set()
    for piece in pieces:
        if (piece.kind, piece.name) in seen:
            raise ConfigError(f"two tensors of kind {piece.kind} are called {piece.name!r}; rename one of them")
        seen.add((piece.kind, piece.name))


def _digest(declared: Sequence[Unit]) -> str:
    text = json.dumps(
        [
            [
                unit.name,
                sorted(unit.holders),
                list(unit.tensors),
                [[one, repr(part)] for one, part in unit.cuts.items()],
            ]
            for unit in declared
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _table(division: Division, pieces: Sequence[Piece], row: Sequence[str]) -> UnitTable:
    mine: dict[str, tuple[list[str], list[str]]] = {}
    reads: dict[str, tuple[list[str], list[str]]] = {}
    for piece, unit in zip(pieces, row, strict=True):
        names = (mine if piece.held else reads).setdefault(unit, ([], []))
        names[piece.kind == "buffer"].append(piece.name)
    # What every rank holds is this rank's as well, even if it is only the job's extras.
    mine.setdefault(next(iter(division.units)), ([], []))
    return UnitTable(
        units=division.units,
        mine={unit: Members(tuple(mine[unit][0]), tuple(mine[unit][1])) for unit in division.units if unit in mine},
        nbytes=division.nbytes,
        tensors=division.tensors,
        reads={unit: Members(tuple(reads[unit][0])) for unit in division.units if unit in reads},
        notes=division.notes,
    )
