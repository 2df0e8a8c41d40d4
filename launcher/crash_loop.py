"""Whether a job fails again and again, so that it is of no use to go on. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lastwords.launcher.events import Ended

FAILURES_MAX = 2
"""Entries in a row that may fail before their first step, by a process that had entered `main` again. Then one is tried
in new processes only."""

DEATHS_MAX = 3
"""Entries in a row that may fail without a step that was saved in between."""

REPEATS_MAX = 3
"""Entries in a row that may fail by the same exception of the same rank, with REPEAT_STEPS saved in between."""

REPEAT_STEPS = 10
"""An error in each step, or each time that something is logged, say; a network that fails once a day is no loop."""

NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
"""Steps, samples and addresses differ each time that an exception comes again."""


@dataclass(slots=True)
class Repeated:
    """Of one rank: the newest exception with which a process has left `main`, without its numbers.

    entry: the one that follows the failed one. step: the newest that was saved then. count: entries in a row.
    """

    text: str
    entry: int
    step: int
    count: int


@dataclass(slots=True)
class CrashLoop:
    """What has failed since a step was saved, or since a loop has begun on all ranks."""

    failures: int = 0
    """Entries that have failed before their first step."""
    deaths: int = 0
    repeated: dict[int, Repeated] = field(default_factory=dict)
    unbegun: bool = False
    """The entry that is over has failed before its first step, which has not been counted."""
    ended_since: set[int] = field(default_factory=set, repr=False)
    """Ranks whose processes have ended by themselves since a step was saved."""
    raised: dict[int, str] = field(default_factory=dict)
    """What has left `main` in the entry that is over, without its numbers; by rank. Not counted yet."""
    blamed: Ended | None = field(default=None, repr=False)
    """The first process that has ended by itself since the entry is over; one that has ended well only for want of
    another."""

    @property
    def renews(self) -> bool:
        """Whether only new processes enter `main`, since those that have entered it again fail in it."""
        return self.failures == FAILURES_MAX

    @property
    def last(self) -> str:
        """Which rank's process has ended, and why; "" where none has by itself."""
        return "" if self.blamed is None else f"rank {self.blamed.rank}: {self.blamed.words}"

    def progressed(self) -> None:
        """One more step is saved."""
        self.deaths = 0
        self.ended_since.clear()

    def begun(self) -> None:
        """All ranks are in their loop."""
        self.failures = 0

    def over(self, *, begun: bool) -> None:
        """An entry has failed. begun: after its first step."""
        self.unbegun, self.blamed = not begun, None
        self.deaths += 1

    def ended(self, event: Ended, *, was_in_main: bool, again: bool) -> None:
        """A process has ended by itself since the entry is over; again: it had entered `main` before that."""
        self.ended_since.add(event.rank)
        if self.blamed is None or (event.code and not self.blamed.code):
            self.blamed = event
        if not was_in_main:
            return
        if self.unbegun and (again or self.renews):
            self.unbegun = False
            self.failures += 1
        self.raised[event.rank] = NUMBERS.sub("#", event.raised)

    def judge(self, entry: int, step: int) -> str | None:
        """Why it is of no use to go on with `entry` from `step`; None as long as it may be.

        All ranks have left `main` by then, or they might still save a step, or fail themselves.
        """
        self._count(entry, step)
        if not self.deaths:
            self.ended_since.clear()
        last = f", the last with {self.last}" if self.last else ""
        count = max((one.count for one in self.repeated.values() if one.entry == entry), default=0)
        if count > REPEATS_MAX:
            return (
                f"{count} failures in a row by the same exception of the same rank, with at most "
                f"{REPEAT_STEPS} steps saved in between{last}"
            )
        if self.failures > FAILURES_MAX:
            return (
                f"main() has failed {self.failures} times in a row before its first step, the last time in new "
                f"processes only{last}"
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
