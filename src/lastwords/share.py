"""A unit, or a share of one where several of its holders write it together, and what that is called."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

SHARES_MAX = 8
"""More writers than this do not make a file system faster by as much as it costs to gather their files."""

_SHARE = re.compile(r"([^/]+)/(0|[1-9][0-9]{0,3})of([1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True, order=True)
class Share:
    """Number `index`, from 0, of `count` shares of a unit. A whole unit is the only one of one."""

    unit: str
    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return self.unit if self.count == 1 else f"{self.unit}/{self.index}of{self.count}"

    @property
    def all(self) -> tuple[Share, ...]:
        """Every share of the unit."""
        return tuple(Share(self.unit, index, self.count) for index in range(self.count))

    @staticmethod
    def parse(name: str) -> Share:
        """Inverse of `str`; anything that is no share's name is taken for a unit's.

        >>> Share.parse("replicated"), str(Share.parse("replicated/0of4"))
        (Share(unit='replicated', index=0, count=1), 'replicated/0of4')
        """
        found = _SHARE.fullmatch(name)
        if found is None or not int(found[2]) < int(found[3]) > 1:
            return Share(name)
        return Share(found[1], int(found[2]), int(found[3]))


def whole_units(names: Iterable[str]) -> set[str]:
    """The units that are all there: by themselves, or with every one of their shares.

    >>> sorted(whole_units(["a", "b/0of2", "b/1of2", "c/1of2"]))
    ['a', 'b']
    """
    there = set(map(Share.parse, names))
    return {share.unit for share in there if there.issuperset(share.all)}
