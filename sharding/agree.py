"""How the ranks of a job find out, once, which of them hold what.

Each rank writes its list of pieces into the process group's store (equal lists once), rank 0 reads all, divides them
into units, and writes one table for all and one row for each different list. An error on one rank is an error on all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lastwords.errors import ConfigError, LastWordsError, StorageError, named, some
from lastwords.sharding.declare import Unit, check_units
from lastwords.sharding.grouping import Alike, Division, divide
from lastwords.sharding.pieces import Members, Piece, UnitTable

STORE_WAIT_S = 300.0
"""How long a rank waits for another rank's word in the store; ranks may load data at very different speeds."""

_SHOWN_MAX = 8


class WorldLike(Protocol):
    """Rank, size and a store for words that all ranks read."""

    rank: int
    size: int

    def publish(self, key: str, value: dict[str, Any]) -> None:
        """Make `value` (JSON) readable by every rank under `key`."""

    def read(self, key: str, timeout_s: float, what: str) -> dict[str, Any]:
        """The value under `key`, waiting for it; UnavailableError naming `what` after `timeout_s`."""


def agree_units(
    world: WorldLike, prefix: str, pieces_of: Callable[[], Sequence[Piece]], declared: Sequence[Unit] = ()
) -> UnitTable:
    """Units of the job and this rank's share of them; to be called by all ranks, with the same `declared`.

    prefix: a place of its own in the store. pieces_of: makes this rank's list; its LastWordsError ends all ranks.
    Raises ConfigError on every rank where one of them contradicts another or the declarations.
    """
    ranks = range(world.size)
    own = _OwnPieces(world, prefix, ranks, pieces_of, declared)
    if world.size == 1:
        own.raise_error()
        division = divide([(own.pieces, (0,))], declared, 1)
        return _table(division, own.pieces, division.of_list[0])

    def units(lists: Mapping[str, Alike]) -> dict[str, Any]:
        division = divide(list(lists.values()), declared, world.size)
        index = {unit: number for number, unit in enumerate(division.units)}
        for digest, row in zip(lists, division.of_list, strict=True):
            world.publish(f"{prefix}/row/{digest}", {"units": [index[unit] for unit in row]})
        return {
            "units": {unit: list(ranks) for unit, ranks in division.units.items()},
            "nbytes": dict(division.nbytes),
            "tensors": dict(division.tensors),
            "notes": list(division.notes),
        }

    word = _from_lowest(world, prefix, ranks, own, units, "cannot start", "divide the state into units")
    row = world.read(f"{prefix}/row/{own.digest}", STORE_WAIT_S, "rank 0 to divide the state into units")
    division = Division(
        {name: tuple(ranks) for name, ranks in word["units"].items()},
        word["nbytes"],
        word["tensors"],
        (),
        tuple(word["notes"]),
    )
    return _table(division, own.pieces, [list(division.units)[index] for index in row["units"]])


def use_all_lists(
    world: WorldLike,
    prefix: str,
    ranks: Sequence[int],
    pieces_of: Callable[[], Sequence[Piece]],
    declared: Sequence[Unit],
    use: Callable[[Sequence[Alike]], None],
    path: str = "",
) -> None:
    """The lowest of `ranks` (sorted) calls `use` with everybody's pieces; equal lists come as one, with their ranks.

    To be called by all of `ranks`, which are global ones, with the same `prefix`, `declared` and `path`, which is what
    `use` writes to. Returns when `use` has returned. An error of one rank's `pieces_of`, or of `use`, is an error on
    all, and so is another path.
    """
    own = _OwnPieces(world, prefix, ranks, pieces_of, declared, path)
    if len(ranks) == 1:
        own.raise_error()
        use([(own.pieces, tuple(ranks))])
        return

    def used(lists: Mapping[str, Alike]) -> dict[str, Any]:
        use(list(lists.values()))
        return {}

    _from_lowest(world, prefix, ranks, own, used, "cannot say what it holds", "join what all hold")


