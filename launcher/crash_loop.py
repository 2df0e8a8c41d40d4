"""Whether a job fails again and again, so that it is of no use to go on. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lastwords.launcher.events import Ended

DEATHS_MAX = 3
"""Generations in a row that may fail without a step that was saved in between."""

REPEATS_MAX = 3
"""Generations in a row that may fail by the same exception of the same rank, with REPEAT_STEPS saved in between."""

REPEAT_STEPS = 10
"""An error in each step, or each time that something is logged, say; a network that fails once a day is no loop."""

NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
"""Steps, samples and addresses differ each time that an exception comes again."""


@dataclass(slots=True)
class Repeated:
    """Of one rank: the newest exception with which a process has ended, without its numbers.

    entry: the generation that follows the failed one. step: the newest that was saved then. count: in a row.
    """

    text: str
    entry: int
    step: int
    count: int


@dataclass(slots=True)
class CrashLoop:
    """What has failed since a step was saved."""

    deaths: int = 0
    repeated: dict[int, Repeated] = field(default_factory=dict)
    ended_since: set[int] = field(default_factory=set, repr=False)
    """Ranks whose processes have ended by themselves since a step was saved."""
    raised: dict[int, str] = field(default_factory=dict)
    """What processes have ended with in the generation that is over, without its numbers; by rank. Not counted yet."""
    blamed: Ended | None = field(default=None, repr=False)
    """The first process that has ended by itself since the generation is over; one that has ended well only for want
    of another."""
    useless: str = ""
    """Why another generation would be none."""

    @property
    def last(self) -> str:
        """Which rank's process has ended, and why; "" where none has by itself."""
        return "" if self.blamed is None else f"rank {self.blamed.rank}: {self.blamed.words}"

    def progressed(self) -> None:
        """One more step is saved."""
        self.deaths = 0
        self.ended_since.clear()

    def over(self) -> None:
        """A generation has failed."""
        self.blamed = None
        self.deaths += 1

    def ended(self, event: Ended) -> None:
        """A process has ended by itself since the generation is over."""
        self.ended_since.add(event.rank)
        if self.blamed is None or (event.code and not self.blamed.code):
            self.blamed = event
        self.raised[event.rank] = NUMBERS.sub("#", event.raised)

    def give_up(self, why: str) -> None:
        """Another generation would not go on from this one; all ranks may end as after any failure."""
        self.useless = self.useless or why

    def judge(self, entry: int, step: int) -> str | None:
        """Why it is of no use to go on with `entry` from `step`; None as long as it may be.

        All ranks have ended by then, or they might still save a step, or fail themselves.
        """
        self._count(entry, step)
        if self.useless:
            return self.useless
        if not self.deaths:
            self.ended_since.clear()
        last = f", the last with {self.last}" if self.last else ""
        count = max((one.count for one in self.repeated.values() if one.entry == entry), default=0)
        if count > REPEATS_MAX:
            return (
                f"{count} failures in a row by the same exception of the same rank, with at most "
                f"{REPEAT_STEPS} steps saved in between{last}"
            )
        if self.deaths > DEATHS_MAX:
            ranks = ", ".join(map(str, sorted(self.ended_since))) or "unknown"
            return (
                f"{self.deaths} failures in a row, and no step after {step} was saved; processes ended of ranks "
                f"{ranks}{last}"
            )
        return None

    def _count(self, entry: int, step: int) -> None:
        for rank, text in self.raised.items():
            before = self.repeated.pop(rank, None)
            same = before and (before.text, before.entry) == (text, entry - 1) and step <= before.step + REPEAT_STEPS
            if text:
                self.repeated[rank] = Repeated(text, entry, step, before.count + 1 if before and same else 1)
        self.raised.clear()
