"""Why a resume is not exact: reasons as data, which become words only where people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lastwords.checkpoint.codec import Number

_LOST = "its local state (RNG streams, buffers, data position) is lost: "


class Cause(StrEnum):
    """What code acts on. Everything else is OTHER, and told by `Reason.detail` alone."""

    OTHER = "other"
    LOCAL_STATE_LOST = "local_state_lost"
    RESHARDED = "resharded"

    @classmethod
    def _missing_(cls, value: object) -> Cause:
        """That of a later version is told by its words."""
        return cls.OTHER


@dataclass(frozen=True, slots=True)
class Reason:
    """detail: a sentence for people. ranks: whom it concerns, sorted; () for all. unit: "" for all.

    >>> str(Reason("its loader is shuffled by another seed", ranks=(0, 1, 2, 5)))
    'ranks 0-2, 5: its loader is shuffled by another seed'
    """

    detail: str
    cause: Cause = Cause.OTHER
    ranks: tuple[Number, ...] = ()
    unit: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(sorted({*self.ranks})))

    def __str__(self) -> str:
        text = f"unit {self.unit}: {self._what}" if self.unit else self._what
        if not self.ranks:
            return text
        return f"rank{'s' * (len(self.ranks) > 1)} {ranges(self.ranks)}: {text}"

    @property
    def _what(self) -> str:
        return (_LOST if self.cause is Cause.LOCAL_STATE_LOST else "") + self.detail

    def of_rank(self, rank: int) -> Reason:
        """As `rank` says it; a reason that names ranks already stays what it is."""
        return self if self.ranks else replace(self, ranks=(rank,))

    def of_the_past(self) -> Reason:
        """As a run says it that was resumed in spite of it: nothing acts on it any more."""
        return Reason(self._what, ranks=self.ranks, unit=self.unit)


def as_reason(said: str | Reason) -> Reason:
    """A reason that nothing acts on, if it is a text."""
    return Reason(said) if isinstance(said, str) else said


def merged(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """Reasons that several ranks give alike, as one, in the order in which they come first.

    >>> [str(one) for one in merged([Reason("late", ranks=(1,)), Reason("other"), Reason("late", ranks=(0, 4))])]
    ['ranks 0-1, 4: late', 'other']
    """
    ranks: dict[Reason, set[int]] = {}
    for reason in reasons:
        # Whom a reason without ranks concerns is another question: it stands beside the same of some ranks.
        alike = replace(reason, ranks=(-1,)) if reason.ranks else reason
        ranks.setdefault(alike, set()).update(reason.ranks)
    return tuple(replace(alike, ranks=tuple(sorted(owners))) for alike, owners in ranks.items())


def first_of(reasons: Sequence[Reason]) -> str:
    """The first one, and how many more there are.

    >>> first_of([]), first_of([Reason("late")]), first_of([Reason("late"), Reason("other")])
    ('', 'late', 'late (and 1 more)')
    """
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return f"{reasons[0]}{more}" if reasons else ""


def ranges(numbers: Iterable[int]) -> str:
    """Numbers, sorted, runs of them together.

    >>> ranges([5, 0, 1, 2, 3]), ranges([7]), ranges([1, 2])
    ('0-3, 5', '7', '1-2')
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