class _OwnPieces:
    """This rank's pieces, or its error; the others can read either of them from here on."""

    def __init__(
        self,
        world: WorldLike,
        prefix: str,
        ranks: Sequence[int],
        pieces_of: Callable[[], Sequence[Piece]],
        declared: Sequence[Unit],
        path: str = "",
    ) -> None:
        self.pieces: Sequence[Piece] = ()
        self.digest = self.declared = ""
        self._error: LastWordsError | None = None
        text = b""
        try:
            check_units(declared, world.size)
            self.pieces = pieces_of()
            _refuse_equal_keys(self.pieces)
            text = json.dumps([piece.to_json() for piece in self.pieces], separators=(",", ":")).encode()
            self.digest = hashlib.sha256(text).hexdigest()[:32]
            self.declared = _digest(declared)
        except LastWordsError as error:
            self._error = error
        except BaseException as error:
            # Of torch, say. The others must not wait for a list that never comes.
            world.publish(f"{prefix}/pieces/{world.rank}", {"error": named(error)})
            raise
        if len(ranks) == 1:
            return
        if self._error is not None:
            world.publish(f"{prefix}/pieces/{world.rank}", {"error": str(self._error)})
        else:
            # First the list, then the word that it is there.
            world.publish(f"{prefix}/list/{self.digest}", {"zlib": base64.b85encode(zlib.compress(text)).decode()})
            word = {"list": self.digest, "declared": self.declared, "path": path}
            world.publish(f"{prefix}/pieces/{world.rank}", word)

    def raise_error(self) -> None:
        """The error, if there is one: it says more than what the others have heard of it."""
        if self._error is not None:
            raise self._error


def _from_lowest(
    world: WorldLike,
    prefix: str,
    ranks: Sequence[int],
    own: _OwnPieces,
    make: Callable[[Mapping[str, Alike]], dict[str, Any]],
    fails: str,
    doing: str,
) -> dict[str, Any]:
    """What the lowest rank makes of everybody's lists, on every rank; an error there is one on every rank."""
    key = f"{prefix}/table"
    raised: LastWordsError | None = None
    if world.rank == ranks[0]:
        try:
            word = _made(world, key, make, _read_all(world, prefix, ranks, own.declared, fails))
        except LastWordsError as error:
            raised, word = error, {"error": str(error), "storage": isinstance(error, StorageError)}
        world.publish(key, word)
    else:
        word = world.read(key, STORE_WAIT_S, f"rank {ranks[0]} to {doing}")
    own.raise_error()
    if raised is not None:
        raise raised
    if "error" in word:
        raise (StorageError if word.get("storage") else ConfigError)(word["error"])
    return word


def _made(
    world: WorldLike, key: str, make: Callable[[Mapping[str, Alike]], dict[str, Any]], lists: Mapping[str, Alike]
) -> dict[str, Any]:
    try:
        return make(lists)
    except LastWordsError:
        raise
    except BaseException as error:
        world.publish(key, {"error": named(error)})
        raise


def _read_all(world: WorldLike, prefix: str, ranks: Sequence[int], declared: str, fails: str) -> dict[str, Alike]:
    """Every rank's list, equal ones once. ConfigError with the lowest rank's problem, after all have come by."""
    lists: dict[str, tuple[list[Piece], list[int]]] = {}
    problem = ""
    paths: dict[str, list[int]] = {}
    for rank in ranks:
        word = world.read(f"{prefix}/pieces/{rank}", STORE_WAIT_S, f"the state description of rank {rank}")
        if "error" in word:
            problem = problem or f"rank {rank} {fails}: {word['error']}"
            continue
        paths.setdefault(word["path"], []).append(rank)
        if word["declared"] != declared:
            different = f"rank {rank} has different units= than rank {ranks[0]}; pass the same units= on every rank"
            problem = problem or different
        elif word["list"] in lists:
            lists[word["list"]][1].append(rank)
        else:
            packed = world.read(f"{prefix}/list/{word['list']}", STORE_WAIT_S, f"the state description of rank {rank}")
            text = zlib.decompress(base64.b85decode(packed["zlib"]))
            lists[word["list"]] = [Piece.from_json(item) for item in json.loads(text)], [rank]
    if len(paths) > 1:
        named = (f"rank {some(those, _SHOWN_MAX)}: {path!r}" for path, those in paths.items())
        problem = problem or (
            f"the ranks have different paths ({some(named, _SHOWN_MAX, '; ')}); only one file is written: "
            "pass the same path on every rank"
        )
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
