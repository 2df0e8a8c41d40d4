"""What a rank holds, in words that can be compared between ranks; and the units that come out of it.

A *piece* is a parameter or buffer as one rank holds it: the whole or a box of it. Two ranks whose pieces have one key
hold the same bytes. Pieces with one set of holders form a *unit*. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lastwords.errors import ConfigError
from lastwords.vocabulary import UNIT_REPLICATED

ANY_FORM = "any"
"""dtype of a buffer whose form may change while the job runs (one that is not persistent, or not there yet)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's share of a parameter (kind "model") or buffer (kind "buffer").

    shape, offsets: of the share, in elements of the whole tensor, whose shape is global_shape. dtype: "float32", ...
    scope: what else tells two pieces of one name apart, such as "zero-1" for what rank 1 of ZeRO's group owns.
    unit: name of the declared unit that takes the tensor, "" if none does.
    owner: -1 if this rank holds it; else the rank that does, and this one only reads it on a resume (ZeRO).
    nbytes and owner do not count when pieces are compared.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    scope: str = ""
    unit: str = ""
    nbytes: int = field(default=0, compare=False)
    owner: int = field(default=-1, compare=False)

    @property
    def key(self) -> str:
        """Equal for equal pieces: the same share of the same tensor.

        >>> Piece("w", "model", "float32", (2, 4), (8, 4), (2, 0)).key
        '["model","w","float32",[2,4],[8,4],[2,0],"",""]'
        """
        return json.dumps(
            [self.kind, self.name, self.dtype, self.shape, self.global_shape, self.offsets, self.scope, self.unit],
            separators=(",", ":"),
            ensure_ascii=False,
        )

    @property
    def held(self) -> bool:
        """True if this rank holds it."""
        return self.owner < 0

    @property
    def empty(self) -> bool:
        """True for the share of a rank that an uneven division has left nothing for."""
        return 0 in self.shape and 0 not in self.global_shape

    def to_json(self) -> list[Any]:
        """For the exchange between ranks."""
        box = self.shape, self.global_shape, self.offsets
        return [self.name, self.kind, self.dtype, *map(list, box), self.scope, self.unit, self.nbytes, self.owner]

    @staticmethod
    def from_json(value: Any) -> Piece:
        """Inverse of `to_json`; ConfigError for anything else.

        >>> piece = Piece("w", "model", "float32", (2, 4), (8, 4), (2, 0), nbytes=32)
        >>> Piece.from_json(piece.to_json()) == piece
        True
        """
        try:
            name, kind, dtype, shape, global_shape, offsets, *more = value
            return Piece(name, kind, dtype, tuple(shape), tuple(global_shape), tuple(offsets), *more)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"another rank describes its state in a form that this lastwords does not know ({error}); "
                "run the same version on every rank"
            ) from error


@dataclass(frozen=True, slots=True)
class Members:
    """Names of the tensors of one unit, as this rank's model calls them, in the model's order."""

    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UnitTable:
    """All units of the job, and what this rank has in them.

    units: name -> ranks that hold it, sorted. mine: this rank's units -> its tensors in them. nbytes, tensors: bytes
    and number of the unit's parameters and buffers (the optimizer's state comes on top).
    reads: units that this rank does not hold, but whose parameters it needs when it resumes (ZeRO).
    notes: what a person should know, one sentence each.
    """

    units: Mapping[str, tuple[int, ...]]
    mine: Mapping[str, Members]
    nbytes: Mapping[str, int]
    tensors: Mapping[str, int] = field(default_factory=dict)
    reads: Mapping[str, Members] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def pure(self) -> bool:
        """True if every rank holds everything: plain data parallelism, or a job of one."""
        return self.units.keys() == {UNIT_REPLICATED}

    def holding_the_same(self, rank: int) -> frozenset[int]:
        """The ranks that hold just those units that `rank` holds, itself among them."""
        held = {one: {unit for unit, ranks in self.units.items() if one in ranks}
                for one in {one for ranks in self.units.values() for one in ranks}}  # fmt: skip
        return frozenset(one for one, units in held.items() if units == held.get(rank))

    @property
    def unprotected(self) -> tuple[str, ...]:
        """Units that a single death destroys, sorted; none in a job of one, which has nobody to lose."""
        return tuple(sorted(unit for unit, ranks in self.units.items() if len(ranks) == 1 and len(self.units) > 1))
