"""Replicas that have diverged: which tensor, on which rank, and whether a majority shows who is right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lastwords.checkpoint import layout
from lastwords.errors import FormatError

Digests = Mapping[str, Mapping[str, int]]
"""Unit -> tensor's name in a checkpoint -> digest of its bytes, in the model's order."""

_RANKS_SHOWN_MAX = 8


@dataclass(frozen=True, slots=True)
class Difference:
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
                f"rank {self.suspects[0]} differs from {_ranks(self.camps[0])}, which agree, in {what}{more}: its "
                "replica has diverged, and nothing is saved from it; check the memory of its host, and what this "
                "rank computes differently"
            )
        camps = " and ".join(_ranks(camp) for camp in self.camps[:_RANKS_SHOWN_MAX])
        text = f"{camps} hold different bytes of {what}{more}, and without a majority it is unknown which are right"
        if all(len(camp) > 1 for camp in self.camps):
            text += (
                "; if each of these groups holds one tensor-parallel shard, look for randomness that differs "
                "between the groups, such as dropout seeded by rank instead of by data-parallel index"
            )
        return text


def compare(digests: Mapping[int, Digests]) -> list[Difference]:
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
    found: list[Difference] = []
    for unit, ranks in sorted(holders.items()):
        found += _differences(unit, {rank: digests[rank][unit] for rank in ranks})
    return found


def _differences(unit: str, of_rank: Mapping[int, Mapping[str, int]]) -> list[Difference]:
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
        Difference(unit, first, suspects, suspects != everyone, camps, len(more) + 1)
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


def _ranks(ranks: Sequence[int]) -> str:
    """
    >>> _ranks((3,)), _ranks((0, 2)), _ranks((0, 1, 2))
    ('rank 3', 'ranks 0 and 2', 'ranks 0, 1 and 2')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _RANKS_SHOWN_MAX:
        return f"ranks {ranks[0]}, {ranks[1]}, ..., {ranks[-1]} ({len(ranks)} ranks)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
